"""Write the hint for an error site, and check that the hint does not quote the failing call.

The sources are tried in order: a template, the wording of the error, or a custom writer. If a user corrected the call,
the user's words are the hint.

A small model copies what it reads, so a hint that quotes an error makes the error more likely (`quoted_call_parts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.context import (
    HintContext,
    StateCursor,
    correct_texts,
    find_call,
    first_sentences,
    quote_text,
)
from composer_replication.hint_generator.facts import collect_facts, is_json_error
from composer_replication.hint_generator.templates import HINT_TEMPLATES, VERSION, dispatch
from composer_replication.sites.actions.tools import word_set
from composer_replication.sites.user_corrections import CORRECTED
from composer_replication.types import Conversation, ErrorSite, Hint, ToolCall

if TYPE_CHECKING:
    from composer_replication.privacy import Scrubber

HintSource = Literal["template", "raw_error", "writer"]
# Maximum number of characters quoted from a user's message.
_MAX_USER_TEXT = 400
# Words that mean nothing without the call they refer to. Text with no other words is not a hint: "no, not this".
_CONTEXT_WORDS = word_set(
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
    along: StateCursor | None = None,
) -> Hint | None:
    """Return the hint for an error site with the facts it is based on, or None if no source has a hint.

    Args:
        site: The error site. If the model is not to blame, the result is None.
        conversation: The conversation that contains the site.
        sources: Sources of hints, in order of preference.
        writer: A function that writes hints; required for the source "writer".
        tool_schemas: Hand-written schemas by tool.
        inferred_tools: Tools called in sessions of the same agent, with the schemas inferred from these calls.
        scrubber: Redacts the facts first. Pass it if the conversation has not been scrubbed.
        along: A `StateCursor` for the conversation, which saves work if it contains many sites.

    Raises:
        InputError: A source is unknown, or is "writer" without a writer.
    """
    unknown = [source for source in sources if source not in _SOURCES]
    if unknown or ("writer" in sources and writer is None):
        got = f"{list(sources)}, {'no writer' if writer is None else 'a writer'}"
        expected = f"sources from {list(_SOURCES)}, and a writer if 'writer' is among them"
        raise InputError(explain("hint sources", got=got, expected=expected))
    if site.blame != "model":
        return None
    if site.kind == CORRECTED:
        return hint_from_user_words(user_correction_text(site, conversation), scrubber=scrubber)
    facts = collect_facts(site, conversation, tool_schemas=tool_schemas, inferred_tools=inferred_tools, along=along)
    if scrubber is not None:  # before any text is shortened: half a secret is not recognized
        scope = scrubber.scope()
        site = replace(site, evidence_text=scope.text(site.evidence_text), tool=scope.text(site.tool))
        facts = scope.value(dict(facts))
    for source in sources:
        template, text = _hint_from_source(source, site, conversation, facts, writer)
        if text and text.strip():
            clean = first_sentences(" ".join(text.split()))
            clean = clean if scrubber is None else scrubber.scope().text(clean)
            return Hint(text=clean, source=source, template=template, version=VERSION, facts=dict(facts))
    return None


def hint_from_user_words(words: str, *, template: str = CORRECTED, scrubber: Scrubber | None = None) -> Hint | None:
    """Return a user's words as a hint, or None if they cannot be understood without the call."""
    words = words if scrubber is None else scrubber.scope().text(words)
    # On one line and without double quotes, so that the quotation in the hint ends where the words end.
    line = " ".join("".join(char if char.isprintable() else " " for char in words).split()).replace('"', "'")
    if len(line) > _MAX_USER_TEXT:
        line = line[: _MAX_USER_TEXT - 1].rpartition(" ")[0] + "…"
    # "Don\u2019t push yet" -> "don't", "push", "yet"
    if _CONTEXT_WORDS.issuperset(re.findall(r"\w[\w']*", line.lower().replace("\u2019", "'"))):
        return None
    text = f'The user says: "{line}"'
    return Hint(text=text, source="user", template=template, version=VERSION, facts={"words": line})


def user_correction_text(site: ErrorSite, conversation: Conversation) -> str:
    """Return the user's words in the site's evidence, which come from a refusal or from the message after a stop."""
    turn = next((turn for turn in conversation.turns if turn.id == site.result_turn_id), None)
    results = () if turn is None else (result.text for result in turn.results if result.call_id == site.call_id)
    text = next(iter(results), "" if turn is None else turn.text)
    return text[slice(*site.evidence)]


def _template_name(site: ErrorSite, facts: HintContext | None = None, *, is_json: bool = False) -> str:
    """Return the name of the template for a site. A repeated failure has a separate template, whatever its kind."""
    if site.repeats:
        return "repeated_failure"
    if site.kind == "input_validation" and site.kind not in HINT_TEMPLATES:
        has_names = any((facts or {}).get(key) for key in ("missing_parameters", "unexpected_parameters"))
        return "json_decode" if is_json and not has_names else "type_error"
    return site.kind if site.kind in HINT_TEMPLATES else "runtime_error"


