"""Hostile text takes time in proportion to its length: no pattern runs away, whatever is repeated."""

from __future__ import annotations

import string
import time

import pytest

from composer_replication.privacy import Scrubber

HALF = 500_000
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
}


def seconds(text: str) -> float:
    scope = Scrubber(user_names=["zoe"], env_values={"X_TOKEN": "aaaa-bbbb-1"}).scope()
    begin = time.process_time()
    scope.text(text)
    return time.process_time() - begin


@pytest.mark.parametrize("name", UNITS)
def test_twice_the_text_takes_less_than_three_times_as_long(name):
    text = UNITS[name] * (HALF // len(UNITS[name]))
    half, whole = seconds(text), seconds(text * 2)
    assert whole < CEILING_S
    assert whole < 3 * max(half, NOISE_S)
