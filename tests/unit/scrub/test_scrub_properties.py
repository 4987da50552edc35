"""Laws of scrubbing, on text put together at random from words, separators, secrets and odd characters."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st
from scrub_examples import ENCODINGS, PASSWORD_PLACES, PASSWORDS, PLACES, SHAPES, make

from composer_replication.privacy import Scrubber

KEYS = [make(shape, seed) for shape in SHAPES for seed in range(2)]
PIECES = [template.format(key) for key in KEYS[::7] for template in PLACES.values()]
PIECES += [template.format(word) for word in PASSWORDS for template in PASSWORD_PLACES.values()]
PIECES += [encode(key) for key in KEYS[::9] for encode in ENCODINGS.values()]
GLUE = [
    "",
    " ",
    "\n",
    "\\n",
    '"',
    "'",
    "=",
    ": ",
    "&",
    "/",
    "-",
    "\t",
    ";",
    "`",
    "\0",
    "é",
    "→",
    "密码",
    "<",
    ">",
    "<PASSWORD_1>",
    "\x1b[33m",
    "\uff1a",
    "|",
    ",",
]
WORDS = [
    "sha256",
    "digest: ",
    "user,password\n",
    "process.env.TOKEN || ",
    "USER_2",
    "token",
    "password",
    "key",
    "the",
    "=",
    "/home/alice",
    "secret is",
    "--token",
    "API_KEY",
    "x1",
    "Bearer",
    "%20",
]

# By number: a strategy over the strings themselves has a repr of many kilobytes.
key = st.integers(0, len(KEYS) - 1).map(lambda i: KEYS[i])
piece = st.one_of(
    key, st.integers(0, len(PIECES) - 1).map(lambda i: PIECES[i]), st.sampled_from(WORDS), st.text(max_size=12)
)
texts = st.lists(st.tuples(piece, st.sampled_from(GLUE)), max_size=6).map(lambda parts: "".join(map("".join, parts)))
values = st.recursive(
    texts | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "password", "id", "cwd", "sha256", "value"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def holes(text: str) -> str:
    """The text with every placeholder alike: number and kind follow the first appearance of a value."""
    return re.sub(r"<[A-Z][A-Z0-9_]*_\d+>|USER_\d+", "<>", text)


@given(texts)
def test_scrubbing_twice_changes_nothing(text):
    scope = Scrubber().scope()
    once = scope.text(text)
    assert scope.text(once) == once
    assert Scrubber().scope().text(once) == once


@given(values)
def test_scrubbing_a_record_twice_changes_nothing(value):
    once = Scrubber().scope().value(value)
    assert Scrubber().scope().value(once) == once


@given(st.lists(texts, min_size=1, max_size=5))
def test_what_is_found_does_not_depend_on_what_came_before(many):
    shared = Scrubber()
    forwards, backwards = shared.scope(), shared.scope()
    there = [holes(forwards.text(text)) for text in many]
    back = [holes(backwards.text(text)) for text in reversed(many)]
    alone = [holes(Scrubber().scope().text(text)) for text in many]
    assert there == back[::-1] == alone


@given(st.lists(texts, min_size=1, max_size=5))
def test_strings_of_a_record_are_scrubbed_like_texts(many):
    record, one_by_one = Scrubber().scope(), Scrubber().scope()
    # In fields of their own: a list may be a command line, where `--token` says what the next string is.
    fields = {f"text{number}": text for number, text in enumerate(many)}
    assert record.value(fields) == {name: one_by_one.text(text) for name, text in fields.items()}
    assert record.report == one_by_one.report


@given(st.lists(values, min_size=1, max_size=5))
def test_records_do_not_depend_on_records_before_them(many):
    shared = Scrubber()
    there = [shared.scope().value(value) for value in many]
    back = [shared.scope().value(value) for value in reversed(many)]
    assert there == back[::-1] == [Scrubber().scope().value(value) for value in many]


@given(key, texts, texts)
@example(KEYS[102], "sha256", "")  # as long as such a hash in base64
@example(KEYS[102], "sha256 ", "")
@example(KEYS[102], 'sha256"', "")
@example(KEYS[102], "sha256:", "")
def test_a_key_between_blanks_never_survives(key, before, after):
    assert key not in Scrubber().scope().text(f"{before} {key} {after}")


@given(st.text())
def test_any_text_at_all_is_taken(text):
    scope = Scrubber(user_names=["al"], env_values={"T": "some-secret-1"}).scope()
    once = scope.text(text)
    assert scope.text(once) == once


@given(key, st.sampled_from(["密码是 {}", "пароль: {}", "clé — {} ✓", "\U0001f511 {}", "{}\u200b"]))
def test_other_scripts_around_a_key(key, template):
    assert key not in Scrubber().scope().text(template.format(key))
