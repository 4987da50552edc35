"""What a model answers: text or tool calls, a function of the seed, the model and the messages; and what that costs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from random import Random
from typing import Any

from fault_server.chat import ChatRequest, JsonObject
from fault_server.faults import draw, draw_int
from fault_server.settings import Settings

WORDS = (
    *("read", "the", "failing", "test", "first", "then", "change", "one", "line", "of", "parser", "run", "it", "again"),
    *("and", "keep", "what", "passes", "check", "cache", "before", "opening", "file", "list", "every", "caller"),
    *("rename", "field", "write", "fixture", "remove", "branch", "follow", "trace", "compare", "both", "outputs"),
)
PATHS = ("src/app.py", "src/parser.py", "tests/test_parser.py", "README.md", "pyproject.toml", "src/cache/store.py")
COMMANDS = ("ls -la", "pytest -q", "git status", "git diff --stat", "grep -rn parse src", "cat src/app.py")


@dataclass(frozen=True, slots=True)
class Answer:
    text: str | None
    tool_calls: tuple[JsonObject, ...]
    finish_reason: str
    completion_tokens: int

    def message(self) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": self.text, "refusal": None, "reasoning": None}
        return message | {"tool_calls": list(self.tool_calls)} if self.tool_calls else message


def answer(chat: ChatRequest, settings: Settings) -> Answer:
    """The same answer every time the same thing is asked, cut at max_tokens as a model's would be."""
    key: tuple[object, ...] = (settings.seed, chat.messages_hash)
    if draw("agree", *key, chat.model) >= settings.agreement:
        key = (*key, chat.model)
    rng = Random(draw_int("answer", *key))
    calls = _tool_calls(chat, settings, rng)
    text = None if calls else _text(rng)
    return _within(text, calls, chat.max_tokens, settings.bytes_per_token)


def half_of(whole: Answer) -> Answer:
    """The first half of an answer, for faults that break it off."""
    text = whole.text[: len(whole.text) // 2] if whole.text else "I will"
    return Answer(text, (), whole.finish_reason, whole.completion_tokens)


def cost_pico(chat: ChatRequest, completion_tokens: int, settings: Settings) -> int:
    per_input, per_output = settings.pico_per_token(chat.model)
    return chat.prompt_tokens * per_input + completion_tokens * per_output


def overcharge_pico(chat: ChatRequest, settings: Settings) -> int:
    """More than any bound a client could have put aside for this request, also at price 0."""
    return 2 * (chat.num_bytes + chat.max_tokens) * max(settings.pico_per_token(chat.model)) + 10**9


def _within(text: str | None, calls: list[JsonObject], max_tokens: int, bytes_per_token: float) -> Answer:
    arguments = [call["function"]["arguments"] for call in calls]
    size = len(text or "") + sum(map(len, arguments))  # the words are ASCII: characters are bytes
    tokens = max(1, math.ceil(size / bytes_per_token))
    if tokens <= max_tokens:
        return Answer(text, tuple(calls), "tool_calls" if calls else "stop", tokens)
    room = int(max_tokens * bytes_per_token)
    for call in calls:
        kept = call["function"]["arguments"][:room]
        call["function"]["arguments"], room = kept, room - len(kept)
    return Answer(None if text is None else text[:room], tuple(calls), "length", max_tokens)


def _text(rng: Random) -> str:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 24)))
    return f"{words.capitalize()}.\n\n```bash\n{rng.choice(COMMANDS)}\n```"


def _tool_calls(chat: ChatRequest, settings: Settings, rng: Random) -> list[JsonObject]:
    functions = [tool["function"] for tool in chat.tools if isinstance(tool.get("function"), dict)]
    # The draws happen whatever is chosen, so that tool_choice alone does not change the text.
    wanted, several, chosen = rng.random(), rng.random(), rng.random()
    choice = chat.tool_choice
    if not functions or choice == "none" or (choice in (None, "auto") and wanted >= settings.tool_share):
        return []
    if isinstance(choice, dict):
        name = choice.get("function", {}).get("name")
        functions = [each for each in functions if each.get("name") == name] or functions
    num_calls = 2 if several < 0.1 and chat.parallel_tool_calls else 1
    first = int(chosen * len(functions))
    return [_call(functions[(first + at) % len(functions)], rng) for at in range(num_calls)]


def _call(function: JsonObject, rng: Random) -> JsonObject:
    arguments = _value(function.get("parameters") or {"type": "object"}, "", rng, depth=0)
    call_id = f"call_{rng.getrandbits(48):012x}"
    called = {"name": function.get("name", ""), "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": called}


def _value(schema: JsonObject, name: str, rng: Random, depth: int) -> Any:
    if options := schema.get("enum"):
        return rng.choice(options)
    match schema.get("type", "object" if "properties" in schema else "string"):
        case "object":
            return _object(schema, rng, depth)
        case "array":
            items = schema.get("items") or {"type": "string"}
            return [_value(items, name, rng, depth + 1) for _ in range(rng.randint(1, 2))]
        case "integer":
            return rng.randint(1, 200)
        case "number":
            return rng.randint(1, 200) / 4
        case "boolean":
            return rng.random() < 0.5
        case _:
            return _string(name.lower(), rng)


def _object(schema: JsonObject, rng: Random, depth: int) -> JsonObject:
    required, properties = schema.get("required") or [], schema.get("properties") or {}
    if depth > 3:
        return {}
    return {
        name: _value(each, name, rng, depth + 1)
        for name, each in properties.items()
        if name in required or rng.random() < 0.3
    }


def _string(name: str, rng: Random) -> str:
    if "path" in name or "file" in name:
        return rng.choice(PATHS)
    if "command" in name or "cmd" in name:
        return rng.choice(COMMANDS)
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))
