"""Determine what a chat template can express, and protect the text that it renders.

`read_dialect` renders small conversations of made-up words and looks for the words in the output. `ThinkingRules`
decide what happens to a turn's thinking. `ProtectedTokens` prevents logged text from becoming a special token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from composer_replication.batch.render.templates import ChatTemplate
from composer_replication.errors import InputError, explain
from composer_replication.types import Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Probe words. No template contains them, so one that appears in a rendering came from the probe message.
_QUESTION, _ANSWER, _THOUGHT, _TOOL, _VALUE, _RESULT = "Zqask", "Zqsay", "Zqthink", "Zqtool", "Zqvalue", "Zqresult"
_SYSTEM = "Zqrules"
_PLAIN_ID, _SHORT_ID = "call_1", "call00001"  # Mistral accepts exactly nine letters and digits
Arguments = Literal["dict", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The kinds of messages that a template can show. Any other kind is written as plain text instead."""

    header: str  # the generation prompt, such as "<|im_start|>assistant\n"
    stops: tuple[str, ...]  # tokens that end an assistant turn
    system_first: bool
    system_later: bool
    users_in_a_row: bool
    assistants_in_a_row: bool
    assistant_first: bool
    call_token: str | None  # the token that opens the calls of a turn, if there is one
    tools: bool
    calls: bool
    parallel_calls: bool
    text_beside_calls: bool
    arguments: Arguments
    raw_arguments: bool  # shows arguments that are a string instead of a mapping
    short_ids: bool  # ids of calls must be nine letters and digits
    results: bool
    thinking: bool
    thought: _ThoughtForm  # how the template writes thinking

    @property
    def headers(self) -> list[str]:
        """The plain generation prompt, and the prompt for a turn without a thought if the two differ."""
        return list(dict.fromkeys([self.header, self.thought.quiet_header or self.header]))

    def call_and_result(self, result: str) -> list[Message]:
        """Return a call of the probe tool and its result, in the form that the template accepts."""
        identity = _SHORT_ID if self.short_ids else _PLAIN_ID
        call = _probe_call(_probe_arguments(self.arguments), identity=identity)
        return [call, _probe_result(result, identity=identity)]

    def without_tools(self) -> Dialect:
        """Return a dialect in which calls and results are written as text, which any template can show."""
        return replace(self, calls=False, results=False, tools=False)


