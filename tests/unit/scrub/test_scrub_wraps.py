"""A value broken by the end of a line, at every column: nothing of ten characters stays."""

from __future__ import annotations

import json

import pytest
from scrub_examples import make

from composer_replication.privacy import Scrubber

KINDS = {
    "export": ("export GITHUB_TOKEN={}\nnext line", make("github classic")),
    "bare": ("use {} for it", make("github classic")),
    "call": ('client = Anthropic(api_key="{}")\nx=1', make("anthropic")),
    "aws": ("aws_secret_access_key = {}\nregion = us", make("aws secret")),
    "aws id": ("id {} ok", make("aws id")),
    "header": ("Authorization: Bearer {}\nAccept: */*", make("jwt")),
    "address": ("DATABASE_URL=postgres://app:{}@db.example.org:5432/shop\n", "Kestrel-14-" + "marble-Otter"),
    "quoted": ('password = "{}"\nx', "Kestrel-14-" + "marble!Otter"),
    "typed": ('    password: str = "{}",\n', "aB3dE5fG7hI9" + "kLmN0pQr"),
    "yaml": ("db:\n  password: {}\n  host: db", "marble-otter-" + "4821-Kestrel"),
    "hex": ("SECRET_KEY={}\n", "9631ac63045cfabddacc69fc06e919b4" + "c13eb9139631ac63045cfabddacc69fc"),
    "command": ("curl -u ada:{} https://x.example.org", "Kestrel-14-" + "marble-Otter"),
    "known": ("value {} shown", "giMmDS8UXgCo" + "-ipkPfUCqND2R"),
    "phrase": ("mnemonic: {}\n", "abandon ability casual daring echo fabric galaxy hazard icon jungle kitchen lemon"),
}
BREAKS = {
    "newline": "\n",
    "indent": "\n    ",
    "diff": "\n+",
    "indented diff": "\n+    ",
    "backslash": "\\\n",
    "backslash and indent": "\\\n    ",
    "carriage return": "\r\n",
}


@pytest.mark.parametrize("mark", BREAKS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_ten_characters_stays_at_any_column(kind, mark):
    template, secret = KINDS[kind]
    scrubber = Scrubber(env_values={"X_TOKEN": secret} if kind == "known" else {})
    before = "+" if "diff" in mark else ""
    left = {
        column
        for column in range(1, len(secret))
        for clean in [scrubber.scope().text(before + template.format(secret[:column] + BREAKS[mark] + secret[column:]))]
        if any(secret[at : at + 10] in clean for at in range(len(secret) - 9))
    }
    assert left == set()


@pytest.mark.parametrize(
    "text",
    [
        "DB_PASSWORD_FILE=/run/a1\nDB_HOST=database-server-1\n",
        "src/lib/module_one2.py\nsrc/lib/module_two3.py\nsrc/lib/module_three4.py\n",
        "step-1-checkout\nstep-2-install\nstep-3-run-the-tests\n",
        "tests/live_test.exs:102\n** (RuntimeError) no route2 found\n",
    ],
)
def test_lines_that_only_follow_each_other_stay(text):
    assert Scrubber().scope().text(text) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_end_that_json_writes_counts_too(kind):
    template, secret = KINDS[kind]
    scrubber = Scrubber(env_values={"X_TOKEN": secret} if kind == "known" else {})
    left = {
        column
        for column in range(1, len(secret), 5)
        for clean in [
            scrubber.scope().text(json.dumps({"c": template.format(secret[:column] + "\n" + secret[column:])}))
        ]
        if any(secret[at : at + 10] in clean for at in range(len(secret) - 9))
    }
    assert left == set()


@pytest.mark.parametrize("width", [20, 33, 47, 62])
def test_what_a_terminal_broke_into_lines_of_one_width_is_one_value(width):
    line = "curl -sH 'Authorization: Bearer " + make("jwt") + "' https://api.example.org/user"
    shown = "\n".join(line[at : at + width] for at in range(0, len(line), width))
    clean = "".join(Scrubber().scope().text(shown).split())
    assert [at for at in range(len(make("jwt")) - 9) if make("jwt")[at : at + 10] in clean] == []


def test_joined_lines_far_apart_keep_their_places():
    text = "PASSWORD=Kestrel-14-\nmarble!\n" + "plain words only\n" * 60 + "API_TOKEN=aB3dE5fG7h\nI9kLmN0pQr\nend"
    clean = Scrubber().scope().text(text)
    assert clean.count("plain words only") == 60
    assert clean.endswith("\nend")
    assert "marble" not in clean
    assert "N0pQr" not in clean
