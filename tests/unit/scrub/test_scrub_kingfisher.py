"""The optional backend: its findings join ours, and without it the message says what to install."""

from __future__ import annotations

import sys

import pytest
from scrub_examples import make

from composer_replication.errors import MissingExtraError
from composer_replication.privacy import Scrubber, kingfisher_rule
from composer_replication.privacy import rules as backend


class _Finding:
    def __init__(self, secret: str) -> None:
        self.secret = secret


class _Scanner:
    def scan(self, text: str) -> list[_Finding]:
        return [_Finding("zebra-crossing")] if "zebra-crossing" in text else []


class _Sdk:
    Rules = staticmethod(lambda **_: None)
    Scanner = staticmethod(lambda _: _Scanner())


def test_what_it_finds_is_redacted_wherever_it_stands(monkeypatch):
    monkeypatch.setattr(backend, "require", lambda *_, **__: _Sdk)
    scope = Scrubber(extra_rules=[kingfisher_rule()]).scope()
    assert scope.text("a zebra-crossing é zebra-crossing") == "a <KINGFISHER_1> é <KINGFISHER_1>"
    assert scope.value(["zebra-crossing", "no zebra"]) == ["<KINGFISHER_1>", "no zebra"]
    assert "zebra" not in repr(scope)


def test_without_the_package_the_error_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "kingfisher_sdk", None)
    with pytest.raises(MissingExtraError, match=r"kingfisher_sdk\b.*composer-replication\[privacy\]"):
        kingfisher_rule()


def test_the_real_package_knows_a_github_token():
    pytest.importorskip("kingfisher_sdk", reason="kingfisher-secret-scanner is not installed")
    text = f'token = "{make("github classic")}"'
    assert make("github classic") in {text[span.start : span.end] for span in kingfisher_rule().spans(text)}
