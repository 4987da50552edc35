"""Templates to pages: all text is escaped, one style and one script are inside; nothing else may run or be fetched."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from composer_replication.optional import require

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).parent / "templates"
# Control characters, marks that turn the direction of what follows, and halves of characters: shown, never obeyed.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_NEGATIVE = re.compile(r"(?<![\w.-])-(?=\d)")
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|~&!$^=@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def page(template: str, **values: Any) -> bytes:
    """A template filled in, as bytes."""
    return _environment().get_template(template).render(**values).encode()


@cache
def _environment() -> Environment:
    jinja2 = require("jinja2", extra="report")
    environment: Environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=lambda name: not str(name).endswith(".md.jinja"),
        undefined=jinja2.StrictUndefined,
        finalize=_seen,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    markup = require("markupsafe", extra="report").Markup
    style, script = (_text(name) for name in ("style.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )
    environment.globals.update(style=markup(style), script=markup(script), policy=policy)
    environment.filters.update(
        count=lambda number: f"{number:,}",
        plain=lambda name: str(name).replace("_", " "),
        number=_number,
        tenth=lambda value: f"{value:,.1f}" if isinstance(value, float) else _number(value),
        short=lambda value: "" if value is None else f"{value:g}",
        gap=lambda gap: f"{gap:+.2f}".replace("-", "\N{MINUS SIGN}"),
        svg=markup,
        minus=lambda text: _NEGATIVE.sub("\N{MINUS SIGN}", str(text)),
        md=_md,
        url=lambda text: quote(str(text), safe="/#"),
        duration=_duration,
        percent=lambda share: f"{share:.0%}",
    )
    return environment


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _seen(value: Any) -> Any:
    """Applied to every value that a template writes, before it is escaped."""
    if type(value) is str:
        return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", value)
    return "" if value is None else value


def _number(value: Any) -> str:
    """A figure whose unit is not known here."""
    if isinstance(value, bool) or value is None:
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        text = f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
        return text.replace("-", "\N{MINUS SIGN}")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _md(text: Any) -> str:
    """Text on one line of markdown, with nothing in it that markdown or HTML would act upon."""
    line = " ".join(_UNSEEN.sub("\N{REPLACEMENT CHARACTER}", str(text)).split())
    return _MARKUP.sub(r"\\\g<0>", line).replace("\\<", "&lt;").replace("\\&", "&amp;")
