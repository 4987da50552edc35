"""A small world to train in: an agent with bad habits that obeys a hint in its context, and logs of it at work.

The habits are four: two commands with a typo in them and two tools that do not exist. The model is taught them here,
together with what a hint about each means, so that there is something for channel 2 to make its own.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from composer_replication.hint_generator import HintContext, dispatch

THINGS = ("amber", "basil", "coral", "dune", "ember", "flint", "grove", "heron", "jade", "moss", "opal", "pine")
TOOLS = ("Bash", "Glob", "Read")
HABIT_SHARE = 0.8
_UNKNOWN = "?"
_SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
_CHAT_TEMPLATE = """{%- if tools %}<|start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>
{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
# How a completion is read back into a message: TRL needs it to run the calls of a rollout.
_RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}
_JSON_PIECES = ('{"name": "', '", "arguments": {"', '": "', '"}}')


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked, the call that habit makes of it, and the one that works."""

    request: str
    kind: str
    wrong: str
    right: str
    argument: str

    def call(self, thing: str, *, is_right: bool) -> tuple[str, dict[str, str]]:
        """A tool and its arguments: the slip is in the command, or in the tool's name."""
        word = self.right if is_right else self.wrong
        return (
            ("Bash", {"command": f"{word} {thing}"}) if self.kind == "cmd_not_found" else (word, {self.argument: thing})
        )

    @property
    def complaint(self) -> str:
        if self.kind == "cmd_not_found":
            return f"Exit code 127\n/bin/bash: line 1: {self.wrong}: command not found\nDid you mean {self.right}?"
        return f"<tool_use_error>No such tool available: {self.wrong}. Did you mean {self.right}?</tool_use_error>"

    @property
    def hint(self) -> str:
        """As the hint generator words it: what is right is named, since the error tells it."""
        facts: HintContext = {"meant": self.right}
        return dispatch(self.kind, facts) or ""


