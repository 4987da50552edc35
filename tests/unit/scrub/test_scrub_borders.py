"""What is found in one string never depends on another: not in the same record, not in one scrubbed before.

The strings of a record are scanned together and the clean ones are remembered by all scopes of a scrubber. If one could
speak for the next, a serial run would differ from a parallel one, and a secret would stay.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scrub_examples import ALNUM, LOWER_HEX, make

from composer_replication.privacy import Rule, Scrubber

NUM_RECORDS = {"ci": 700, "full": 4000}[os.environ.get("CRF_TEST_PROFILE", "ci")]
RANDOM = "q7Xw9ZkT2mVb4" + "RfL8sYp3NdH6jGc"
HEX = "3f9c1e7a5b2d8046" + "e1f7c3a9d5b08264"
LEADS = [
    "sha256",
    "compute the hash",
    "verify integrity:",
    "digest",
    "checksum =",
    "h1:",
    'signature": "',
    "data:image/png;base64,",
    "-----BEGIN CERTIFICATE-----",
    "commit",
    "git checkout ",
    "id",
    "uuid: ",
    "/nix/store/",
    "aws arn:aws:secretsmanager:x:secret:",
    "<div id=",
    "ends in a backslash\\",
]


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("secret", [RANDOM, HEX, f"token: {RANDOM}", make("npm"), "password=Kx7!" + "vQ2m#Lp9"])
def test_no_string_speaks_for_the_next_one(lead, secret):
    scrubber = Scrubber()
    alone = Scrubber().scope().text(secret)
    assert alone != secret
    assert scrubber.scope().value({"algorithm": lead, "value": secret})["value"] == alone
    assert scrubber.scope().value([lead, secret])[1] == alone
    assert scrubber.scope().text(secret) == alone


def test_a_rule_of_the_caller_sees_every_string_alone():
    whole = Rule("BADGE", re.compile(r"\Abadge\d+\Z"), ("badge",))
    record = {"a": "some text", "b": "badge12", "c": "more text"}
    assert Scrubber(extra_rules=[whole]).scope().value(record) == record | {"b": "<BADGE_1>"}


RNG = random.Random(5)
POOL = [
    "".join(RNG.choices(alphabet, k=length))
    for alphabet, length in [(LOWER_HEX, 32), (LOWER_HEX, 40), (LOWER_HEX, 64), (ALNUM, 28), (ALNUM, 40), (ALNUM, 80)]
]
POOL += ["/".join("".join(RNG.choices(ALNUM, k=length)) for length in (24, 20)), make("github classic"), make("jwt")]
POOL += ["Kx7!" + "vQ2m#Lp9", "marigold" + "47", "<PASSWORD_2>", "USER_3", "/home/alice/", "bob"]
PIECES = [
    *LEADS,
    *"=&%|,;:'\"`()<>\0\\\n\t ",
    "  ",
    "\r\n",
    "\\n",
    "key",
    "token: ",
    "password=",
    "password",
    "value: ",
]
PIECES += ["user,password\n", "| user | password |\n", "x,", "INSERT INTO t (password) VALUES ('", "Bearer ", "echo "]
PIECES += [
    "curl -u bob:",
    " | docker login --password-stdin",
    "-----BEGIN PRIVATE KEY-----",
    "-----END CERTIFICATE-----",
]
PIECES += ["\x1b[33m", "\x1b[0m", "\\u001b[1m", "\\u0026", "%2F", "%3D", "refs/heads/main", "  src/app.py", "home/"]
PIECES += [
    "Users/",
    "Server=db;",
    "A=b\n",
    "process.env.PASSWORD || '",
    "<<EOT\n",
    "machine x login y password ",
    "iVBORw0KGgo",
]
KEYS = [
    "command",
    "output",
    "value",
    "commit",
    "description",
    "file",
    "name",
    "token",
    "data",
    "id",
    "sessionId",
    "text",
]
KEYS += ["type", "hash", "signature", "args", "element"]


def text_of(rng: random.Random) -> str:
    pieces = (rng.choice(POOL if rng.random() < 0.4 else PIECES) for _ in range(rng.randint(1, 5)))
    return "".join(pieces)


def value_of(rng: random.Random, depth: int = 0) -> Any:
    chance = rng.random()
    if chance < 0.7 or depth > 2:
        return text_of(rng)
    if chance < 0.85:
        return [value_of(rng, depth + 1) for _ in range(rng.randint(1, 4))]
    return {rng.choice(KEYS): value_of(rng, depth + 1) for _ in range(rng.randint(1, 3))}


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def test_a_scrubber_that_has_seen_many_records_does_as_a_fresh_one(note: Callable[[str], None]):
    rng = random.Random(11)
    known = {"env_values": {"X_TOKEN": "Quokka-" + "7731-lime"}, "user_names": ["bob"]}
    shared, differ = Scrubber(**known), []
    for _ in range(NUM_RECORDS):
        record = {rng.choice(KEYS): value_of(rng) for _ in range(rng.randint(1, 4))}
        fresh = Scrubber(**known)
        if shared.scope().value(record) != fresh.scope().value(record):
            differ.append(record)
        # Afterwards, too: what the record left in the caches of either must not change what a text alone gives.
        for text in strings(record):
            alone = Scrubber(**known).scope().text(text) if rng.random() < 0.2 else fresh.scope().text(text)
            if shared.scope().text(text) != alone:
                differ.append(text)
    assert differ == []
    note(f"a scrubber with a past against a fresh one: {NUM_RECORDS} records (make test-full: 4,000)")