def user(text: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": text}


def assistant(text: str) -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": text}


def _probe_call(arguments: object, *, identity: str = _PLAIN_ID, count: int = 1) -> Message:
    """Return an assistant message with `count` identical calls of the probe tool."""
    function = {"name": _TOOL, "arguments": arguments}
    calls = [{"id": identity, "type": "function", "function": function} for _ in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _probe_result(text: str, *, identity: str = _PLAIN_ID) -> Message:
    """Return a message with the result of a call of the probe tool."""
    return {"role": "tool", "tool_call_id": identity, "name": _TOOL, "content": text}


def _probe_arguments(arguments: Arguments) -> object:
    """Return arguments for the probe tool in the form that the template accepts."""
    return {"key": _VALUE} if arguments == "dict" else f'{{"key": "{_VALUE}"}}'


class _TemplateProbe:
    """Renders probe messages with a template that may reject them."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def text(self, *messages: Message, prompt: bool = False, tools: Any = None) -> str | None:
        """Return the template's rendering of the messages, or None if it rejects them."""
        try:
            return self._template.render(messages, prompt=prompt, tools=tools)
        except InputError:
            return None

    def shows(self, *messages: Message, words: Iterable[str], tools: Any = None) -> bool:
        """Whether the template accepts the messages and its output contains all of these words."""
        text = self.text(*messages, tools=tools)
        return text is not None and all(word in text for word in words)


def read_dialect(template: ChatTemplate, protected: ProtectedTokens) -> Dialect:
    """Determine from test renderings what a template can show. Raises InputError if it cannot show a simple dialog."""
    probe = _TemplateProbe(template)
    plain = template.render([user(_QUESTION), assistant(_ANSWER)])
    if _QUESTION not in plain or _ANSWER not in plain:
        raise InputError(
            explain("chat template", got=f"{plain[:80]!r}", expected="the texts of a user and an assistant message")
        )
    calls = _read_calls(probe)
    header, thinking = _read_header(template), _shows_thinking(probe)
    return Dialect(
        header=header,
        stops=_read_stops(probe, protected, plain, calls),
        system_first=probe.shows(system(_SYSTEM), user(_QUESTION), words=(_SYSTEM, _QUESTION)),
        system_later=probe.shows(
            user(_QUESTION), assistant(_ANSWER), system(_SYSTEM), user(_QUESTION), words=(_SYSTEM,)
        ),
        users_in_a_row=probe.shows(
            user(_QUESTION), user(_SYSTEM), assistant(_ANSWER), words=(_QUESTION, _SYSTEM, _ANSWER)
        ),
        assistants_in_a_row=probe.shows(
            user(_QUESTION), assistant(_ANSWER), assistant(_SYSTEM), words=(_ANSWER, _SYSTEM)
        ),
        assistant_first=_can_begin_with_assistant(probe),
        call_token=_read_call_token(probe, protected, calls),
        tools=probe.shows(user(_QUESTION), words=(_TOOL,), tools=[_probe_schema()]),
        thinking=thinking,
        thought=_read_thought_form(template, header) if thinking else _ThoughtForm(),
        **calls,
    )


def _read_calls(probe: _TemplateProbe) -> dict[str, Any]:
    """Determine how the template accepts calls: with arguments as a dict or as JSON, with any ids or only short
    ones, and with one or several calls per turn.
    """
    # A dict is tried first: a template that JSON-encodes its arguments accepts a string too, but encodes it twice.
    kinds: tuple[Arguments, ...] = ("dict", "text")
    variants: list[tuple[Arguments, bool]] = [(kind, short) for short in (False, True) for kind in kinds]
    accepted = [variant for variant in variants if _shows_call(probe, *variant)]
    if not accepted:
        no_calls = dict.fromkeys(
            ("calls", "parallel_calls", "text_beside_calls", "raw_arguments", "short_ids", "results"), False
        )
        return {**no_calls, "arguments": "dict"}
    arguments, short = accepted[0]
    identity, example = _SHORT_ID if short else _PLAIN_ID, _probe_arguments(arguments)
    call, two_calls = _probe_call(example, identity=identity), _probe_call(example, identity=identity, count=2)
    answer = _probe_result(_RESULT, identity=identity)
    return {
        "calls": True,
        "parallel_calls": (probe.text(user(_QUESTION), two_calls) or "").count(_TOOL) > 1,
        "text_beside_calls": probe.shows(user(_QUESTION), {**call, "content": _ANSWER}, words=(_TOOL, _ANSWER)),
        "arguments": arguments,
        "raw_arguments": probe.shows(user(_QUESTION), _probe_call(_VALUE, identity=identity), words=(_VALUE,)),
        "short_ids": short,
        "results": probe.shows(user(_QUESTION), call, answer, assistant(_ANSWER), words=(_TOOL, _RESULT, _ANSWER)),
    }


def _shows_call(probe: _TemplateProbe, arguments: Arguments, short: bool) -> bool:
    call = _probe_call(_probe_arguments(arguments), identity=_SHORT_ID if short else _PLAIN_ID)
    return probe.shows(user(_QUESTION), call, words=(_TOOL, _VALUE))


def _read_header(template: ChatTemplate) -> str:
    """Return the generation prompt: the text that the template appends to a question to ask for an answer."""
    before, after = (template.render([user(_QUESTION)], prompt=prompt) for prompt in (False, True))
    return after[len(before) :] if after.startswith(before) else ""


def _read_call_token(probe: _TemplateProbe, protected: ProtectedTokens, calls: Mapping[str, Any]) -> str | None:
    """Return the token that opens the calls of a turn, such as `<tool_call>`, or None."""
    # This is the first protected token after the turn's text, or after the prompt if the template hides text beside
    # calls.
    if not calls["calls"]:
        return None
    text, prompt = _example_call(probe, calls), probe.text(user(_QUESTION), prompt=True) or ""
    before = _ANSWER if calls["text_beside_calls"] else prompt
    match = protected.pattern.search(text.rpartition(_TOOL)[0].rpartition(before)[2])
    return match[0] if match and before in text else None


def _example_call(probe: _TemplateProbe, calls: Mapping[str, Any]) -> str:
    identity = _SHORT_ID if calls["short_ids"] else _PLAIN_ID
    call = _probe_call(_probe_arguments(calls["arguments"]), identity=identity)
    return probe.text(user(_QUESTION), {**call, "content": _ANSWER}) or ""


def _read_stops(
    probe: _TemplateProbe, protected: ProtectedTokens, plain: str, calls: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the tokens that end a turn; some templates use a different one for turns with calls."""
    tails = [plain.rpartition(_ANSWER)[2]]
    if calls["calls"]:
        tails.append(_example_call(probe, calls).rpartition(_VALUE)[2])
    candidates = [protected.last_special_token(tail) for tail in tails]
    return tuple(dict.fromkeys(stop for stop in candidates if stop))


def _can_begin_with_assistant(probe: _TemplateProbe) -> bool:
    """Whether a conversation may begin with an assistant message, both with a system prompt and without one."""
    # The generation prompt of an empty conversation must be a prefix of such a conversation.
    prompt, answer = probe.text(prompt=True), probe.text(assistant(_ANSWER))
    is_same_start = prompt is not None and answer is not None and answer.startswith(prompt) and _ANSWER in answer
    return is_same_start and probe.shows(system(_SYSTEM), assistant(_ANSWER), words=(_ANSWER,))


def _shows_thinking(probe: _TemplateProbe) -> bool:
    thoughtful = assistant(_ANSWER) | {"reasoning_content": _THOUGHT}
    return probe.shows(user(_QUESTION), thoughtful, words=(_ANSWER, _THOUGHT))


def _probe_schema() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    return {"type": "function", "function": {"name": _TOOL, "description": "A tool.", "parameters": parameters}}


Treatment = Literal["target", "context", "left_out"]
TREATMENTS: tuple[Treatment, ...] = ("target", "context", "left_out")
Outcome = Literal["none", "target", "context", "left_out", "not_shown"]
"""What was done with a turn's thinking. `none`: the turn has no thinking; `not_shown`: the template cannot show it."""
# The variables with which published templates switch thinking off.
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingRules:
    """What to do with the student's own thinking and with the thinking of other models.

    `target`: trained on, and shown in the history if the template shows it there. `context`: shown before the turn's
    own tokens, but not trained on. `left_out`: neither. A turn is the student's own if its ids were sampled (a rollout)
    or if its model matches a pattern in `student_models`, such as `Qwen/Qwen3-*`.
    """

    own: Treatment = "target"
    others: Treatment = "left_out"
    student_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("own", "others"):
            if getattr(self, name) not in TREATMENTS:
                raise InputError(
                    explain(f"thinking.{name}", got=repr(getattr(self, name)), expected=f"one of {TREATMENTS}")
                )

    def is_own(self, turn: Turn) -> bool:
        """Whether the student itself wrote the turn."""
        return bool(turn.token_ids) or any(fnmatchcase(turn.model or "", pattern) for pattern in self.student_models)

    def treatment(self, turn: Turn) -> Treatment:
        """Return what to do with the turn's thinking."""
        return self.own if self.is_own(turn) else self.others

    def align(self, *answers: Turn) -> tuple[Turn, ...]:
        """Make answers comparable: keep thinking if every answer has some to train on; otherwise remove all of it.

        Sampled ids contain the thinking, so an answer that loses its thinking loses its ids as well.
        """
        if all(answer.thinking.strip() and self.treatment(answer) == "target" for answer in answers):
            return answers
        return tuple(
            replace(answer, thinking="", token_ids=None, logprobs=None) if answer.thinking.strip() else answer
            for answer in answers
        )


ALL_OWN = ThinkingRules(student_models=("*",))
"""Rules that treat every turn as the student's own, whatever model the log names."""


class _ThoughtForm(NamedTuple):
    """How a template writes thoughts.

    A model that thinks begins its answer with a thought. If a turn's thought is not trained on, its text must not begin
    where the thought would, because that would train the model not to think. Its context ends with an empty, closed
    thought instead, as the template's prompt does when thinking is switched off.

    `quiet_header` is the generation prompt with an empty, closed thought, such as
    "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"; if it is None, a turn without a thought follows the plain
    header. `empty` is the block that the template adds to a finished turn without a thought. If `is_off`, the plain
    header is the quiet one: the template tells the model not to think.
    """

    quiet_header: str | None = None
    empty: str = ""
    is_off: bool = False


def _read_thought_form(template: ChatTemplate, header: str) -> _ThoughtForm:
    """Determine from test renderings how a template writes thinking."""
    question, answer = [user(_QUESTION)], assistant(_ANSWER)
    question_text = template.render(question)
    opening, closing = _thought_delimiters(
        template.render([*question, {**answer, "reasoning_content": _THOUGHT}]), question_text
    )
    # The text that closes a thought, such as "</think>".
    mark = closing.strip()
    if not mark or not header:
        return _ThoughtForm()
    plain = template.render([*question, answer])
    prefix = question_text + header
    empty = plain[len(prefix) : plain.find(_ANSWER)] if plain.startswith(prefix) else ""
    # Templates vary the whitespace in an empty block, so whitespace is not compared.
    if _without_whitespace(empty) != _without_whitespace(opening.removeprefix(header) + closing):
        empty = ""
    if header.rstrip().endswith(mark):
        return _ThoughtForm(header, empty, is_off=True)
    off_header = _header_when_off(template, question, mark)
    # If the prompt itself opens a thought, closing it at once makes it empty.
    if off_header is None and opening == header:
        off_header = header + closing
    return _ThoughtForm(off_header or (header + empty if empty else None), empty)


def _thought_delimiters(thoughtful: str, question_text: str) -> tuple[str, str]:
    """Return the text that the template writes before a thought, header included, and between thought and answer."""
    if not thoughtful.startswith(question_text) or _THOUGHT not in thoughtful:
        return "", ""
    opening, _, rest = thoughtful[len(question_text) :].partition(_THOUGHT)
    closing, separator, _ = rest.partition(_ANSWER)
    return opening, closing if separator else ""


def _header_when_off(template: ChatTemplate, question: list[Message], mark: str) -> str | None:
    """Return the generation prompt with thinking switched off; None if no such prompt ends with a closed thought."""
    for switch in _SWITCHES:
        off_template = template.with_options({switch: False})
        try:
            before, after = off_template.render(question), off_template.render(question, prompt=True)
        except InputError:
            continue
        header = after[len(before) :] if after.startswith(before) else ""
        if header.rstrip().endswith(mark):
            return header
    return None


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


_ESCAPE = "\U000f0000"  # precedes a private-use character of the text itself
_FIRST_SENTINEL = 0xF0001
_PRIVATE = "\U000f0000-\U0010ffff"
# Any character of Unicode's two supplementary private-use planes: "\U000f0001"; not "\ue000", a private-use character
# of the basic plane.
_PRIVATE_CHARACTER = re.compile(f"[{_PRIVATE}]")
# A sentinel alone, or the escape character and the character after it: "\U000f0001" in "a\U000f0001b",
# "\U000f0000\U000f0001" in "a\U000f0000\U000f0001b". The pattern starts with a class, which `re` searches for fast.
_ESCAPED = re.compile(f"[{_PRIVATE}](?:(?<={_ESCAPE}).)?", re.DOTALL)
_EDGE = "\U000ffffd"  # empty; separates a text from template text that could complete it to a token
_RAW = "\U00100000"  # encloses the index of a raw text; see `raw_marker`
# "\U0010000012\U00100000" -> 12, with or without quotes around it.
_RAW_MARKER = re.compile(f'"?{_RAW}([0-9]+){_RAW}"?')


class ProtectedTokens:
    """The tokens that only a template may write: special tokens, and added tokens that appear in its source.

    A log may contain `<|im_end|>` in a tool's output, an argument or a tool's name. Before rendering, `escape` replaces
    every protected string in a text by one private-use character, its sentinel. After rendering, every special token
    must have been written by the template, and each sentinel is encoded as the plain text that it replaced.
    Private-use characters of the text itself are preceded by an escape character, so `unescape` restores it exactly.

    Other added tokens (Gemma's runs of newlines, HTML tags) are ordinary text, both in training and in inference.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, structure: str) -> None:
        added = {token.content: (index, token) for index, token in tokenizer.added_tokens_decoder.items()}
        self.ids = {
            text: index
            for text, (index, token) in added.items()
            if text.strip() and (token.special or text in structure)
        }
        self.special = frozenset(text for text in self.ids if added[text][1].special)
        self._texts = sorted(self.ids, key=len, reverse=True)  # the longest match wins, as in the tokenizer
        self._sentinels = {text: chr(_FIRST_SENTINEL + number) for number, text in enumerate(self._texts)}
        self._meaning = {sentinel: text for text, sentinel in self._sentinels.items()} | {_EDGE: ""}
        self.lstrip_tokens = frozenset(text for text in self.ids if added[text][1].lstrip)
        self.rstrip_tokens = frozenset(text for text in self.ids if added[text][1].rstrip)
        self.longest = max(map(len, self._texts), default=0)
        self._beginnings = {text[:size] for text in self._texts for size in range(1, len(text))}
        self._endings = {text[size:] for text in self._texts for size in range(1, len(text))}
        tokens = _any_of_pattern(self._texts)
        # All patterns below match any protected string: "<|im_end|>", but not "<|im_end|" or "im_end".
        # "<|im_end|>" in "a <|im_end|> b"
        self.pattern = re.compile(tokens)
        # "<|im_end|>" too, but not a plain added token such as "<tool_call>"
        self._special_pattern = re.compile(_any_of_pattern([text for text in self._texts if text in self.special]))
        # "<|im_end|>", and private-use characters that are escapes themselves
        self._to_escape = re.compile(f"[{_PRIVATE}]|{tokens}")
        # Group 1 is a sentinel or a token such as "<|im_end|>". An escaped character matches without group 1, so that
        # it is no boundary.
        self.boundary = re.compile(f"{_ESCAPE}.|([{_PRIVATE}]|{tokens})", re.DOTALL)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)

    def escape(self, text: str) -> str:
        """Replace protected strings with sentinels, and lone surrogates with U+FFFD."""
        # Most texts are ASCII, which needs no normalization and has no private-use characters to escape.
        if not text.isascii():
            text = self._normalize_if_forged(replace_surrogates(text))
        is_private = not text.isascii() and _PRIVATE_CHARACTER.search(text)
        return self._add_edge_marks((self._to_escape if is_private else self.pattern).sub(self._escape_match, text))

    def escape_tree(self, value: Any) -> Any:
        """Escape every string in a JSON value, including the keys of objects."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict):
            return {self.escape(str(key)): self.escape_tree(member) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_tree(element) for element in value]
        return value

    def unescape(self, text: str) -> str:
        """Return the original of an escaped text."""
        return text if text.isascii() else _ESCAPED.sub(self._unescape_match, text)

    def sentinel_text(self, sentinel: str) -> str:
        """Return the string that a sentinel replaces."""
        return self._meaning[sentinel]

    def last_special_token(self, text: str) -> str | None:
        """Return the last special token that the template wrote into escaped text, or None."""
        tokens = self._special_pattern.findall(text)
        return tokens[-1] if tokens else None

    def splits_at_edge(self, before: str, after: str) -> bool:
        """Whether a protected token would span the boundary if the two texts were joined."""
        joined, edge = before[-self.longest :] + after, min(len(before), self.longest)
        return any(match.start() < edge < match.end() for match in self.pattern.finditer(joined))

    def _add_edge_marks(self, text: str) -> str:
        """Mark each end of the text at which the template's own text could complete a protected token."""
        # For example, a template that writes ">" after a tool's name would turn the name "<tool_call" into a token.
        if len(text) < self.longest and any(text in token_text for token_text in self._texts if text):
            return f"{_EDGE}{text}{_EDGE}"
        sizes = range(1, min(self.longest, len(text)) + 1)
        end = _EDGE if any(text[-size:] in self._beginnings for size in sizes) else ""
        start = _EDGE if any(text[:size] in self._endings for size in sizes) else ""
        return f"{start}{text}{end}" if start or end else text

    def _escape_match(self, match: re.Match[str]) -> str:
        matched_text = match[0]
        return self._sentinels.get(matched_text) or _ESCAPE + matched_text

    def _unescape_match(self, match: re.Match[str]) -> str:
        matched_text = match[0]
        return matched_text[1:] or self._meaning.get(matched_text, matched_text)

    def _normalize_if_forged(self, text: str) -> str:
        """Return the text as the tokenizer normalizes it if that adds protected strings; otherwise return it
        unchanged.
        """
        # Some tokenizers normalize before they search for added tokens, which turns look-alike letters into real
        # tokens.
        if self._normalizer is None:
            return text
        normal = self._normalizer.normalize_str(text)
        return normal if len(self.pattern.findall(normal)) > len(self.pattern.findall(text)) else text


def raw_marker(number: int) -> str:
    """Return a marker for text that must appear verbatim in the rendering, even if the template quotes strings."""
    return f"{_RAW}{number}{_RAW}"


def insert_raw(rendered: str, raw: list[str]) -> str:
    """Replace every marker in a rendering with its text, and remove any quotes that the template put around the
    marker.
    """
    return _RAW_MARKER.sub(lambda match: raw[int(match[1])], rendered) if raw else rendered


def _any_of_pattern(texts: Iterable[str]) -> str:
    # "(?!)" never matches; an empty alternation would match everywhere.
    return "|".join(map(re.escape, texts)) or r"(?!)"


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which no tokenizer accepts, with U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
