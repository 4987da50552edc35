"""What a chat template can say, found by asking it: small conversations of known words, looked for in its output."""

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


# Words no template writes by itself.
_ASKED, _SAID, _THOUGHT, _TOOL, _VALUE, _CAME_BACK = "Zqask", "Zqsay", "Zqthink", "Zqtool", "Zqvalue", "Zqresult"
_RULES = "Zqrules"
PLAIN_ID, SHORT_ID = "call_1", "call00001"  # Mistral takes nine letters and digits only
Arguments = Literal["dict", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Which messages a template shows; where it shows none of a kind, that kind is written as text instead."""

    header: str  # the generation prompt
    stops: tuple[str, ...]  # tokens that end an assistant turn
    system_first: bool
    system_later: bool
    users_in_a_row: bool
    assistants_in_a_row: bool
    assistant_first: bool
    call_token: str | None  # opens the calls of a turn; None where no token does
    tools: bool
    calls: bool
    parallel_calls: bool
    text_beside_calls: bool
    arguments: Arguments
    raw_arguments: bool  # arguments that are a string are shown
    short_ids: bool
    results: bool
    thinking: bool
    thought: _ThoughtForm  # where thinking is shown

    @property
    def headers(self) -> list[str]:
        """The generation prompt, and the one behind which a turn has no thought where that is another."""
        return list(dict.fromkeys([self.header, self.thought.quiet_header or self.header]))

    def without_tools(self) -> Dialect:
        """The same with calls and results as text, which any template can say."""
        return replace(self, calls=False, results=False, tools=False)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calling(arguments: object, *, identity: str = PLAIN_ID, count: int = 1) -> Message:
    function = {"name": _TOOL, "arguments": arguments}
    calls = [{"id": identity, "type": "function", "function": function} for _ in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(text: str, *, identity: str = PLAIN_ID) -> Message:
    return {"role": "tool", "tool_call_id": identity, "name": _TOOL, "content": text}


def example_arguments(arguments: Arguments) -> object:
    return {"key": _VALUE} if arguments == "dict" else f'{{"key": "{_VALUE}"}}'


class _Probe:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def text(self, *messages: Message, prompt: bool = False, tools: Any = None) -> str | None:
        try:
            return self._template.render(messages, prompt=prompt, tools=tools)
        except InputError:
            return None

    def shows(self, *messages: Message, words: Iterable[str], tools: Any = None) -> bool:
        text = self.text(*messages, tools=tools)
        return text is not None and all(word in text for word in words)


def read_dialect(template: ChatTemplate, protected: ProtectedTokens) -> Dialect:
    """Ask the template about everything a conversation may hold."""
    probe = _Probe(template)
    plain = template.render([user(_ASKED), assistant(_SAID)])  # a template that cannot say this is of no use
    if _ASKED not in plain or _SAID not in plain:
        raise InputError(explain("chat template", got=f"{plain[:80]!r}", expected="a user's and an assistant's text"))
    calls = _read_calls(probe)
    header, thinking = _header(template), _shows_thinking(probe)
    return Dialect(
        header=header,
        stops=_stops(probe, protected, plain, calls),
        system_first=probe.shows(system(_RULES), user(_ASKED), words=(_RULES, _ASKED)),
        system_later=probe.shows(user(_ASKED), assistant(_SAID), system(_RULES), user(_ASKED), words=(_RULES,)),
        users_in_a_row=probe.shows(user(_ASKED), user(_RULES), assistant(_SAID), words=(_ASKED, _RULES, _SAID)),
        assistants_in_a_row=probe.shows(user(_ASKED), assistant(_SAID), assistant(_RULES), words=(_SAID, _RULES)),
        assistant_first=_can_start(probe),
        call_token=_call_token(probe, protected, calls),
        tools=probe.shows(user(_ASKED), words=(_TOOL,), tools=[_schema()]),
        thinking=thinking,
        thought=_read_thought_form(template, header) if thinking else _ThoughtForm(),
        **calls,
    )


def _read_calls(probe: _Probe) -> dict[str, Any]:
    """How the template takes calls: arguments as a dict or as JSON text, any ids or short ones, one or several."""
    # A dict first: a template that quotes a string shows it too, but encoded twice.
    kinds: tuple[Arguments, ...] = ("dict", "text")
    variants: list[tuple[Arguments, bool]] = [(kind, short) for short in (False, True) for kind in kinds]
    accepted = [variant for variant in variants if _shows_call(probe, *variant)]
    if not accepted:
        nothing = dict.fromkeys(
            ("calls", "parallel_calls", "text_beside_calls", "raw_arguments", "short_ids", "results"), False
        )
        return {**nothing, "arguments": "dict"}
    arguments, short = accepted[0]
    identity, example = SHORT_ID if short else PLAIN_ID, example_arguments(arguments)
    call, two = calling(example, identity=identity), calling(example, identity=identity, count=2)
    back = result(_CAME_BACK, identity=identity)
    return {
        "calls": True,
        "parallel_calls": (probe.text(user(_ASKED), two) or "").count(_TOOL) > 1,
        "text_beside_calls": probe.shows(user(_ASKED), {**call, "content": _SAID}, words=(_TOOL, _SAID)),
        "arguments": arguments,
        "raw_arguments": probe.shows(user(_ASKED), calling(_VALUE, identity=identity), words=(_VALUE,)),
        "short_ids": short,
        "results": probe.shows(user(_ASKED), call, back, assistant(_SAID), words=(_TOOL, _CAME_BACK, _SAID)),
    }


def _shows_call(probe: _Probe, arguments: Arguments, short: bool) -> bool:
    call = calling(example_arguments(arguments), identity=SHORT_ID if short else PLAIN_ID)
    return probe.shows(user(_ASKED), call, words=(_TOOL, _VALUE))


def _header(template: ChatTemplate) -> str:
    before, after = (template.render([user(_ASKED)], prompt=prompt) for prompt in (False, True))
    return after[len(before) :] if after.startswith(before) else ""


def _call_token(probe: _Probe, protected: ProtectedTokens, calls: Mapping[str, Any]) -> str | None:
    """The first token after a turn's text, or after the prompt where a text is not shown beside calls."""
    if not calls["calls"]:
        return None
    text, prompt = _example_call(probe, calls), probe.text(user(_ASKED), prompt=True) or ""
    before = _SAID if calls["text_beside_calls"] else prompt
    match = protected.pattern.search(text.rpartition(_TOOL)[0].rpartition(before)[2])
    return match[0] if match and before in text else None


def _example_call(probe: _Probe, calls: Mapping[str, Any]) -> str:
    identity = SHORT_ID if calls["short_ids"] else PLAIN_ID
    call = calling(example_arguments(calls["arguments"]), identity=identity)
    return probe.text(user(_ASKED), {**call, "content": _SAID}) or ""


def _stops(probe: _Probe, protected: ProtectedTokens, plain: str, calls: Mapping[str, Any]) -> tuple[str, ...]:
    tails = [plain.rpartition(_SAID)[2]]
    if calls["calls"]:
        tails.append(_example_call(probe, calls).rpartition(_VALUE)[2])
    candidates = [protected.last_special(tail) for tail in tails]
    return tuple(dict.fromkeys(stop for stop in candidates if stop))


def _can_start(probe: _Probe) -> bool:
    """Whether the assistant may speak first: a prompt after nothing must be what such a conversation begins with."""
    prompt, answer = probe.text(prompt=True), probe.text(assistant(_SAID))
    is_same_start = prompt is not None and answer is not None and answer.startswith(prompt) and _SAID in answer
    return is_same_start and probe.shows(system(_RULES), assistant(_SAID), words=(_SAID,))


def _shows_thinking(probe: _Probe) -> bool:
    thoughtful = assistant(_SAID) | {"reasoning_content": _THOUGHT}
    return probe.shows(user(_ASKED), thoughtful, words=(_SAID, _THOUGHT))


def _schema() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    return {"type": "function", "function": {"name": _TOOL, "description": "A tool.", "parameters": parameters}}


# What becomes of a turn's thinking: whose it is, what the rules say, and how a template opens and closes a thought.
#
# A model that thinks begins its answer with a thought. Where a turn's thought is not to be learned, its text must not
# begin where the thought would: the context then ends as the template's own prompt does when thinking is switched off,
# with a thought that is empty and closed (`ThoughtForm.quiet_header`).

Treatment = Literal["target", "context", "left_out"]
TREATMENTS: tuple[Treatment, ...] = ("target", "context", "left_out")
Outcome = Literal["none", "target", "context", "left_out", "not_shown"]
"""What was done with a turn's thinking; `none`: it had none, `not_shown`: the template has no place for it."""
_PROBE_QUESTION, _PROBE_ANSWER, _PROBE_THOUGHT = "Zqask", "Zqsay", "Zqthink"
_SWITCHES = ("enable_thinking", "thinking")  # what templates call the variable that turns thinking off


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingRules:
    """What to do with the thinking of the student itself and with that of others.

    `target`: learned, and shown in history where the template shows it. `context`: shown, and not learned: the thought
    stands before the turn's own tokens. `left_out`: neither. A turn is the student's own where its ids were sampled
    (a rollout), or where its model matches one of `student_models`, patterns such as `Qwen/Qwen3-*`.
    """

    own: Treatment = "target"
    others: Treatment = "left_out"
    student_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("own", "others"):
            if getattr(self, name) not in TREATMENTS:
                raise InputError(explain(f"thinking: {name}", got=getattr(self, name), expected=f"one of {TREATMENTS}"))

    def is_own(self, turn: Turn) -> bool:
        return bool(turn.token_ids) or any(fnmatchcase(turn.model or "", pattern) for pattern in self.student_models)

    def treatment(self, turn: Turn) -> Treatment:
        return self.own if self.is_own(turn) else self.others

    def alike(self, *answers: Turn) -> tuple[Turn, ...]:
        """Answers to compare: all with their thinking, where each has some that is a target, or all without."""
        if all(answer.thinking.strip() and self.treatment(answer) == "target" for answer in answers):
            return answers
        return tuple(
            replace(answer, thinking="", token_ids=None, logprobs=None) if answer.thinking.strip() else answer
            for answer in answers
        )


ALL_OWN = ThinkingRules(student_models=("*",))
"""For turns that are known to be the student's, whatever model a log names."""


class _ThoughtForm(NamedTuple):
    """How a template writes thoughts, found by asking it.

    `quiet_header` is the generation prompt with an empty thought closed behind it; None where the template knows no
    such thing, and a turn without a thought follows the plain header. `empty` is the block that it writes by itself on
    a finished turn without a thought. With `is_off` the plain header is the quiet one: the model is not to think.
    """

    quiet_header: str | None = None
    empty: str = ""
    is_off: bool = False


def _read_thought_form(template: ChatTemplate, header: str) -> _ThoughtForm:
    """Ask a template that shows thinking."""
    question: list[Message] = [{"role": "user", "content": _PROBE_QUESTION}]
    bare: Message = {"role": "assistant", "content": _PROBE_ANSWER}
    question_text = template.render(question)
    opening, closing = _block(
        template.render([*question, {**bare, "reasoning_content": _PROBE_THOUGHT}]), question_text
    )
    mark = closing.strip()
    if not mark or not header:
        return _ThoughtForm()
    plain = template.render([*question, bare])
    empty = (
        plain[len(question_text + header) : plain.find(_PROBE_ANSWER)]
        if plain.startswith(question_text + header)
        else ""
    )
    if _letters(empty) != _letters(opening.removeprefix(header) + closing):
        empty = ""
    if header.rstrip().endswith(mark):
        return _ThoughtForm(header, empty, is_off=True)
    off = _header_when_off(template, question, mark)
    if off is None and opening == header:  # the prompt opens a thought: closed at once, it is empty
        off = header + closing
    return _ThoughtForm(off or (header + empty if empty else None), empty)


def _block(thoughtful: str, question_text: str) -> tuple[str, str]:
    """What stands before a thought, the header with it, and what between the thought and the text."""
    if not thoughtful.startswith(question_text) or _PROBE_THOUGHT not in thoughtful:
        return "", ""
    opening, _, rest = thoughtful[len(question_text) :].partition(_PROBE_THOUGHT)
    closing, separator, _ = rest.partition(_PROBE_ANSWER)
    return opening, closing if separator else ""


def _header_when_off(template: ChatTemplate, question: list[Message], mark: str) -> str | None:
    """The generation prompt of the template with thinking switched off, where that closes an empty thought."""
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


def _letters(text: str) -> str:
    return "".join(text.split())


# Text that must never become a special token: sentinels stand for it while a template is at work.
#
# A log may say `<|im_end|>` in a tool's output, in an argument, in a tool's name. Before rendering, every string that a
# template writes as structure is replaced by one private-use character; after rendering, whatever still reads as a
# special token was written by the template, and the sentinels are encoded as the plain text they stand for. Private-use
# characters that were in the text to begin with are marked by an escape character first, so the way back is exact.

_ESCAPE = "\U000f0000"  # the next character is meant literally
_FIRST_SENTINEL = 0xF0001
_PRIVATE = "\U000f0000-\U0010ffff"
_PRIVATE_CHARACTER = re.compile(f"[{_PRIVATE}]")
_ESCAPED = re.compile(f"[{_PRIVATE}](?:(?<={_ESCAPE}).)?", re.DOTALL)  # starts with a class: `re` skips to it fast
_EDGE = "\U000ffffd"  # stands for nothing, at an end of a text that a template could complete to a token
_RAW = "\U00100000"  # encloses the number of a raw text; see `raw_marker`
_RAW_MARKER = re.compile(f'"?{_RAW}([0-9]+){_RAW}"?')


class ProtectedTokens:
    """The strings only a template may write as tokens: special ones, and added ones that it writes itself.

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
        self.pattern = re.compile(tokens)
        self._special_pattern = re.compile(_any_of([text for text in self._texts if text in self.special]))
        self._to_escape = re.compile(f"[{_PRIVATE}]|{tokens}")
        self.boundary = re.compile(f"{_ESCAPE}.|([{_PRIVATE}]|{tokens})", re.DOTALL)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)

    def escape(self, text: str) -> str:
        """The text with sentinels; a lone surrogate, which no tokenizer takes, becomes U+FFFD."""
        if not text.isascii():
            text = self._normalized_if_forged(without_surrogates(text))
        is_private = not text.isascii() and _PRIVATE_CHARACTER.search(text)
        return self._edged((self._to_escape if is_private else self.pattern).sub(self._sentinel, text))

    def escape_tree(self, value: Any) -> Any:
        """Every string of a JSON value escaped, keys included."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict):
            return {self.escape(str(key)): self.escape_tree(member) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_tree(element) for element in value]
        return value

    def plain(self, text: str) -> str:
        """The text that escaped text stands for."""
        return text if text.isascii() else _ESCAPED.sub(self._literal, text)

    def meaning(self, sentinel: str) -> str:
        return self._meaning[sentinel]

    def last_special(self, text: str) -> str | None:
        """The last special token that the template wrote into escaped text."""
        tokens = self._special_pattern.findall(text)
        return tokens[-1] if tokens else None

    def splits_at_edge(self, before: str, after: str) -> bool:
        """Whether two texts that meet at an edge would read as a token that neither of them holds."""
        both, border = before[-self.longest :] + after, min(len(before), self.longest)
        return any(match.start() < border < match.end() for match in self.pattern.finditer(both))

    def _edged(self, text: str) -> str:
        """A template may write `>` behind a name: half a token in a text must not become a whole one."""
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
        """Some tokenizers normalise before they look for added tokens: look-alikes are seen as they will be then."""
        if self._normalizer is None:
            return text
        normal = self._normalizer.normalize_str(text)
        return normal if len(self.pattern.findall(normal)) > len(self.pattern.findall(text)) else text


def raw_marker(number: int) -> str:
    """Stands for text that goes into the rendering as it is, even where the template would quote a string."""
    return f"{_RAW}{number}{_RAW}"


def insert_raw(rendered: str, raw: list[str]) -> str:
    """The rendering with every marker (and the quotes a template put around it) replaced by its text."""
    return _RAW_MARKER.sub(lambda match: raw[int(match[1])], rendered) if raw else rendered


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or r"(?!)"


def without_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
