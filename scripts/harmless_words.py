"""The words that stand beside the name of a secret and are none: counted in installed packages and message catalogs.

python scripts/harmless_words.py --code .venv/lib/python3.11/site-packages --catalogs /usr/share/locale

A word is kept when several packages have it, or, of the messages that speak of passwords and keys, several catalogs of
one language. Nobody's password is a word that six packages have; most passwords that are a word are one of another
language. Only words in Latin letters: a plain word in other letters is never taken for a password.
"""

from __future__ import annotations

import argparse
import gettext
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from composer_replication.privacy.secret_names import _stem

TARGET = Path(__file__).resolve().parents[1] / "src/composer_replication/privacy/harmless_words.txt"
FEWEST_PACKAGES = 6
FEWEST_CATALOGS = 6  # of one language
FEWEST_SPEAKING = 2  # of one language, in messages that speak of secrets
SHORTEST, LONGEST = 3, 18
SUFFIXES = {".py", ".pyi", ".md", ".txt", ".rst"}
LARGEST = 400_000  # bytes of a file: longer ones are data
PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
WORD = re.compile(r"[^\W\d_]+")
LATIN = re.compile(r"[a-zA-ZªºÀ-ɏḀ-ỹ]+")
SPEAKS_OF_SECRETS = re.compile(r"(?i)pass(?:word|phrase|wd|code)|\bpin\b|\btoken|secret|credential|\blog ?in\b|\bkey\b")


def kept(counts: Counter[str], fewest: int) -> set[str]:
    """Words of a sensible length that are common enough."""
    return {word for word, count in counts.items() if count >= fewest and SHORTEST <= len(word) <= LONGEST}


def words_of_code(folders: list[Path]) -> Counter[str]:
    """In how many packages a word stands, names cut at capitals and underscores."""
    packages: dict[Path, set[str]] = defaultdict(set)
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= LARGEST:
                text = path.read_text(encoding="utf-8", errors="replace")
                names = {name for name in WORD.findall(text) if name.isascii()}
                package = folder / path.relative_to(folder).parts[0]
                packages[package].update(part.lower() for name in names for part in PARTS.findall(name))
    return Counter(word for words in packages.values() for word in words)


def words_of_catalogs(folder: Path) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """For every language: in how many catalogs a word stands, and in how many it speaks of secrets."""
    languages: dict[str, tuple[Counter[str], Counter[str]]] = defaultdict(lambda: (Counter(), Counter()))
    for path in sorted(folder.rglob("*.mo")):
        with path.open("rb") as file:
            try:
                catalog = vars(gettext.GNUTranslations(file))["_catalog"]  # the messages have no public name
            except (UnicodeDecodeError, IndexError):  # its header is broken
                continue
        here: set[str] = set()
        speaking: set[str] = set()
        for key, message in catalog.items():
            if isinstance(message, str):
                words = {word.lower() for word in WORD.findall(message) if LATIN.fullmatch(word)}
                here |= words
                if SPEAKS_OF_SECRETS.search(key[0] if isinstance(key, tuple) else key):
                    speaking |= words
        all_words, told = languages[re.split("[_@]", path.relative_to(folder).parts[0])[0]]
        all_words.update(here)
        told.update(speaking)
    yield from languages.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, nargs="+", required=True)
    parser.add_argument("--catalogs", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, default=TARGET)
    args = parser.parse_args()
    code = kept(words_of_code(args.code), FEWEST_PACKAGES)
    told: set[str] = set()
    for all_words, speaking in words_of_catalogs(args.catalogs):
        told |= kept(all_words, FEWEST_CATALOGS) | kept(speaking, FEWEST_SPEAKING)
    stems = sorted(set(map(_stem, code | told)))
    head = (
        f"# {len(stems)} stems of {len(code)} words of code and {len(told)} of catalogs, by scripts/harmless_words.py"
    )
    args.output.write_text(f"{head}\n{fill(' '.join(stems), 120)}\n", encoding="utf-8")
    print(head, f"{args.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
