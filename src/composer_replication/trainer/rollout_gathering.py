"""What a generation step returns, as rollouts: with the tools each could use and what its environment says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.trainer.rollout_conversation import Rollout


class ToolRecord:
    """Which calls of one rollout raised: a tool's own text about an error is no error, and only the tool knows."""

    def __init__(self) -> None:
        self._raised: dict[str, list[bool]] = {}

    def watched(self, tools: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The same functions, with what happens in them noted."""
        return {name: self._watched(name, tool) for name, tool in tools.items()}

    def _watched(self, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        seen = self._raised.setdefault(name, [])

        def noted(*args: Any, **named: Any) -> Any:
            seen.append(True)
            result = tool(*args, **named)
            seen[-1] = False
            return result

        async def noted_async(*args: Any, **named: Any) -> Any:
            seen.append(True)
            place = len(seen) - 1
            result = await tool(*args, **named)
            seen[place] = False
            return result

        return noted_async if inspect.iscoroutinefunction(tool) else noted

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Of each tool message; a name that no tool has was refused."""
        left = {name: iter(raised) for name, raised in self._raised.items()}
        names = [str(each.get("name", "")) for each in messages if each.get("role") == "tool"]
        return [next(left[name], True) if name in left else True for name in names]


def gather_rollouts(
    prompts: Sequence[Any],
    generated: tuple[Any, ...],
    *,
    name: str,
    environments: Sequence[Any] | None,
    tools_of: Callable[[int], Sequence[Any]],
    raised: Sequence[ToolRecord] | None = None,
) -> list[Rollout]:
    """One rollout a sample, in the order of `prompts`: before anything shuffles them.

    `generated` is what TRL's `_generate` returns. Environments are pooled and reused, so what they say is read now:
    an attribute `signals`, or the field of that name that a rollout function returned.
    """
    prompt_ids, completion_ids, masks, completions, _, extra, *_ = generated
    given: Any = extra.get("signals") if isinstance(extra, Mapping) else None
    rollouts: list[Rollout] = []
    for number, prompt in enumerate(prompts):
        signals: Any = given[number] if given is not None else None
        if signals is None and environments:
            signals = getattr(environments[number], "signals", None)
        messages = _messages(completions[number])
        rollouts.append(
            Rollout(
                rollout_id=f"{name}-{number}",
                prompt_ids=prompt_ids[number],
                completion_ids=completion_ids[number],
                sampled=None if masks is None else masks[number],
                prompt=prompt if isinstance(prompt, list) else [],
                messages=messages,
                signals=_checked(signals, number),
                raised=None if raised is None else raised[number].of_messages(messages),
                tools=schemas_of(tools_of(number)),
            )
        )
    return rollouts


def _messages(completion: Any) -> list[dict[str, Any]]:
    return completion if isinstance(completion, list) else [{"role": "assistant", "content": str(completion)}]


def _checked(signals: Any, number: int) -> tuple[Mapping[str, Any], ...]:
    """Copies: the environment is reset, and its list emptied, while these wait for their step."""
    if signals is None:
        return ()
    if isinstance(signals, str | Mapping) or not isinstance(signals, Sequence):
        expected = "a list of mappings with turn, kind and message"
        raise InputError(explain(f"signals of rollout {number}", got=type(signals).__name__, expected=expected))
    for signal in signals:
        if not isinstance(signal, Mapping) or not isinstance(signal.get("turn"), int):
            expected = "a mapping with `turn` (number of the assistant message, from 0), `kind` and `message`"
            raise InputError(explain(f"signal of rollout {number}", got=repr(signal)[:80], expected=expected))
    return tuple(dict(signal) for signal in signals)


_known: dict[tuple[str, ...], Mapping[str, Mapping[str, Any]]] = {}


def schemas_of(tools: Sequence[Any]) -> Mapping[str, Mapping[str, Any]]:
    """Parameter schemas by tool name; of functions those that the template shows, from signature and docstring."""
    if not tools:
        return {}
    key = tuple(f"{getattr(each, '__module__', '')}.{getattr(each, '__qualname__', repr(each))}" for each in tools)
    if key not in _known:
        from transformers.utils.chat_template_utils import get_json_schema

        schemas = [each if isinstance(each, Mapping) else get_json_schema(each) for each in tools]
        functions: list[Any] = [each.get("function", each) for each in schemas]
        _known[key] = {str(each["name"]): each.get("parameters") or {} for each in functions}
    return _known[key]