TASKS = (
    Task(request="Test {}.", kind="cmd_not_found", wrong="pytset", right="pytest", argument="command"),
    Task(request="Start {}.", kind="cmd_not_found", wrong="pyhton", right="python", argument="command"),
    Task(request="Find {}.", kind="tool_not_found", wrong="Search", right="Glob", argument="pattern"),
    Task(request="Show {}.", kind="tool_not_found", wrong="Open", right="Read", argument="path"),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words of this world and single characters: any text has an exact, reversible encoding."""
    said = " ".join(
        [*(task.request + task.complaint + task.hint for task in TASKS), *THINGS, *TOOLS, "Done. It failed."]
    )
    said += " ".join(f"{task.right} {task.argument}" for task in TASKS) + " system user assistant tool Tools call ok"
    words = sorted(set(re.findall(r"[A-Za-z_]{2,}", said)), key=lambda word: (-len(word), word))
    pieces = [*_SPECIAL, *words, *(f" {word}" for word in words), *string.printable[:95], "\n", *_JSON_PIECES]
    backend = Tokenizer(
        models.WordLevel({piece: at for at, piece in enumerate(dict.fromkeys(pieces))}, unk_token=_UNKNOWN)
    )
    structure = "|".join(map(re.escape, _JSON_PIECES))
    pattern = rf"{structure}| ?\b(?:{'|'.join(words)})\b|[\s\S]"
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in _SPECIAL])
    backend.add_tokens([AddedToken(each, special=False, normalized=False) for each in ("<tool_call>", "</tool_call>")])
    pad, _, end = _SPECIAL
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, eos_token=end, chat_template=_CHAT_TEMPLATE)
    made.response_template = _RESPONSE_TEMPLATE
    return made


def new_model(tokenizer: Any, *, seed: int = 0) -> LlamaForCausalLM:
    """Two layers, 64 wide, with random weights that `seed` fixes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def teach(model: LlamaForCausalLM, tokenizer: Any, *, seed: int = 0, num_steps: int = 200) -> None:
    """By plain cross-entropy: habits without a hint, what is right with the hint that is about it."""
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=num_steps, pct_start=0.1)
    for _ in range(num_steps):
        ids, labels = _batch(tokenizer, [_lesson(draw) for _ in range(16)])
        model(input_ids=ids, attention_mask=ids != tokenizer.pad_token_id, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


def write_logs(folder: Path, *, seed: int = 0, num_sessions: int = 12) -> Path:
    """Sessions as Claude Code logs them: a call by habit, what came back, the call that works, a last word."""
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    for number in range(num_sessions):
        task, thing = TASKS[number % len(TASKS)], draw.choice(THINGS)
        identity = f"00000000-0000-4000-8000-{number:012d}"
        lines = [json.dumps(record) for record in _records(task, thing, identity)]
        (folder / f"{identity}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def right_calls(run_conversations: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """What somebody who knows better would have done at the first call of each session, as rows of `pairs.jsonl`."""
    for conversation in run_conversations:
        request = next(turn.text for turn in conversation.turns if turn.role == "user")
        task = next(task for task in TASKS if request.startswith(task.request.split()[0]))
        name, arguments = task.call(request.split()[1].rstrip("."), is_right=True)
        yield {
            "state_id": f"{conversation.id}::0000",
            "conversation_id": conversation.id,
            "turn_number": 0,
            "chosen": f"[TOOL_USE] name={name} input={json.dumps(arguments)}",
        }


def prompts() -> Any:
    """The tasks as prompts for rollouts, with what the environment needs to know of each."""
    from datasets import Dataset

    rows = [(number, task.request.format(thing)) for number, task in enumerate(TASKS) for thing in THINGS]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}], "task": task} for task, text in rows])


class Environment:
    """The three tools; a call that the task does not need raises what a shell would say. Its reward: was it done?"""

    def reset(self, *, task: int, **_row: Any) -> None:
        self._task, self._is_done = TASKS[task], False

    def get_reward(self) -> float:
        return float(self._is_done)

    def _called(self, name: str, arguments: dict[str, str]) -> str:
        word = arguments["command"].split()[0] if name == "Bash" and arguments["command"].split() else name
        if word != self._task.right:
            raise ValueError(f"/bin/bash: line 1: {word}: command not found\nDid you mean {self._task.right}?")
        self._is_done = True
        return "ok"

    def Bash(self, command: str) -> str:  # noqa: N802 (a tool's name)
        """Runs a command.

        Args:
            command: the command line
        """
        return self._called("Bash", {"command": command})

    def Glob(self, pattern: str) -> str:  # noqa: N802
        """Finds files.

        Args:
            pattern: part of their name
        """
        return self._called("Glob", {"pattern": pattern})

    def Read(self, path: str) -> str:  # noqa: N802
        """Shows a file.

        Args:
            path: where it is
        """
        return self._called("Read", {"path": path})


def _lesson(draw: random.Random) -> list[dict[str, Any]]:
    """A task with a hint that is about it (then what is right is done), about another, or with none (then habit)."""
    task, about = draw.choice(TASKS), draw.choice(("task", "other", "nothing"))
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.7:
        messages.append({"role": "system", "content": f"Tools: {' '.join(TOOLS)}"})
    messages.append({"role": "user", "content": task.request.format(thing := draw.choice(THINGS))})
    if about != "nothing":
        hinted = task if about == "task" else draw.choice([each for each in TASKS if each is not task])
        messages.append({"role": "system", "content": hinted.hint})
    is_right = about == "task" or draw.random() > HABIT_SHARE
    messages += _exchange(task, thing, is_right=is_right)
    if not is_right:  # having seen it fail, the agent does it right
        messages += _exchange(task, thing, is_right=True)
    return [*messages, {"role": "assistant", "content": "Done."}]


def _exchange(task: Task, thing: str, *, is_right: bool) -> list[dict[str, Any]]:
    name, arguments = task.call(thing, is_right=is_right)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    result = "ok" if is_right else task.complaint
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]


def _batch(tokenizer: Any, lessons: list[list[dict[str, Any]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and as labels those of what the assistant says, its end token with it."""
    texts = [tokenizer.apply_chat_template(lesson, tokenize=False) for lesson in lessons]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    header = tokenizer("<|start|>assistant\n", add_special_tokens=False)["input_ids"]
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        for start in (at + len(header) for at in range(len(row)) if row[at : at + len(header)] == header):
            end = row.index(tokenizer.eos_token_id, start) + 1
            labels[number, start:end] = ids[number, start:end]
    return ids, labels


def _records(task: Task, thing: str, identity: str) -> Iterator[dict[str, Any]]:
    shared = {"sessionId": identity, "cwd": "/app", "version": "2.1.39", "isSidechain": False, "userType": "external"}
    messages: list[tuple[str, Any]] = [("user", task.request.format(thing))]
    for number, is_right in enumerate((False, True)):
        name, arguments = task.call(thing, is_right=is_right)
        call = f"toolu_{identity[-6:]}{number}"
        result = "ok" if is_right else task.complaint
        messages.append(("assistant", [{"type": "tool_use", "id": call, "name": name, "input": arguments}]))
        given = {"type": "tool_result", "tool_use_id": call, "content": result, "is_error": not is_right}
        messages.append(("user", [given]))
    messages.append(("assistant", [{"type": "text", "text": "Done."}]))
    parent: str | None = None
    for number, (role, content) in enumerate(messages):
        uuid = f"{number:08d}{identity[8:]}"
        message = {"role": role, "content": content}
        if role == "assistant":
            message |= {"id": f"msg_{identity[-3:]}{number}", "type": "message", "model": "tiny"}
        stamp = f"2026-01-01T00:00:{number:02d}.000Z"
        yield {"parentUuid": parent, "type": role, "uuid": uuid, "timestamp": stamp, "message": message, **shared}
        parent = uuid
