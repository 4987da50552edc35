"""Every kind of secret, in every place and behind every encoding, is gone; what is not a secret stays."""

from __future__ import annotations

import base64
import json
import re

import pytest
from scrub_examples import ENCODINGS, PASSWORD_PLACES, PASSWORDS, PLACES, SHAPES, make, pem

from composer_replication.privacy import Rule, Scrubber, secret_looking_environment


def scrub(text: str) -> str:
    return Scrubber().scope().text(text)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_key_is_found_in_every_place(shape):
    survivors = [
        (place, seed)
        for seed in range(3)
        for place, template in PLACES.items()
        if make(shape, seed) in scrub(template.format(make(shape, seed)))
    ]
    assert survivors == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_key_is_found_behind_every_encoding(encoding):
    encoded = {shape: ENCODINGS[encoding](make(shape)) for shape in SHAPES}
    assert [shape for shape, text in encoded.items() if text in scrub(f"value {text} end")] == []


@pytest.mark.parametrize("place", PASSWORD_PLACES)
def test_a_password_is_found_by_its_name(place):
    texts = {password: scrub(PASSWORD_PLACES[place].format(password)) for password in PASSWORDS}
    assert [password for password, text in texts.items() if password in text] == []


@pytest.mark.parametrize("newline", ["\n", "\\n", "\r\n"])
@pytest.mark.parametrize("cut", [None, 500])
def test_a_private_key_goes_whole_even_without_its_end(newline, cut):
    key = pem(newline)[:cut]
    assert scrub(f"cat key.pem{newline}{key}") == f"cat key.pem{newline}<PRIVATE_KEY_1>"


def test_base64_over_several_lines_is_read_as_one():
    encoded = base64.b64encode(
        ("note " * 12 + f"DB_PASSWORD={PASSWORDS[0]}\nAPI_TOKEN={make('groq')}").encode()
    ).decode()
    lines = "\n".join(encoded[i : i + 76] for i in range(0, len(encoded), 76))
    assert scrub(f"see\n{lines}\ndone") == "see\n<ENCODED_SECRET_1>\ndone"


def test_credentials_in_an_address_leave_the_address_readable():
    assert scrub("redis://:" + "pa55" + "word@cache:6379/0") == "redis://:<URL_PASSWORD_1>@cache:6379/0"


def test_a_value_known_from_the_environment_is_found_in_every_spelling():
    value = "correct horse" + "/battery&staple"
    scope = Scrubber(env_values={"PHRASE": value}).scope()
    spellings = [
        value,
        json.dumps(json.dumps(value)),
        value.replace(" ", "%20").replace("/", "%2F").replace("&", "%26"),
    ]
    assert [scope.text(f"[{text}]").count("ENV_SECRET") for text in spellings] == [1, 1, 1]
    encoded = base64.b64encode(f"x {value}".encode()).decode()
    assert scope.text(encoded) == "<ENCODED_SECRET_1>"


def test_a_known_value_is_found_after_a_clean_text_that_looks_the_same():
    value = "plain-lower-case-words"
    scope = Scrubber(env_values={"NAME": value}).scope()
    assert [scope.text(f"{value}{tail}") for tail in ("", "", " again")] == ["<ENV_SECRET_1>"] * 2 + [
        "<ENV_SECRET_1> again"
    ]


def test_own_rules_are_added():
    rule = Rule("ACME_BADGE", re.compile(r"badge#\d{4}"), ("badge#",))
    assert Scrubber(extra_rules=[rule]).scope().text("my badge#1234.") == "my <ACME_BADGE_1>."


def test_entropy_can_be_turned_off():
    text = f"look at {make('unknown base62')}"
    assert Scrubber(entropy=False).scope().text(text) == text
    assert scrub(text) == "look at <HIGH_ENTROPY_1>"


CLEAN = [
    "commit 3f785b2a9c1d4e6f8a0b1c2d3e4f5a6b7c8d9e0f",
    "git checkout 3f785b2a9c1d4e6f8a0b1c2d3e4f5a6b7c8d9e0f -- src",
    '"integrity": "sha512-' + "aB3+" * 21 + 'aA=="',
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  dist/app.tar.gz",
    "request 258c7280-ae70-4798-800f-63464d01a85d failed",
    "toolu_01Dwt4CUN4SDdzLNw58q4nMz",
    "call_a1B2c3D4e5F6g7H8i9J0k1L2",
    "src/composer_replication/batch/alignment.py",
    "getUserAccountSettingsFromLocalStorageOrDefault",
    "test_that_a_very_long_function_name_is_not_a_secret_2",
    "max_tokens: 4096, input_tokens=1234567, cache_creation_input_tokens: 99",
    'password = os.environ["DB_PASSWORD"]',
    "token = get_token(request.user)",
    "const apiKey = process.env.API_KEY;",
    "password: string;",
    "def login(user: str, password: str) -> None:",
    "The password is required and must not be empty.",
    "Enter your API key: ",
    "export TOKEN=${GITHUB_TOKEN}",
    "secrets: inherit",
    "http://localhost:3000/@scope/package",
    "https://example.org/path?page=2&sort=name",
    "from tokenizers import Tokenizer  # bos_token, eos_token",
    "FAIL_TO_PASS: []",
    "if token == self.eof:",
    "/usr/lib/x86_64-linux-gnu/libstdc++.so.6.0.30",
    "2026-11-15T09:10:11.123456Z 127.0.0.1:54321",
    "HF_TOKEN=<HUGGINGFACE_TOKEN_1>",
]


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_no_secret_stays(text):
    assert scrub(text) is text


def test_the_environment_is_picked_by_name_and_worth():
    chosen = secret_looking_environment(
        {
            "GITHUB_TOKEN": "abcd1234efgh",
            "DB_PASSWORD": "long enough",
            "STRIPE_KEY": "k" + "1b2c3d4e5",
            "DATABASE_URL": "postgres://app:pw@db/app",
            "SHORT_TOKEN": "abc",
            "PATH": "/usr/bin:/bin",
            "SSH_AUTH_SOCK": "/tmp/ssh-1/agent.1",
            "GIT_ASKPASS": "/usr/bin/askpass",
            "API_PASSWORD": "password",
            "PWD": "/srv/app/somewhere",
        }
    )
    assert set(chosen) == {"GITHUB_TOKEN", "DB_PASSWORD", "STRIPE_KEY", "DATABASE_URL"}
