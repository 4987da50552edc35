"""A hint for a site, from the first source that has one: a template, the error's own words, or a writer you bring."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.context import (
    HintContext,
    StateAlong,
    call_of,
    first_sentences,
    is_json_error,
    quoted,
    right_texts,
)
from composer_replication.hint_generator.facts import collect_facts
from composer_replication.hint_generator.templates import HINT_TEMPLATES, VERSION, dispatch
from composer_replication.sites.actions.tools import word_set
from composer_replication.sites.user_words import CORRECTED
from composer_replication.types import (
    Conversation,
    ErrorSite,
    Hint,
    ToolCall,
)

if TYPE_CHECKING:
    from composer_replication.privacy import Scrubber

HintSource = Literal["template", "raw_error", "writer"]
_MAX_SAID = 400
# Words that say nothing where the call they are about is not before one's eyes.
_EMPTY = word_set(
    "a an the this that these those it its them him here there now then yet again so and or but also just please no"
    " nope not yes yeah ok okay oh hm well sorry wait stop hold on hang do don't dont doesn't didn't did does done is"
    " isn't was are be i you we they me my your our to of for in at with by from what why how when where who which fix"
    " try see look go change make undo revert like want wrong can can't could couldn't should shouldn't would instead t"
)
HintWriter = Callable[[ErrorSite, Conversation, HintContext], str | None]
_SOURCES: tuple[HintSource, ...] = ("template", "raw_error", "writer")


def write_hint(
    site: ErrorSite,
    conversation: Conversation,
    *,
    sources: Sequence[HintSource] = ("template", "raw_error"),
    writer: HintWriter | None = None,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
    inferred_tools: Mapping[str, Mapping[str, Any]] | None = None,
    scrubber: Scrubber | None = None,
    along: StateAlong | None = None,
) -> Hint | None:
    """The hint of the first source that has one, with the facts it was made of; None for a site nobody may teach.

    `scrubber` goes over the facts first, for conversations that were not scrubbed. `tool_schemas` are those that
    somebody wrote down, `inferred_tools` those that sessions of the same agent called; `along` saves work where a
    conversation has many sites.
    """
    unknown = [source for source in sources if source not in _SOURCES]
    if unknown or ("writer" in sources and writer is None):
        got = f"{list(sources)}, writer={'None' if writer is None else 'given'}"
        expected = f"sources among {list(_SOURCES)}, and a writer where one is named"
        raise InputError(explain("hint sources", got=got, expected=expected))
    if site.blame != "model":
        return None
    if site.kind == CORRECTED:
        return said_hint(user_words(site, conversation), scrubber=scrubber)
    facts = collect_facts(site, conversation, tool_schemas=tool_schemas, inferred_tools=inferred_tools, along=along)
    if scrubber is not None:  # before anything is cut short: half a secret is no longer known for one
        scope = scrubber.scope()
        site = replace(site, evidence_text=scope.text(site.evidence_text), tool=scope.text(site.tool))
        facts = scope.value(dict(facts))
    for source in sources:
        template, text = _from(source, site, conversation, facts, writer)
        if text and text.strip():
            clean = first_sentences(" ".join(text.split()))
            clean = clean if scrubber is None else scrubber.scope().text(clean)
            return Hint(text=clean, source=source, template=template, version=VERSION, facts=dict(facts))
    return None


def said_hint(words: str, *, template: str = CORRECTED, scrubber: Scrubber | None = None) -> Hint | None:
    """What a user said as a hint, in the user's words; None where nothing is left of them that can be shown."""
    words = words if scrubber is None else scrubber.scope().text(words)
    shown_words = " ".join("".join(char if char.isprintable() else " " for char in words).split()).replace('"', "'")
    shown_words = (
        shown_words if len(shown_words) <= _MAX_SAID else shown_words[: _MAX_SAID - 1].rpartition(" ")[0] + "…"
    )
    text = f'The user says: "{shown_words}"'
    if not any(word not in _EMPTY for word in re.findall(r"\w[\w']*", shown_words.lower().replace("\u2019", "'"))):
        return None  # a fragment: what it points to is not in it
    return Hint(text=text, source="user", template=template, version=VERSION, facts={"words": shown_words})


def user_words(site: ErrorSite, conversation: Conversation) -> str:
    """The words that a site's evidence is: of a refusal, or of the message after a stop."""
    turn = next((turn for turn in conversation.turns if turn.id == site.result_turn_id), None)
    results = () if turn is None else (result.text for result in turn.results if result.call_id == site.call_id)
    text = next(iter(results), "" if turn is None else turn.text)
    return text[slice(*site.evidence)]


