"""What a built site would ask other hosts for: `python .ci/site_requests.py FOLDER`. Exit 1 if there is anything.

Links to follow are no requests. Scripts, styles, fonts, images and frames are, and so is a diagram, for which the theme
fetches a script.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_ELSEWHERE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?([^\"')\s;]+)", re.IGNORECASE)
_LOADS = {"src", "srcset", "poster", "data"}
_FOLLOWED = {"canonical", "alternate", "author", "license", "next", "prev"}


class _Requests(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        loaded = [value for name, value in given.items() if name in _LOADS]
        if tag == "link" and not set(given.get("rel", "").split()) <= _FOLLOWED:
            loaded.append(given.get("href", ""))
        loaded += _IN_STYLE.findall(given.get("style", ""))
        self.found += [each for each in loaded if _ELSEWHERE.match(each)]
        if "mermaid" in given.get("class", "").split():
            self.found.append("a mermaid diagram, whose script is fetched")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += [each for each in _IN_STYLE.findall(data) if _ELSEWHERE.match(each)]


def requests_of(path: Path) -> list[str]:
    """What one file of a site asks other hosts for."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        return [each for each in _IN_STYLE.findall(text) if _ELSEWHERE.match(each)]
    parser = _Requests()
    parser.feed(text)
    return parser.found


def main(folder: Path) -> int:
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".html", ".css"))
    found = [f"{path}: {each}" for path in files for each in requests_of(path)]
    print("\n".join([*found, f"{len(files)} pages and styles, {len(found)} requests to other hosts"]))
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
