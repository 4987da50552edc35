"""A placeholder stands for one value: also beside placeholders that a text had before."""

from __future__ import annotations

import pytest
from scrub_examples import make

from composer_replication.privacy import Scrubber

SECRET, OTHER = "Kx7!" + "vQ2m#Lp9", "zebra-" + "quartz-881"


def test_a_text_with_placeholders_keeps_their_numbers_for_itself():
    scope = Scrubber().scope()
    assert scope.text(f"it was <PASSWORD_3>, now password={SECRET}") == "it was <PASSWORD_3>, now password=<PASSWORD_4>"
    assert scope.text(f"password={OTHER}") == "password=<PASSWORD_5>"


def test_what_came_before_is_behind_them_as_well():
    scope = Scrubber().scope()
    assert scope.text("the log says <PASSWORD_1> and /home/USER_1/x") == "the log says <PASSWORD_1> and /home/USER_1/x"
    assert scope.text(f"password={SECRET} in /home/alice") == "password=<PASSWORD_2> in /home/USER_2"


@pytest.mark.parametrize("rows", [["a", "see <PASSWORD_2>"], {"<PASSWORD_2>": [1, None]}, ("x", ["<PASSWORD_2>"])])
def test_a_caller_reserves_what_comes_later(rows):
    scope = Scrubber().scope()
    scope.reserve(rows)
    assert scope.text(f"password={SECRET}") == "password=<PASSWORD_3>"
    assert scope.report.counts == {"PASSWORD": 1}


def test_rows_scrubbed_before_do_not_merge_with_what_is_found_now():
    rows = ["login with password=<PASSWORD_1>", f"and {OTHER}; see /home/USER_1/x and bobby"]
    scope = Scrubber(env_values={"A_PASSWORD": OTHER}, user_names=["bobby"]).scope()
    scope.reserve(rows)
    assert [scope.text(row) for row in rows] == [rows[0], "and <ENV_SECRET_1>; see /home/USER_1/x and USER_2"]


def test_numbers_are_reserved_again_in_every_scope():
    scrubber, text = Scrubber(), "it was <GITHUB_TOKEN_1>"
    for _ in range(3):
        scope = scrubber.scope()
        record = {"a": text, "b": [text]}
        assert scope.value(record) is record
        assert scope.text(make("github classic")) == "<GITHUB_TOKEN_2>"


def test_an_absurd_number_is_no_reason_to_count_on_from_there():
    scope = Scrubber().scope()
    assert scope.text(f"<PASSWORD_99999999999> password={SECRET}") == "<PASSWORD_99999999999> password=<PASSWORD_1>"


@pytest.mark.parametrize(
    "record",
    [
        {"/home/alice/a": 1, "/home/USER_1/a": 2},
        {"/home/USER_1/a": 1, "/home/alice/a": 2},
        {"/data/people/alice/a": 1, "/home/alice/a": 2, "/home/USER_1/a": 3, "/home/USER_1/a#2": 4},
        {f"password={SECRET}": 1, "password=<PASSWORD_1>": 2},
    ],
)
def test_no_key_takes_the_place_of_another(record):
    scrubber = Scrubber(home_dirs=["/data/people/alice"])
    clean = scrubber.scope().value(record)
    assert list(clean.values()) == list(record.values())
    assert not [word for word in ("alice", SECRET) if word in repr(clean)]
    assert Scrubber().scope().value(clean) == clean