def _hint_from_source(
    source: HintSource, site: ErrorSite, conversation: Conversation, facts: HintContext, writer: HintWriter | None
) -> tuple[str, str | None]:
    """Return the name of the template or writer, and its hint, or None if this source has no hint."""
    call = find_call(site, conversation)
    if source == "template":
        name = _template_name(site, facts, is_json=is_json_error(call, facts.get("error_message", "")))
        text = dispatch(name, facts)
        # If a fact quotes the failing call, the template is used without any facts.
        is_quoting = text and quoted_call_parts(text, call, correct_texts(facts), only_quoted=True)
        return name, dispatch(name, {"error_kind": site.kind}) if is_quoting else text
    if source == "raw_error":
        message = quote_text(site.evidence_text)
        return "raw_error", f"This call fails with {message}." if message else None
    assert writer is not None
    return getattr(writer, "__name__", type(writer).__name__), writer(site, conversation, facts)


# ---- The contract: a hint does not quote the failing call, except for parts that are correct -------------------------

# "cat 'src/a.py'" -> "cat"; not "()"
_WORD = re.compile(r"[^\s'\"`(){}\[\],;<>|&=]+")
# A word with one of these is a name. Words without them are plain language, which any rule may contain.
# "src/a.py"; "maxTokens"; "v2"; not "parameter"
_NAME = re.compile(r"[\d_./\\:$*@#~^-]|[a-z][A-Z]")
# "echo 'two words'" -> "two words"; not "it's"
_IN_QUOTES = re.compile(r"'([^'\n]{3,200})'|\"([^\"\n]{3,200})\"")
_PUNCTUATION = ".,:;!?…"
# Lengths in characters. Shorter parts occur in any text by chance; longer values are never quoted in full.
_MIN_WORD, _MIN_STEM, _MIN_LINE, _MAX_VALUE = 4, 5, 12, 200
_MAX_TEXT = 20_000
# "Use `read_file` here." -> "read_file"
_QUOTED_TEXT = re.compile(r"`([^`]*)`")


def quoted_call_parts(
    text: str, call: ToolCall | None, correct: Iterable[str], *, only_quoted: bool = False
) -> list[str]:
    """Return the incorrect parts of the failing call that a hint quotes, the longest first.

    With `only_quoted`, only text in backticks is checked: the rest of a template does not come from the session.
    """
    if call is None:
        return []
    allowed = list(correct)
    checked_text = " \n ".join(_QUOTED_TEXT.findall(text)) if only_quoted else text
    parts = sorted({*_call_parts(call)}, key=lambda part: (-len(part), part))
    return [
        part
        for part in parts
        if _contains_words(part, checked_text) and not any(part in allowed_text for allowed_text in allowed)
    ]


def _call_parts(call: ToolCall) -> Iterator[str]:
    """Yield the parts of a call that a hint could quote: parameters, values, names, path components and so on."""
    yield from (name for name in call.arguments if len(name) >= _MIN_WORD and _NAME.search(name))
    for text in _iterate_strings(call.arguments if call.raw_arguments is None else call.raw_arguments):
        whole = " ".join(text.split())
        if _MIN_WORD <= len(whole) <= _MAX_VALUE:
            yield whole
        yield from (" ".join(line.split()) for line in text.splitlines() if len(line.strip()) >= _MIN_LINE)
        yield from (next(group for group in match.groups() if group) for match in _IN_QUOTES.finditer(text))
        for word in _WORD.findall(text):
            yield from _name_parts(word.strip(_PUNCTUATION))


def _name_parts(word: str) -> Iterator[str]:
    """Yield a word if it is a name. For a path, also yield its components and the file name without its extension."""
    if not _NAME.search(word):
        return
    *folders, last = re.split(r"[/\\]", word)
    stem = last.rpartition(".")[0]
    yield from (name for name in (word, last) if len(name) >= _MIN_WORD)
    yield from (folder for folder in folders if len(folder) >= _MIN_WORD and _NAME.search(folder))
    if len(stem) >= _MIN_STEM:
        yield stem


def _iterate_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a nested value, each truncated to a maximum length."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            yield node[:_MAX_TEXT]
        elif isinstance(node, Mapping):
            pending += cast("Mapping[str, Any]", node).values()
        elif isinstance(node, list | tuple):
            pending += cast("list[Any]", node)


def _contains_words(part: str, text: str) -> bool:
    """Return whether the part occurs in the text as whole words: `main` does not occur in `domain`."""
    position = text.find(part)
    while position >= 0:
        before, after = text[position - 1 : position], text[position + len(part) : position + len(part) + 1]
        if not (before.isalnum() or before == "_" or after.isalnum() or after == "_"):
            return True
        position = text.find(part, position + 1)
    return False
