"""A session shows the same file over and over: what was looked at is not looked at again, and what is new is found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scrub_examples import make

from composer_replication.privacy import Scrubber
from composer_replication.privacy.scan import Scanner
from composer_replication.privacy.scrubber import _ParagraphCache

PASSWORD = "Kx7!" + "vQ2m#Lp9"
KEY = make("npm")
PAGE = [
    f"def step_{number}(rows):\n    total = sum(row.size for row in rows)\n    return total + {number}"
    for number in range(30)
]
NEW = [f'    password = "{PASSWORD}"', f"registry={KEY}", f"The admin password is {PASSWORD} now.", f"token: {KEY}"]
LEFT = "\n\0\n"


def page(paragraphs: list[str]) -> str:
    return "\n\n".join(paragraphs)


def numbered(text: str) -> str:
    return "\n".join(f"{number:6}→{line}" for number, line in enumerate(text.split("\n"), 1))


def changed(place: int, line: str) -> list[str]:
    return [*PAGE[:place], f"{PAGE[place]}\n{line}", *PAGE[place + 1 :]]


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that a scanner is asked about."""
    texts: list[str] = []
    spans = Scanner.spans

    def noted(self: Scanner, text: str, *args: Any, **settings: Any) -> Any:
        texts.append(text)
        return spans(self, text, *args, **settings)

    monkeypatch.setattr(Scanner, "spans", noted)
    return texts


def test_of_a_page_that_changed_only_the_change_and_its_neighbours_are_read(scanned: list[str]) -> None:
    scope = Scrubber().scope()
    record = {"file": page(changed(12, "    print(total)"))}
    scope.value({"file": page(PAGE)})
    assert scope.value(record) is record
    assert scanned[1] == LEFT.join([PAGE[0], page(changed(12, "    print(total)")[11:14]), PAGE[29]])


def test_a_page_with_and_without_numbers_is_read_once(scanned: list[str]) -> None:
    record = {"file": {"content": page(PAGE)}, "message": [{"content": numbered(page(PAGE))}]}
    assert Scrubber().scope().value(record) is record
    assert len(scanned) == 1
    assert scanned[0].count(PAGE[5]) == 1
    assert "→" not in scanned[0]


@pytest.mark.parametrize("line", NEW)
@pytest.mark.parametrize("place", [0, 2, 15, 29])
@pytest.mark.parametrize("shown", [str, numbered])
def test_what_is_new_on_a_page_is_found_as_on_one_that_nobody_saw(line: str, place: int, shown: Any) -> None:
    scope, record = Scrubber().scope(), {"file": shown(page(changed(place, line)))}
    scope.value({"file": page(PAGE), "message": numbered(page(PAGE))})
    result = scope.value(record)
    assert result == Scrubber().scope().value(record) != record


def test_a_page_with_a_secret_is_never_one_that_was_read() -> None:
    scope, first, second = Scrubber().scope(), changed(3, NEW[0]), changed(3, NEW[0])
    second[20] += "\n    # done"
    assert PASSWORD not in str(scope.value({"file": page(first), "again": numbered(page(first))}))
    assert PASSWORD not in str(scope.value({"file": page(second), "again": numbered(page(second))}))


def test_pages_of_another_session_do_not_count(scanned: list[str]) -> None:
    scrubber = Scrubber()
    scrubber.scope().value({"file": page(PAGE)})
    scrubber.scope().value({"file": page(PAGE) + "\n"})
    assert scanned[1] == page(PAGE) + "\n"


def test_a_word_far_above_tells_what_is_new_below() -> None:
    scope, line = Scrubber().scope(), "user ada " + "zonnebloem42"
    scope.value({"file": page(["run it by ftp", *PAGE])})
    assert "bloem" not in str(scope.value({"file": page(["run it by ftp", *changed(20, line)])}))
    assert line in Scrubber().scope().text(page(changed(20, line)))


def test_home_directories_on_repeated_pages_are_renamed() -> None:
    scope, paragraphs = Scrubber().scope(), [*PAGE[:20], "see /home/jordan/notes", *PAGE[20:]]
    scope.value({"file": page(paragraphs)})
    assert "jordan" not in str(scope.value({"file": page([*paragraphs, "the end"])}))


def test_after_a_replacement_only_its_surroundings_are_read_again(scanned: list[str]) -> None:
    result = Scrubber().scope().text(page(changed(12, NEW[0])))
    assert PASSWORD not in result
    assert scanned[0] == page(changed(12, NEW[0]))
    assert scanned[-1] == LEFT.join([PAGE[0], page(result.split("\n\n")[11:14]), PAGE[29]])


def test_versions_of_random_pages_come_out_as_if_each_were_alone() -> None:
    """Names and values in one paragraph or in neighbours, moved, cut out and shown again."""
    rng = random.Random(3)
    pool = [
        *PAGE,
        *PAGE,
        *NEW,
        "Password:",
        PASSWORD,
        "| user | password |\n|---|---|\n| ada | - |",
        "sha256",
        "x" * 40,
    ]
    for _ in range(25):
        scope, paragraphs = Scrubber().scope(), rng.choices(pool[: rng.choice((60, 64, 70))], k=24)
        for _ in range(3):
            record = {"file": rng.choice((str, numbered))(page(paragraphs))}
            fresh = Scrubber().scope()
            fresh.reserve(record)
            assert _bare(scope.value(record)) == _bare(fresh.value(record))
            paragraphs[rng.randrange(24)] = rng.choice(pool)
            del paragraphs[rng.randrange(24)]
            paragraphs.append(rng.choice(pool))


def _bare(record: dict[str, str]) -> str:
    """Without the numbers of placeholders, which go on over a session."""
    return "".join(character for character in record["file"] if not character.isdigit())


def test_what_is_kept_of_pages_is_bounded_and_no_text() -> None:
    paragraphs = _ParagraphCache()
    for number in range(40):
        paragraphs.unrepeated([page([f"{number} {line} " + "x" * 30 for line in range(2_000)])], LEFT, set())
        assert len(paragraphs._words_by_paragraph) < (1 << 16) + 2_000
    assert all(isinstance(row, int) for row in paragraphs._words_by_paragraph)


def test_what_a_scanner_read_before_changes_nothing():
    # The name and the version lie on two lines, as half of a secret that a line end breaks would.
    text = "- Title: Gitea\n- Context7-compatible library ID: /gitea/docs\n"
    earlier = ["see Context7-compatible here", "a Context7-compatible library", "- Context7-compatible\n- Title: Gitea"]
    fresh = Scanner({}, (), use_entropy=True).spans(text)
    for count in range(len(earlier) + 1):
        scanner = Scanner({}, (), use_entropy=True)
        for line in earlier[:count]:
            scanner.spans(line)
        assert scanner.spans(text) == fresh
