"""What an error itself says is right: the name that was meant, the names there are, options, what to run first."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

_MAX_SAID = 6000
_MAX_CHOICES = 40
_MEANT = re.compile(r"[Dd]id you mean:?\s+(?!one of)['\"`]?([^\s'\"`?,<]{1,200})['\"`]?[^\n?]{0,40}\?")
_NEAR = re.compile(
    r"[Tt]he most similar (?:command|choice)s? (?:is|are)\s+(\S{1,80})|[Dd]id you mean:\s+command '(\S{1,80}?)'"
)
_CHOICES = re.compile(
    r"\b(?:available|valid|allowed|supported|possible|known|existing|accepted) "
    r"(?:\w+ ){0,2}?(?:agents?|skills?|tools?|types?|values?|options?|fields?|commands?|subcommands?|choices?|names?"
    r"|tasks?|formats?|models?)(?: are)?:\s*(?P<available>[^\n]{2,4000}(?:\n[ \t]+[\w.:@/-]{2,60}(?=\s))*)"
    r"|(?:(?:must be|expected|should be|choose|pick|try|not)(?: to be)? one of|\bone of(?=:? [\[\"'`(])|choose from)"
    r"(?: the following)?:? "
    r"(?P<one>[^\n]{3,2000})"
    r"|Available fields:\n(?P<fields>(?:[ \t]+\w{2,60}\n?){2,})"
    r"|available:\s*\[(?P<brackets>[^\]\n]{3,2000})\]|did you mean one of these\?\n(?P<lines>(?:\S{1,300}\n?){1,10})",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"[A-Za-z@./][\w.:@/+-]{0,200}")
_END_OF_LIST = re.compile(r"</|\bat line\b|\bbut\b|\bgot\b|\. ")
_NO_CHOICE = frozenset(["or", "and", "the", "of", "but", "got", "received", "was", "found", "instead", "see", "for"])
_USAGE = re.compile(r"^\s*usage:", re.IGNORECASE | re.MULTILINE)
_FLAGS = re.compile(r"^[ \t]+(?:-\w, )?(--?[A-Za-z][\w-]{1,40})(?=[ =,\[\n])", re.MULTILINE)
_UNKNOWN_OPTION = re.compile(
    r"(?:unknown|unrecogni[sz]ed|invalid|illegal|unexpected|no such|unsupported|bad)"
    r"(?: \w+)? (?:flag|option|argument|switch|parameter)s?(?: provided)?:?\s*(?:-- )?['\"`]?"
    r"(?P<named>-{0,2}[A-Za-z][\w-]{0,60})|flag provided but not defined:? (?P<go>-[\w-]{1,60})",
    re.IGNORECASE,
)
_RUN = re.compile(
    r"(?:\b[Rr]un|\b[Uu]se|\b[Tt]ry|\b[Ee]xecute)(?: the following| this)?:?\s+"
    r"(?:['\"`](?P<quoted>[^'\"`\n]{3,80})['\"`]|(?P<bare>(?:mise|make|npm|pnpm|yarn|npx|cargo|go|gofmt|just|task|uv|ruff|black"
    r"|pre-commit|git|bundle|mvn|gradle)\b(?: [\w./:@=-]+){1,5}))"
    r"|\buse\s*\n\s+(?P<shown>git [^\n]{4,120})"
)
_CLOSE = 0.72
_SLIP = 0.8


def meant_name(said: str) -> str | None:
    """What the error asks about: "did you mean …?"."""
    match = _MEANT.search(said[:_MAX_SAID]) or _NEAR.search(said[:_MAX_SAID])
    return next(group for group in match.groups() if group).rstrip(".") if match else None


def choices_in(said: str) -> list[str]:
    """The names that an error lists as those there are."""
    match = _CHOICES.search(said[:_MAX_SAID])
    if match is None:
        return []
    text = next(group for group in match.groups() if group)
    text = _END_OF_LIST.split(text, maxsplit=1)[0]
    names = [choice.rstrip(".:") for choice in _CHOICE.findall(text) if choice.lower() not in _NO_CHOICE]
    choices = [name for name in dict.fromkeys(names) if name][:_MAX_CHOICES]
    return choices if len(choices) > 1 else []


def unknown_option(said: str) -> str | None:
    """The option that a program says it does not know; other errors of use are not about one."""
    match = _UNKNOWN_OPTION.search(said[:_MAX_SAID])
    return None if match is None else match["named"] or match["go"]


def near_option(wrong: str, options: Sequence[str]) -> str | None:
    """The one option that differs from this one by a slip of the pen; another option is no better than none."""
    near = [
        name for ratio, name in _ranked(wrong.strip("-"), [option.strip("-") for option in options]) if ratio >= _SLIP
    ]
    return next(option for option in options if option.strip("-") == near[0]) if len(near) == 1 else None


def options_in(said: str) -> list[str]:
    """The options that a program printed with its usage."""
    if _USAGE.search(said[:_MAX_SAID]) is None:
        return []
    return list(dict.fromkeys(_FLAGS.findall(said[:_MAX_SAID])))[:_MAX_CHOICES]


def command_to_run(said: str) -> str | None:
    """The command that a check or a hook asks for."""
    match = _RUN.search(said[:_MAX_SAID])
    return None if match is None else next(group for group in match.groups() if group).strip()


def nearest(wrong: str, names: Sequence[str]) -> str | None:
    """The one name that was surely meant: the same but for case or a prefix, or much nearer than all others."""
    for is_same in (_is_same, _is_inside):
        matches = [name for name in names if is_same(wrong.casefold(), name.casefold())]
        if len(matches) == 1:
            return matches[0]
    ranked = sorted(_ranked(wrong, names), reverse=True)
    if not ranked or ranked[0][0] < _CLOSE or (len(ranked) > 1 and ranked[1][0] > ranked[0][0] - 0.1):
        return None
    return ranked[0][1]


def _ranked(wrong: str, names: Sequence[str]) -> Iterator[tuple[float, str]]:
    for name in names[: _MAX_CHOICES * 5]:
        yield difflib.SequenceMatcher(None, wrong.casefold(), name.casefold()).ratio(), name


def _is_same(wrong: str, name: str) -> bool:
    return re.sub(r"[\W_]", "", wrong) == re.sub(r"[\W_]", "", name)


def _is_inside(wrong: str, name: str) -> bool:
    return len(wrong) > 3 and wrong in re.split(r"[:/.]", name)
