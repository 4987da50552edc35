"""What a planted secret is, how its random parts are made, and how to tell that something of it survived."""

from __future__ import annotations

import base64
import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from urllib.parse import unquote, unquote_plus

PLACES = ("user_text", "assistant_text", "thinking", "tool_arguments", "tool_result", "path", "env_dump")
WINDOW = 8  # this many characters of a secret in a row are a leak

BASE64 = string.ascii_letters + string.digits + "+/"
BASE64_URL = string.ascii_letters + string.digits + "-_"
ALNUM = string.ascii_letters + string.digits
_WORDS = """
Kestrel Maple Quartz Lantern Otter Cobalt Harbor Juniper Falcon Granite Willow Ember Saffron Tundra Velvet Bramble
Cinder Dapple Fjord Glacier Heron Indigo Jasper Larch Meadow Nimbus Orchid Pebble Raven Sorrel
"""
WORDS = tuple(_WORDS.split())
_BASE64_RUN = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")
_HEX_RUN = re.compile(r"(?:[0-9a-fA-F]{2}){8,}")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


@dataclass(frozen=True)
class Planted:
    """A text with a secret in it.

    `value`: the exact substrings that may not stand in the scrubbed text; each stands once in `text`.
    `prefix`: the public beginning of each value (`ghp_`), which may remain; nothing else of a value may.
    `decoded`: for encoded forms, the plain secret: it may not be readable after decoding either.
    `env`: the environment the scrubber is told about, for secrets that only their exact value gives away.
    """

    kind: str
    value: tuple[str, ...]
    text: str
    place: str
    prefix: str = ""
    decoded: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Negative:
    """A text that scrubbing returns unchanged but for the pseudonym of a home directory, under this environment."""

    text: str
    why: str
    env: Mapping[str, str] = field(default_factory=dict)


class Maker:
    """Random parts of secrets; the same seed gives the same parts on every machine."""

    def __init__(self, seed: str) -> None:
        self.rng = Random(seed)
        self._turns: Counter[tuple[str, ...]] = Counter()

    def turn(self, *options: str) -> str:
        """The options one after the other, call by call."""
        self._turns[options] += 1
        return options[(self._turns[options] - 1) % len(options)]

    def of(self, alphabet: str, count: int) -> str:
        return "".join(self.rng.choice(alphabet) for _ in range(count))

    def hex(self, count: int) -> str:
        return self.of(string.hexdigits[:16], count)

    def digits(self, count: int) -> str:
        return self.rng.choice(string.digits[1:]) + self.of(string.digits, count - 1)

    def alnum(self, count: int) -> str:
        return self.of(ALNUM, count)

    def lower(self, count: int) -> str:
        return self.of(string.ascii_lowercase + string.digits, count)

    def b64(self, count: int) -> str:
        return self.of(BASE64, count)

    def url(self, count: int) -> str:
        """Characters of base64url, a letter or digit at both ends."""
        return self.alnum(1) + self.of(BASE64_URL, count - 2) + self.alnum(1)

    def password(self) -> str:
        """As a careful person makes one: `Maple7!quartz4`."""
        first, second = self.rng.sample(WORDS, 2)
        return first + self.digits(1) + self.rng.choice("!#%+=~") + second.lower() + self.digits(2)

    def phrase(self) -> str:
        """Words and a number, nothing that looks random: `otter-lantern-4821`."""
        first, second = self.rng.sample(WORDS, 2)
        return f"{first.lower()}-{second.lower()}-{self.digits(4)}"

    def symbols(self) -> str:
        """What a password manager makes; no quote and no backslash."""
        return self.alnum(4) + self.of("!@#$%^&*", 2) + self.alnum(5) + self.of("@:/?&", 1) + self.alnum(4)

    def make(self, recipe: str) -> str:
        """`password`, or a method and a length: `hex:32`."""
        name, _, count = recipe.partition(":")
        return getattr(self, name)(*([int(count)] if count else []))


def survivors(case: Planted, scrubbed: str, *, views: Sequence[str] | None = None) -> list[str]:
    """What of the secret can still be read in the scrubbed text, plainly or after decoding; empty when it is clean.

    `views`: `list(readings(scrubbed))`, where many cases are looked for in one long text.
    """
    whole = [value for value in case.value if value in scrubbed]
    views = list(readings(scrubbed)) if views is None else views
    pieces = (piece for secret in case.decoded or case.value for piece in windows(secret.removeprefix(case.prefix)))
    return whole + [piece for piece in pieces if any(piece in view for view in views)]


def windows(secret: str) -> Iterator[str]:
    """Every run of `WINDOW` characters; a shorter secret is one run."""
    for start in range(max(1, len(secret) - WINDOW + 1)):
        yield secret[start : start + WINDOW]


def readings(text: str) -> Iterator[str]:
    """The text as it stands, unescaped, URL-decoded, and each of its base64 and hex runs decoded (twice)."""
    plain = [text, unescape(text), unescape(unescape(text)), unquote(text), unquote(unquote(text)), unquote_plus(text)]
    yield from plain
    joined = text.replace("\n", "")  # base64 wrapped at 76 columns
    for run in dict.fromkeys(_decoded_runs([*plain, joined])):
        yield run
        yield from _decoded_runs([run])


def unescape(text: str) -> str:
    """One level of JSON escapes taken off, wherever they stand."""
    return _ESCAPE.sub(lambda m: chr(int(m[1], 16)) if m[1] else _ESCAPED.get(m[2], m[2]), text)


def _decoded_runs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for run in _BASE64_RUN.findall(text):
            standard = run.rstrip("=").replace("-", "+").replace("_", "/")
            for start in range(4):  # what is left of a run may begin anywhere in a group of four
                body = standard[start:]
                body = body[: len(body) - (len(body) % 4 == 1)]
                yield base64.b64decode(body + "=" * (-len(body) % 4)).decode("latin-1")
        for run in _HEX_RUN.findall(text):
            yield bytes.fromhex(run).decode("latin-1")
            yield bytes.fromhex(f"{run[1:]}0").decode("latin-1")


Row = tuple[str, str, str, str]


def from_rows(maker: Maker, rows: Iterable[Row]) -> Iterator[Planted]:
    """One case per (kind, place, text with {s}, recipe of the secret)."""
    for kind, place, template, recipe in rows:
        secret = maker.make(recipe)
        yield Planted(kind, (secret,), *placed(template.replace("{s}", secret), place))


def placed(text: str, place: str) -> tuple[str, str]:
    """The text as it stands in its place: tool arguments are JSON, `bash` and `write` name the tool."""
    if place == "bash":
        return json.dumps({"command": text, "description": "Run the step"}), "tool_arguments"
    if place == "write":
        return json.dumps({"file_path": "/home/ada/shop/settings.local", "content": text}), "tool_arguments"
    if place == "env_dump":
        return f"SHELL=/bin/bash\nPWD=/home/ada/shop\nLANG=C.UTF-8\n{text}\nTERM=xterm-256color\nSHLVL=2\n", place
    return text, place


def body_lines(maker: Maker, count: int) -> tuple[str, ...]:
    """The base64 body of a PEM block, as lines of 64 characters and a last one of 44."""
    return (*(maker.b64(64) for _ in range(count - 1)), maker.b64(43) + "=")


def pem(label: str, lines: Iterable[str], newline: str = "\n") -> str:
    dashes = "-" * 5
    return newline.join((f"{dashes}BEGIN {label}{dashes}", *lines, f"{dashes}END {label}{dashes}")) + newline