def template_of(site: ErrorSite, facts: HintContext | None = None, *, is_json: bool = False) -> str:
    """The template that speaks about a site: a call that failed before is about that, whatever the failure."""
    if site.repeats:
        return "repeated_failure"
    if site.kind == "input_validation" and site.kind not in HINT_TEMPLATES:
        has_names = any((facts or {}).get(key) for key in ("missing_parameters", "unexpected_parameters"))
        return "json_decode" if is_json and not has_names else "type_error"
    return site.kind if site.kind in HINT_TEMPLATES else "runtime_error"


def _from(
    source: HintSource, site: ErrorSite, conversation: Conversation, facts: HintContext, writer: HintWriter | None
) -> tuple[str, str | None]:
    call = call_of(site, conversation)
    if source == "template":
        name = template_of(site, facts, is_json=is_json_error(call, facts.get("error_message", "")))
        text = dispatch(name, facts)
        is_quoting = text and quotes_call(text, call, right_texts(facts), only_quoted=True)
        return name, dispatch(name, {"error_kind": site.kind}) if is_quoting else text
    if source == "raw_error":
        message = quoted(site.evidence_text)
        return "raw_error", f"This call fails with {message}." if message else None
    assert writer is not None
    return getattr(writer, "__name__", type(writer).__name__), writer(site, conversation, facts)


# What a hint may not say: anything of the call that failed, unless it is also what is right.
#
# A small model copies what stands before it, so a hint that quotes a mistake makes it likelier.

_WORD = re.compile(r"[^\s'\"`(){}\[\],;<>|&=]+")
# A word with one of these is a name; without, it is language, of which any rule is made.
_NAME = re.compile(r"[\d_./\\:$*@#~^-]|[a-z][A-Z]")
_IN_QUOTES = re.compile(r"'([^'\n]{3,200})'|\"([^\"\n]{3,200})\"")
_EDGES = ".,:;!?…"
_MIN_WORD, _MIN_STEM, _MIN_LINE, _MAX_VALUE = 4, 5, 12, 200
_MAX_TEXT = 20_000
_SESSION_TEXT = re.compile(r"`([^`]*)`")


def quotes_call(text: str, call: ToolCall | None, right: Iterable[str], *, only_quoted: bool = False) -> list[str]:
    """Parts of the failing call that stand in a hint without being right, the longest first.

    With `only_quoted`, what stands in backticks alone is looked at: the rest of a template is its own words.
    """
    if call is None:
        return []
    allowed = list(right)
    looked_at = " \n ".join(_SESSION_TEXT.findall(text)) if only_quoted else text
    parts = sorted({*_call_parts(call)}, key=lambda part: (-len(part), part))
    return [
        part
        for part in parts
        if _stands_in(part, looked_at) and not any(part in allowed_text for allowed_text in allowed)
    ]


def _call_parts(call: ToolCall) -> Iterator[str]:
    """What a hint could quote of a call: its parameters, their values, lines, names, parts of paths, quotes."""
    yield from (name for name in call.arguments if len(name) >= _MIN_WORD and _NAME.search(name))
    for text in _texts(call.arguments if call.raw_arguments is None else call.raw_arguments):
        whole = " ".join(text.split())
        if _MIN_WORD <= len(whole) <= _MAX_VALUE:
            yield whole
        yield from (" ".join(line.split()) for line in text.splitlines() if len(line.strip()) >= _MIN_LINE)
        yield from (next(group for group in match.groups() if group) for match in _IN_QUOTES.finditer(text))
        for word in _WORD.findall(text):
            yield from _names(word.strip(_EDGES))


def _names(word: str) -> Iterator[str]:
    """A word that is a name; of a path its parts that are names, its last part, and that without its ending."""
    if not _NAME.search(word):
        return
    *folders, last = re.split(r"[/\\]", word)
    stem = last.rpartition(".")[0]
    yield from (name for name in (word, last) if len(name) >= _MIN_WORD)
    yield from (folder for folder in folders if len(folder) >= _MIN_WORD and _NAME.search(folder))
    if len(stem) >= _MIN_STEM:
        yield stem


def _texts(value: Any) -> Iterator[str]:
    """All texts of a value, however deep, in their order."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            yield node[:_MAX_TEXT]
        elif isinstance(node, Mapping):
            waiting += cast("Mapping[str, Any]", node).values()
        elif isinstance(node, list | tuple):
            waiting += cast("list[Any]", node)


def _stands_in(part: str, text: str) -> bool:
    position = text.find(part)
    while position >= 0:
        before, after = text[position - 1 : position], text[position + len(part) : position + len(part) + 1]
        if not (before.isalnum() or before == "_" or after.isalnum() or after == "_"):
            return True
        position = text.find(part, position + 1)
    return False
