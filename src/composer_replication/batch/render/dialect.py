"""What a chat template can say, found by asking it: small conversations of known words, looked for in its output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from composer_replication.batch.render.escape import ProtectedTokens
from composer_replication.batch.render.templates import ChatTemplate
from composer_replication.batch.render.thinking import ThoughtForm, read_thought_form
from composer_replication.errors import InputError, explain
from composer_replication.types import Message

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
    thought: ThoughtForm  # where thinking is shown

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
        thought=read_thought_form(template, header) if thinking else ThoughtForm(),
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
