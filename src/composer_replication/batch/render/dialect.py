"""Find out what a chat template can express, and protect the text that it renders.

`read_dialect` renders small conversations of made-up words and looks for the words in the output. `ThinkingRules` say
what happens to a turn's thinking. `ProtectedTokens` keeps text of a log from becoming a special token.
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
PLAIN_ID, SHORT_ID = "call_1", "call00001"  # Mistral accepts exactly nine letters and digits
Arguments = Literal["dict", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The kinds of messages that a template shows. A kind that it does not show is written as plain text instead."""

    header: str  # the generation prompt, such as "<|im_start|>assistant\n"
    stops: tuple[str, ...]  # tokens that end an assistant turn
    system_first: bool
    system_later: bool
    users_in_a_row: bool
    assistants_in_a_row: bool
    assistant_first: bool
    call_token: str | None  # opens the calls of a turn; None if no token does
    tools: bool
    calls: bool
    parallel_calls: bool
    text_beside_calls: bool
    arguments: Arguments
    raw_arguments: bool  # arguments that are a string instead of a mapping are shown
    short_ids: bool  # ids of calls must be nine letters and digits
    results: bool
    thinking: bool
    thought: _ThoughtForm  # how thinking is shown

    @property
    def headers(self) -> list[str]:
        """The generation prompts: the plain one, and the one for a turn without a thought if that is different."""
        return list(dict.fromkeys([self.header, self.thought.quiet_header or self.header]))

    def without_tools(self) -> Dialect:
        """Return the dialect with calls and results written as text, which any template can show."""
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


