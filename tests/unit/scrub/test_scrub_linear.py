"""Hostile text takes time in proportion to its length: no pattern runs away, whatever is repeated."""

from __future__ import annotations

import os
import random
import string

import pytest

from composer_replication.privacy import Scrubber
from cpu_time import least_cpu_seconds

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
HALF = 500_000 if IS_FULL else 40_000
CEILING_S = 15  # a megabyte of the worst takes about five seconds; a runaway pattern takes hours
NOISE_S = 0.15  # below this a ratio says nothing
UNITS = {
    "letters": "a",
    "equals signs": "=",
    "double quotes": '"',
    "single quotes": "'",
    "base64": string.ascii_letters + string.digits + "+/",
    "hex lines": "0123456789abcdef" * 2 + "\n",
    "slashes": "/",
    "spaces": " ",
    "backslashes": "\\",
    "JSON keys": '"key": "',
    "JSON passwords": '"password": "',
    "escaped JSON": '\\"token\\": \\"',
    "continued lines": "a\\\n",
    "escapes": "\\u0026\\/",
    "signatures": "X-Amz-Signature=",
    "sessions": "sessionid=",
    "connections": "Server=a;Password=b1;",
    "resources": "arn:a:secret:",
    "colons": "secret:",
    "cookies": "Cookie: a=b; ",
    "addresses": "://a:b@",
    "percents": "%2",
    "private keys": "-----BEGIN RSA PRIVATE KEY-----\nabc",
    "PuTTY keys": "PuTTY-User-Key-File-2 ",
    "commands": "curl -u ",
    "prose": "token the the the the ",
    "dump on one line": "A_TOKEN=b c ",
    "forms": "password=a&b=",
    "homes": "/home/",
    "borders": "\0password=",
    "short words": "ab-",
    "numbered words": "a_b-1_",
    "options": "htpasswd -b",
    "piped": 'echo "a ',
    "letters of an option": "b",
    "tables": "user,password\n",
    "rows": "|a|password|b|\n",
    "inserts": "insert into t (password) values ('a','",
    "colours": "password\x1b[0m",
    "written colours": "key\\u001b[1m",
    "fallbacks": "PASSWORD || '",
    "heredocs": "password = <<EOT\n",
    "quoted words": "password 'a' ",
    "settings": "a.password=b1 ",
    "placeholders": "<PASSWORD_",
    "pgpass": "a:5432:b:",
    "homes without a slash": "home/a/\n",
    "wraps": "abc1234567\n",
    "wrapped names": "token=abc1234567\n+",
    "types": "password: a[b, ",
    "calls": "password = f(",
    "own words": "密码是",
    "said words": "a1b2c3! as the password ",
    "manifests": "kind: Secret\ndata:\n  a: ",
    "tags": '<a password="',
    "typed fields": '{"type": "password", ',
    "command words": "login -p ",
    "lists": 'passwords = ["a1b2c3d4", ',
    "literals": '"a1b2" + ',
    "streamed lines": 'data: {"delta": "a1"}\n',
    "streams of two forms": '0:"pass"\n1:"word"\n',
    "folded lines": "token: >-\n  a1b2\n  ",
    "keys without a frame": "MIIEpAIBAAKCAQEA" + "a1B2" * 12 + "\n",
    "ends of keys": "a1B2" * 16 + "\n-----END PRIVATE KEY-----\n",
    "numbers of keys": "prime1:\n    7c:1f:ae:5b:\n",
    "cookies of uuids": "cookie __Host-a sid=0a1b2c3d-0a1b-",
    "copied rows": "copy t (id, password) from stdin;\n1\ta\n",
    "logins": "connecting as sa with 'a1",
    "sensitive outputs": '{"value": "a1", "sensitive": true}',
}
# What a pattern wants at the end, or what makes it give up there.
TAILS = ["-Q9x", "!", "\0", "\\", "'", "\n<", " | chpasswd", "@h", "=="]
HEADS = ["", "see ", "htpasswd -", "password=", 'echo "', "INSERT INTO t (password) VALUES (", "\x1b[1mtoken\x1b[0m"]
SMALL = 40_000 if IS_FULL else 15_000


def seconds(text: str, *, enough: float, rounds: int = 5) -> float:
    scrubber = Scrubber(user_names=["zoe"], env_values={"X_TOKEN": "aaaa-bbbb-1"})
    return least_cpu_seconds(lambda: scrubber.scope().text(text), enough=enough, rounds=rounds)


def assert_time_grows_with_the_text(half: str, whole: str) -> None:
    half_s = seconds(half, enough=NOISE_S, rounds=5 if IS_FULL else 2)  # where it is slow, that is seconds a round
    limit_s = min(3 * max(half_s, NOISE_S), CEILING_S)
    assert seconds(whole, enough=limit_s) < limit_s


@pytest.mark.parametrize("name", UNITS)
def test_twice_the_text_takes_less_than_three_times_as_long(name, note):
    if name == next(iter(UNITS)):
        note(f"hostile texts: {len(UNITS)} of {2 * HALF:,} characters, 120 of {2 * SMALL:,} (full: 1,000,000, 80,000)")
    text = UNITS[name] * (HALF // len(UNITS[name]))
    assert_time_grows_with_the_text(text, text * 2)


def mixed(seed: int) -> tuple[str, str, str]:
    """A beginning, a few units in a row that are repeated, and an end that fails."""
    rng = random.Random(seed)
    units = "".join(rng.choices(list(UNITS.values()), k=rng.randint(1, 3)))
    return rng.choice(HEADS), units, rng.choice(TAILS)


@pytest.mark.parametrize("seed", range(120))
def test_units_in_a_row_with_an_end_that_fails(seed):
    head, unit, tail = mixed(seed)
    times = SMALL // len(unit)
    assert_time_grows_with_the_text(head + unit * times + tail, head + unit * (2 * times) + tail)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("unit", ["ab-", "ab_Cd-", "b", "a1", "\\", " ", "ab.", "a/b1"])
def test_a_short_text_takes_no_time(head, unit, tail):
    # Exponential patterns need thirty pieces, not a megabyte.
    assert seconds(head + unit * 60 + tail, enough=NOISE_S) < NOISE_S
