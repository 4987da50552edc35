"""Placeholders, records, reports and people: the parts of a scope that do not depend on any one rule."""

from __future__ import annotations

import json
import pickle

import pytest
from scrub_examples import ALNUM, PASSWORDS, make, pem

from composer_replication.privacy import Scrubber, ScrubReport
from cpu_time import least_cpu_seconds

KEY, OTHER = make("github classic"), make("github classic", 1)


def test_the_same_value_has_the_same_placeholder_and_numbers_follow_appearance():
    scope = Scrubber().scope()
    assert (
        scope.text(f"{KEY} then {OTHER} then {KEY}") == "<GITHUB_TOKEN_1> then <GITHUB_TOKEN_2> then <GITHUB_TOKEN_1>"
    )
    assert scope.text(f"later {OTHER}") == "later <GITHUB_TOKEN_2>"
    assert scope.value({"a": [f"see {KEY}"]}) == {"a": ["see <GITHUB_TOKEN_1>"]}


def test_scopes_do_not_share_numbers_and_the_order_of_scopes_does_not_matter():
    scrubber = Scrubber()
    first = [scrubber.scope().text(text) for text in (f"a {KEY}", f"b {OTHER}")]
    again = [Scrubber().scope().text(text) for text in (f"b {OTHER}", f"a {KEY}")]
    assert first == again[::-1] == ["a <GITHUB_TOKEN_1>", "b <GITHUB_TOKEN_1>"]


def test_a_record_without_secrets_is_the_same_object():
    record = {"type": "user", "content": [{"text": "hello there, nothing here"}, 3, None, True], "uuid": "x" * 30}
    scope = Scrubber().scope()
    assert scope.value(record) is record
    assert scope.value(record) is record


def test_a_value_under_a_secret_name_goes_whole():
    record = {"password": "plain words", "apiKey": "short", "user": "bob", "nested": [{"client_secret": ["a1", "b2"]}]}
    clean = Scrubber().scope().value(record)
    assert clean == {"password": "<PASSWORD_1>", "apiKey": "<SECRET_1>", "user": "bob",
                     "nested": [{"client_secret": ["<SECRET_2>", "<SECRET_3>"]}]}  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        {"name": "DB_PASSWORD", "value": "hunter" + "2222"},
        {"arguments": json.dumps({"password": PASSWORDS[0]})},
        {"arguments": json.dumps({"deep": json.dumps({"token": KEY})})},
        {"pin": 48213377, "otp": "998877"},
        {"kind": "Secret", "data": {"a": 1, "password": "aHVudGVyMg=="}},
        {"toolUseResult": {"stdout": f"ok\n{pem()}\n", "stderr": ""}},
        {f"/srv/{KEY}": "a key of the object is text too"},
        ("tuple", KEY),
    ],
)
def test_nothing_of_a_record_survives(record):
    secrets = ["hunter" + "2222", PASSWORDS[0], KEY, "48213377", "998877", "aHVudGVyMg==", pem().splitlines()[3]]
    text = repr(Scrubber().scope().value(record))
    assert [secret for secret in secrets if secret in text] == []


def test_references_types_counts_and_signatures_stay():
    record = {
        "password": "${DB_PASSWORD}",
        "token": "string",
        "usage": {"input_tokens": 123456, "max_tokens": "4096"},
        "content": [{"type": "thinking", "thinking": "hm", "signature": make("azure storage") * 4}],
        "source": {"type": "base64", "media_type": "image/png", "data": make("unknown base64") * 9},
        "gitHash": "0123456789abcdef0123456789abcdef01234567",
    }
    assert Scrubber().scope().value(record) is record


def test_report_and_repr_hold_counts_and_no_value():
    scrubber = Scrubber(env_values={"X_TOKEN": "value" + "-of-x-12"})
    scope = scrubber.scope()
    scope.text(f"{KEY} {KEY} password={PASSWORDS[0]} value-of-x-12")
    assert scope.report.counts == {"ENV_SECRET": 1, "GITHUB_TOKEN": 2, "PASSWORD": 1}
    shown = repr([scrubber, scope, scope.report, scope.report.to_dict(), str(scope)])
    assert not [value for value in (KEY, PASSWORDS[0], "value-of-x-12") if value in shown]


def test_a_report_travels_between_processes():
    report = ScrubReport({"JWT": 1, "PASSWORD": 2})
    assert report == pickle.loads(pickle.dumps(report))


PEOPLE = {
    "/home/alice/app": "/home/USER_1/app",
    "/Users/alice/app": "/Users/USER_1/app",
    r"C:\Users\alice\app": r"C:\Users\USER_1\app",
    "C:\\\\Users\\\\alice\\\\app": "C:\\\\Users\\\\USER_1\\\\app",
    "~/.claude/projects/-home-alice-app/x.jsonl": "~/.claude/projects/-home-USER_1-app/x.jsonl",
    "file:///home/alice": "file:///home/USER_1",
    "cd /home/alice && ls /home/bob": "cd /home/USER_1 && ls /home/USER_2",
    "path=%2Fhome%2Falice%2Fapp": "path=%2Fhome%2FUSER_1%2Fapp",
    "/home/USER/app": "/home/USER/app",
    "/home/runner/work": "/home/runner/work",
    "/home/USER_1/app": "/home/USER_1/app",
    "take-home-pay and --home-dir x": "take-home-pay and --home-dir x",
}


@pytest.mark.parametrize("text", PEOPLE)
def test_home_directories_become_pseudonyms(text):
    assert Scrubber().scope().text(text) == PEOPLE[text]


def test_known_people_are_found_anywhere_and_one_person_has_one_pseudonym():
    scope = Scrubber(home_dirs=["/data/people/carol"], user_names=["carol", "dave"]).scope()
    text = "drwx carol staff /data/people/carol/x by dave <carol@example.org> -data-people-carol-x carolina"
    assert scope.text(text) == "drwx USER_1 staff /home/USER_1/x by USER_2 <USER_1@example.org> -home-USER_1-x carolina"
    assert scope.value({"user": "carol"}) == {"user": "USER_1"}


HUGE = {
    "letters": "a" * 1_000_000,
    "hex": "0123456789abcdef" * 62_500,
    "base64": ("".join(ALNUM) * 17_000)[:1_000_000],
    "dashes": "sk-" * 333_333,
    "jwt heads": "eyJ" * 333_333,
    "percents": "%41" * 333_333,
    "percent far away": "a" * 999_000 + "%41",
    "quotes": "password='" * 100_000,
    "signs": "password=" * 111_111,
    "key words": "password is the " * 62_500,
    "spaces": "password" + " " * 1_000_000,
    "addresses": "http://a:" * 111_111,
    "begins": "-----BEGIN PRIVATE KEY-----" * 37_000,
    "backslashes": "\\" * 1_000_000,
    "slashes": "/a1" * 333_333,
    "dots": "a.b1" * 250_000,
    "env dump": "".join(f"TOKEN_{i}=Value{i}x9\n" for i in range(40_000)),
    "cookies": "Cookie: a=bbbbbb1; " * 50_000,
    "wrapped": ("QUJD" * 19 + "\n") * 13_000,
    "users": "/home/a/" * 125_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_a_line_of_a_megabyte_takes_seconds_at_most(name):
    scrubber = Scrubber(user_names=["zoe"])
    assert least_cpu_seconds(lambda: scrubber.scope().text(HUGE[name]), enough=10, rounds=2) < 10