def calling(arguments: object, *, identity: str = PLAIN_ID, count: int = 1) -> Message:
    """Return an assistant message with equal calls of the probe tool."""
    function = {"name": _TOOL, "arguments": arguments}
    calls = [{"id": identity, "type": "function", "function": function} for _ in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(text: str, *, identity: str = PLAIN_ID) -> Message:
    """Return the result of a call of the probe tool."""
    return {"role": "tool", "tool_call_id": identity, "name": _TOOL, "content": text}


def example_arguments(arguments: Arguments) -> object:
    """Return arguments for the probe tool in the form that the template takes."""
    return {"key": _VALUE} if arguments == "dict" else f'{{"key": "{_VALUE}"}}'


class _Probe:
    """Renders probe messages with a template that may refuse them."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def text(self, *messages: Message, prompt: bool = False, tools: Any = None) -> str | None:
        """Return the rendering, or None if the template refuses the messages."""
        try:
            return self._template.render(messages, prompt=prompt, tools=tools)
        except InputError:
            return None

    def shows(self, *messages: Message, words: Iterable[str], tools: Any = None) -> bool:
        """Return whether the template accepts the messages and writes all of these words."""
        text = self.text(*messages, tools=tools)
        return text is not None and all(word in text for word in words)


def read_dialect(template: ChatTemplate, protected: ProtectedTokens) -> Dialect:
    """Find out by test renderings what the template shows. Raises InputError if it cannot show a simple dialog."""
    probe = _Probe(template)
    plain = template.render([user(_QUESTION), assistant(_ANSWER)])
    if _QUESTION not in plain or _ANSWER not in plain:
        raise InputError(explain("chat template", got=f"{plain[:80]!r}", expected="a user's and an assistant's text"))
    calls = _read_calls(probe)
    header, thinking = _header(template), _shows_thinking(probe)
    return Dialect(
        header=header,
        stops=_stops(probe, protected, plain, calls),
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
        assistant_first=_can_start(probe),
        call_token=_call_token(probe, protected, calls),
        tools=probe.shows(user(_QUESTION), words=(_TOOL,), tools=[_schema()]),
        thinking=thinking,
        thought=_read_thought_form(template, header) if thinking else _ThoughtForm(),
        **calls,
    )


def _read_calls(probe: _Probe) -> dict[str, Any]:
    """Return how the template takes calls: arguments as a dict or as JSON text, any ids or short ones, one or more."""
    # A dict is tried first: a template that JSON-encodes its arguments shows a string too, but encoded twice.
    kinds: tuple[Arguments, ...] = ("dict", "text")
    variants: list[tuple[Arguments, bool]] = [(kind, short) for short in (False, True) for kind in kinds]
    accepted = [variant for variant in variants if _shows_call(probe, *variant)]
    if not accepted:
        no_calls = dict.fromkeys(
            ("calls", "parallel_calls", "text_beside_calls", "raw_arguments", "short_ids", "results"), False
        )
        return {**no_calls, "arguments": "dict"}
    arguments, short = accepted[0]
    identity, example = SHORT_ID if short else PLAIN_ID, example_arguments(arguments)
    call, two = calling(example, identity=identity), calling(example, identity=identity, count=2)
    answer = result(_RESULT, identity=identity)
    return {
        "calls": True,
        "parallel_calls": (probe.text(user(_QUESTION), two) or "").count(_TOOL) > 1,
        "text_beside_calls": probe.shows(user(_QUESTION), {**call, "content": _ANSWER}, words=(_TOOL, _ANSWER)),
        "arguments": arguments,
        "raw_arguments": probe.shows(user(_QUESTION), calling(_VALUE, identity=identity), words=(_VALUE,)),
        "short_ids": short,
        "results": probe.shows(user(_QUESTION), call, answer, assistant(_ANSWER), words=(_TOOL, _RESULT, _ANSWER)),
    }


def _shows_call(probe: _Probe, arguments: Arguments, short: bool) -> bool:
    call = calling(example_arguments(arguments), identity=SHORT_ID if short else PLAIN_ID)
    return probe.shows(user(_QUESTION), call, words=(_TOOL, _VALUE))


def _header(template: ChatTemplate) -> str:
    """Return the generation prompt: what the template adds to a question when it is to be answered."""
    before, after = (template.render([user(_QUESTION)], prompt=prompt) for prompt in (False, True))
    return after[len(before) :] if after.startswith(before) else ""


def _call_token(probe: _Probe, protected: ProtectedTokens, calls: Mapping[str, Any]) -> str | None:
    """Return the token that opens the calls of a turn, such as `<tool_call>`; None if there is none."""
    # It is the first protected token after the turn's text, or after the prompt if calls hide the text.
    if not calls["calls"]:
        return None
    text, prompt = _example_call(probe, calls), probe.text(user(_QUESTION), prompt=True) or ""
    before = _ANSWER if calls["text_beside_calls"] else prompt
    match = protected.pattern.search(text.rpartition(_TOOL)[0].rpartition(before)[2])
    return match[0] if match and before in text else None


def _example_call(probe: _Probe, calls: Mapping[str, Any]) -> str:
    identity = SHORT_ID if calls["short_ids"] else PLAIN_ID
    call = calling(example_arguments(calls["arguments"]), identity=identity)
    return probe.text(user(_QUESTION), {**call, "content": _ANSWER}) or ""


def _stops(probe: _Probe, protected: ProtectedTokens, plain: str, calls: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tokens that end a turn; some templates end a turn with calls with a token of its own."""
    tails = [plain.rpartition(_ANSWER)[2]]
    if calls["calls"]:
        tails.append(_example_call(probe, calls).rpartition(_VALUE)[2])
    candidates = [protected.last_special(tail) for tail in tails]
    return tuple(dict.fromkeys(stop for stop in candidates if stop))


def _can_start(probe: _Probe) -> bool:
    """Return whether a conversation may begin with the assistant, with and without a system prompt."""
    # The prompt of an empty conversation must be how such a conversation begins.
    prompt, answer = probe.text(prompt=True), probe.text(assistant(_ANSWER))
    is_same_start = prompt is not None and answer is not None and answer.startswith(prompt) and _ANSWER in answer
    return is_same_start and probe.shows(system(_SYSTEM), assistant(_ANSWER), words=(_ANSWER,))


def _shows_thinking(probe: _Probe) -> bool:
    thoughtful = assistant(_ANSWER) | {"reasoning_content": _THOUGHT}
    return probe.shows(user(_QUESTION), thoughtful, words=(_ANSWER, _THOUGHT))


def _schema() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    return {"type": "function", "function": {"name": _TOOL, "description": "A tool.", "parameters": parameters}}


Treatment = Literal["target", "context", "left_out"]
TREATMENTS: tuple[Treatment, ...] = ("target", "context", "left_out")
Outcome = Literal["none", "target", "context", "left_out", "not_shown"]
"""What was done with a turn's thinking. `none`: the turn had none; `not_shown`: the template cannot show it."""
# The variables that switch thinking off in published templates.
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingRules:
    """What to do with the student's own thinking and with that of other models.

    `target`: trained on, and shown in the history if the template shows it there. `context`: shown before the turn's
    own tokens, but not trained on. `left_out`: neither. A turn is the student's own if its ids were sampled (a rollout)
    or if its model matches one of `student_models`, patterns such as `Qwen/Qwen3-*`.
    """

    own: Treatment = "target"
    others: Treatment = "left_out"
    student_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("own", "others"):
            if getattr(self, name) not in TREATMENTS:
                raise InputError(explain(f"thinking: {name}", got=getattr(self, name), expected=f"one of {TREATMENTS}"))

    def is_own(self, turn: Turn) -> bool:
        """Return whether the student itself wrote the turn."""
        return bool(turn.token_ids) or any(fnmatchcase(turn.model or "", pattern) for pattern in self.student_models)

    def treatment(self, turn: Turn) -> Treatment:
        """Return what to do with the turn's thinking."""
        return self.own if self.is_own(turn) else self.others

    def align(self, *answers: Turn) -> tuple[Turn, ...]:
        """Return answers that can be compared: all with thinking if each has some to train on, otherwise all without.

        Sampled ids contain the thinking, so an answer that loses its thinking loses its ids as well.
        """
        if all(answer.thinking.strip() and self.treatment(answer) == "target" for answer in answers):
            return answers
        return tuple(
            replace(answer, thinking="", token_ids=None, logprobs=None) if answer.thinking.strip() else answer
            for answer in answers
        )


ALL_OWN = ThinkingRules(student_models=("*",))
"""Rules for turns that the student wrote, whatever model a log names."""


class _ThoughtForm(NamedTuple):
    """How a template writes thoughts.

    A model that thinks begins its answer with a thought. If a turn's thought is not trained on, the turn's text must
    not begin where the thought would, which would train the model not to think. The context then ends with an empty,
    closed thought, as the template's prompt does when thinking is switched off.

    `quiet_header` is the generation prompt with an empty, closed thought, such as
    "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"; None if the template has none, and a turn without a thought
    follows the plain header. `empty` is the block that the template adds to a finished turn without a thought. If
    `is_off`, the plain header is the quiet one: the template tells the model not to think.
    """

    quiet_header: str | None = None
    empty: str = ""
    is_off: bool = False


def _read_thought_form(template: ChatTemplate, header: str) -> _ThoughtForm:
    """Find out by test renderings how a template that shows thinking writes it."""
    question, bare = [user(_QUESTION)], assistant(_ANSWER)
    question_text = template.render(question)
    opening, closing = _block(template.render([*question, {**bare, "reasoning_content": _THOUGHT}]), question_text)
    # What closes a thought, such as "</think>".
    mark = closing.strip()
    if not mark or not header:
        return _ThoughtForm()
    plain = template.render([*question, bare])
    prefix = question_text + header
    empty = plain[len(prefix) : plain.find(_ANSWER)] if plain.startswith(prefix) else ""
    # Templates vary the whitespace in an empty block, so only the rest is compared.
    if _without_whitespace(empty) != _without_whitespace(opening.removeprefix(header) + closing):
        empty = ""
    if header.rstrip().endswith(mark):
        return _ThoughtForm(header, empty, is_off=True)
    off = _header_when_off(template, question, mark)
    # If the prompt itself opens a thought, closing it at once makes it empty.
    if off is None and opening == header:
        off = header + closing
    return _ThoughtForm(off or (header + empty if empty else None), empty)


def _block(thoughtful: str, question_text: str) -> tuple[str, str]:
    """Return what the template writes before a thought, including the header, and between the thought and the text."""
    if not thoughtful.startswith(question_text) or _THOUGHT not in thoughtful:
        return "", ""
    opening, _, rest = thoughtful[len(question_text) :].partition(_THOUGHT)
    closing, separator, _ = rest.partition(_ANSWER)
    return opening, closing if separator else ""


def _header_when_off(template: ChatTemplate, question: list[Message], mark: str) -> str | None:
    """Return the generation prompt with thinking switched off; None unless it ends with a closed thought."""
    for switch in _SWITCHES:
        quiet = template.with_options({switch: False})
        try:
            before, after = quiet.render(question), quiet.render(question, prompt=True)
        except InputError:
            continue
        header = after[len(before) :] if after.startswith(before) else ""
        if header.rstrip().endswith(mark):
            return header
    return None


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


_ESCAPE = "\U000f0000"  # the next character is meant literally
_FIRST_SENTINEL = 0xF0001
_PRIVATE = "\U000f0000-\U0010ffff"
# Any character of Unicode's two supplementary private-use planes: "\U000f0001"; not "\ue000", a private-use character
# of the basic plane.
_PRIVATE_CHARACTER = re.compile(f"[{_PRIVATE}]")
# A sentinel alone, or the escape character with the character after it: "\U000f0001" in "a\U000f0001b",
# "\U000f0000\U000f0001" in "a\U000f0000\U000f0001b". The pattern starts with a class, which `re` searches for fast.
_ESCAPED = re.compile(f"[{_PRIVATE}](?:(?<={_ESCAPE}).)?", re.DOTALL)
_EDGE = "\U000ffffd"  # means nothing; ends a text that a template could otherwise complete to a token
_RAW = "\U00100000"  # encloses the number of a raw text; see `raw_marker`
# "\U0010000012\U00100000" -> 12, with or without quotes around it.
_RAW_MARKER = re.compile(f'"?{_RAW}([0-9]+){_RAW}"?')


class ProtectedTokens:
    """The strings that only a template may write as tokens: special ones, and added ones that appear in its source.

    A log may contain `<|im_end|>` in a tool's output, an argument or a tool's name. Before rendering, `escape` replaces
    every protected string in a text by one private-use character, its sentinel. After rendering, whatever reads as a
    special token was written by the template, and the sentinels are encoded as the plain text that they stand for.
    Private-use characters of the text itself are marked with an escape character, so that `plain` restores it exactly.

    Other added tokens (Gemma's runs of newlines, HTML tags) are ordinary text, in training as in inference.
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
        self.swallows_before = frozenset(text for text in self.ids if added[text][1].lstrip)
        self.swallows_after = frozenset(text for text in self.ids if added[text][1].rstrip)
        self.longest = max(map(len, self._texts), default=0)
        self._beginnings = {text[:size] for text in self._texts for size in range(1, len(text))}
        self._endings = {text[size:] for text in self._texts for size in range(1, len(text))}
        tokens = _any_of(self._texts)
        # All patterns below match any protected string: "<|im_end|>", but not "<|im_end|" or "im_end".
        # "<|im_end|>" in "a <|im_end|> b"
        self.pattern = re.compile(tokens)
        # "<|im_end|>" too, but not a plain added token such as "<tool_call>"
        self._special_pattern = re.compile(_any_of([text for text in self._texts if text in self.special]))
        # "<|im_end|>", and private-use characters that are escapes themselves
        self._to_escape = re.compile(f"[{_PRIVATE}]|{tokens}")
        # Group 1 is a sentinel or a token such as "<|im_end|>". An escaped character matches without a group, so it is
        # not a boundary.
        self.boundary = re.compile(f"{_ESCAPE}.|([{_PRIVATE}]|{tokens})", re.DOTALL)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)

    def escape(self, text: str) -> str:
        """Return the text with sentinels for protected strings, and U+FFFD for lone surrogates."""
        # Most texts are ASCII: for them nothing needs to be normalized, and no private-use character escaped.
        if not text.isascii():
            text = self._normalized_if_forged(without_surrogates(text))
        is_private = not text.isascii() and _PRIVATE_CHARACTER.search(text)
        return self._edged((self._to_escape if is_private else self.pattern).sub(self._sentinel, text))

    def escape_tree(self, value: Any) -> Any:
        """Return a JSON value with every string escaped, including keys."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict):
            return {self.escape(str(key)): self.escape_tree(member) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_tree(element) for element in value]
        return value

    def plain(self, text: str) -> str:
        """Return the original of an escaped text."""
        return text if text.isascii() else _ESCAPED.sub(self._literal, text)

    def meaning(self, sentinel: str) -> str:
        """Return the string that a sentinel replaces."""
        return self._meaning[sentinel]

    def last_special(self, text: str) -> str | None:
        """Return the last special token that the template wrote into escaped text; None if there is none."""
        tokens = self._special_pattern.findall(text)
        return tokens[-1] if tokens else None

    def splits_at_edge(self, before: str, after: str) -> bool:
        """Return whether two texts joined at an edge would contain a token that spans it."""
        both, border = before[-self.longest :] + after, min(len(before), self.longest)
        return any(match.start() < border < match.end() for match in self.pattern.finditer(both))

    def _edged(self, text: str) -> str:
        """Return the text with an edge mark at each end where the template's own text could complete a token."""
        # For example, a template that writes ">" after a tool's name would turn the name "<tool_call" into a token.
        if len(text) < self.longest and any(text in token_text for token_text in self._texts if text):
            return f"{_EDGE}{text}{_EDGE}"
        sizes = range(1, min(self.longest, len(text)) + 1)
        end = _EDGE if any(text[-size:] in self._beginnings for size in sizes) else ""
        start = _EDGE if any(text[:size] in self._endings for size in sizes) else ""
        return f"{start}{text}{end}" if start or end else text

    def _sentinel(self, match: re.Match[str]) -> str:
        matched_text = match[0]
        return self._sentinels.get(matched_text) or _ESCAPE + matched_text

    def _literal(self, match: re.Match[str]) -> str:
        matched_text = match[0]
        return matched_text[1:] or self._meaning.get(matched_text, matched_text)

    def _normalized_if_forged(self, text: str) -> str:
        """Return the text as the tokenizer will normalize it if that creates protected strings, else unchanged."""
        # Some tokenizers normalize before they look for added tokens, which turns look-alike letters into real ones.
        if self._normalizer is None:
            return text
        normal = self._normalizer.normalize_str(text)
        return normal if len(self.pattern.findall(normal)) > len(self.pattern.findall(text)) else text


def raw_marker(number: int) -> str:
    """Return a marker for text that goes into the rendering as it is, even if the template quotes strings."""
    return f"{_RAW}{number}{_RAW}"


def insert_raw(rendered: str, raw: list[str]) -> str:
    """Return the rendering with every marker, and the quotes that a template put around it, replaced by its text."""
    return _RAW_MARKER.sub(lambda match: raw[int(match[1])], rendered) if raw else rendered


def _any_of(texts: Iterable[str]) -> str:
    # "(?!)" never matches; an empty alternation would match everywhere.
    return "|".join(map(re.escape, texts)) or r"(?!)"


def without_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
