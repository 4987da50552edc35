"""Build rollouts from the output of TRL's generation, with their tools and the reports of their environments.

TRL's messages do not say whether a tool raised, so the tools of each rollout are wrapped by a `ToolRecord`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from composer_replication.errors import InputError, explain
from composer_replication.trainer.rollouts.sites import Rollout

# Python raises this error before it calls the function, so a wrapper cannot record it.
_NOT_A_MAPPING = "argument after ** must be a mapping"


class ToolRecord:
    """A record of which tool calls in one rollout raised; an error that a tool returns as text is not an exception."""

    def __init__(self) -> None:
        self._raised: dict[str, list[bool]] = {}

    def watched(self, tools: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Return the same functions, wrapped to record whether each call raised."""
        return {name: self._watched(name, tool) for name, tool in tools.items()}

    def _watched(self, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        # The wrapper accepts any arguments, so that wrong ones raise the tool's own TypeError.
        raised = self._raised.setdefault(name, [])

        async def outcome(coroutine: Any, index: int) -> Any:
            result = await coroutine
            raised[index] = False
            return result

        @functools.wraps(tool)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            raised.append(True)  # until the call returns
            index = len(raised) - 1
            result = tool(*args, **kwargs)
            if inspect.iscoroutine(result):
                return outcome(result, index)
            raised[index] = False
            return result

        return recorded

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Return for each tool message whether its call raised; a call to an unknown tool counts as raised."""
        remaining = {name: iter(raised) for name, raised in self._raised.items()}
        return [_next(remaining, message) for message in messages if message.get("role") == "tool"]


def _next(remaining: dict[str, Iterator[bool]], message: Mapping[str, Any]) -> bool:
    name, content = str(message.get("name", "")), message.get("content")
    never_ran = isinstance(content, str) and content.startswith("{'error'") and _NOT_A_MAPPING in content
    return True if never_ran or name not in remaining else next(remaining[name], True)


def gather_rollouts(
    prompts: Sequence[Any],
    generated: tuple[Any, ...],
    *,
    name: str,
    environments: Sequence[Any] | None,
    tools_of: Callable[[int], Sequence[Any]],
    raised: Sequence[ToolRecord] | None = None,
) -> list[Rollout]:
    """Return one rollout per sample, in the order of `prompts`; call this before anything shuffles them.

    `generated` is the return value of TRL's `_generate`. Environments are pooled and reused, so their reports are read
    now, from the attribute `signals` or from the output of that name that a rollout function returned. Such a function
    may also return the `messages` of each rollout, which TRL treats as one turn, and the schemas of its `tools`.
    """
    prompt_ids, completion_ids, masks, completions, _, extra, *_ = generated
    fields: Mapping[str, Any] = extra if isinstance(extra, Mapping) else {}
    rollouts: list[Rollout] = []
    for number, prompt in enumerate(prompts):
        signals: Any = fields["signals"][number] if "signals" in fields else None
        if signals is None and environments:
            signals = getattr(environments[number], "signals", None)
        completion = fields["messages"][number] if "messages" in fields else completions[number]
        messages: list[Any] = (
            completion if isinstance(completion, list) else [{"role": "assistant", "content": str(completion)}]
        )
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
                tools=schemas_of(fields["tools"][number] if "tools" in fields else tools_of(number)),
            )
        )
    return rollouts


def _checked(signals: Any, number: int) -> tuple[Mapping[str, Any], ...]:
    """Return copies of the signals, because the environment clears its list when it is reset.

    Raises InputError unless each signal is a mapping with an integer `turn`.
    """
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


# Schemas parsed from the docstrings of functions. Weak references, so that a tool can be freed.
_schemas: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()


def schemas_of(tools: Sequence[Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return parameter schemas by tool name; functions get them from signature and docstring, as in the prompt."""
    schemas = [tool if isinstance(tool, Mapping) else _schema(tool) for tool in tools]
    functions: list[Any] = [schema.get("function", schema) for schema in schemas]
    return {str(function["name"]): function.get("parameters") or {} for function in functions}


def _schema(tool: Callable[..., Any]) -> Mapping[str, Any]:
    # A bound method is a new object at every access, so the cache is keyed by its function.
    function = getattr(tool, "__func__", tool)
    if function not in _schemas:
        from transformers.utils.chat_template_utils import get_json_schema

        _schemas[function] = get_json_schema(tool)
    return _schemas[function]
