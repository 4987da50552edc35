"""Episodes to learn from, as token arrays: of agents that err, and of the same with hints as the pipeline writes them.

python scripts/student/lessons.py OUT [--processes N]

In three of four episodes one hint stands before one turn. Half of the hints are about a mistake that can be made right
there (its words are what `write_hint` says of that mistake at that state), half are any hint of any other session. From
there on the agent does not make mistakes of the hint's kind; everything else it does at its usual rates, whatever the
hint: who learns this follows a hint for what it says, and not because there is one. Text that is not in the file is
what a small model gets wrong by itself, and a resolution to copy well is none it could keep: after a hint about that,
the agent reads the file again and edits then.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from language import train_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from composer_replication.envs.policies import FlawedAgent, Move, PlayedTurn, Situation
from composer_replication.envs.policies.flawed import MISTAKES, Style, expert_move, opportunities
from composer_replication.envs.student import student_folder
from composer_replication.envs.workspace import TOOLS, TestRunner, Workspace, generate_task, in_sandbox
from composer_replication.hint_generator import write_hint
from composer_replication.sites import find_error_sites
from composer_replication.types import Conversation, Message, Provenance, ToolCall, ToolResult, Turn

FIRST_SEED = 1_000_000  # below it, seeds are held out
EPISODES = 40_000
EXPERT_SHARE, HINTED_SHARE, SILENT_SHARE, WITHOUT_TOOLS = 0.1, 0.75, 0.15, 0.05
HINTED_TURNS = (0, 1, 2, 2, 3, 4)
POOL, TEXTS = 400, 1500  # tasks whose hints are the foreign ones, and episodes that the tokenizer is made from
RATES = {
    **{"guessed_path": 0.33, "read_folder": 0.03, "edit_unread": 0.35, "whitespace": 0.1, "ambiguous": 0.04},
    **{"argument_name": 0.06, "unknown_tool": 0.08, "repeat": 0.1},
}
CORRECTS = 0.6
# What the agent of the lessons never does and the student does by itself: there are hints about it all the same.
OWN_SLIPS = {"guessed_text": 0.4}
COPYING = "edit_no_match"
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
_HERE = Provenance(file="world", lines=(1,))


class OwnProcess(TestRunner):
    """Runs tests right here: an agent of ours wrote every line of the files. Ten times as fast as behind a wall."""

    def _ask(self, request: Mapping[str, Any]) -> Any:
        with tempfile.TemporaryDirectory() as root:
            in_sandbox._write_files(root, request["files"])
            sys.path.insert(0, root)
            sys.dont_write_bytecode = True
            try:
                return in_sandbox._run_tests(root, request["paths"])
            finally:
                sys.path.remove(root)
                folders = {path.partition("/")[0].removesuffix(".py") for path in request["files"]}
                for name in [name for name in sys.modules if name.partition(".")[0] in folders]:
                    del sys.modules[name]
                for path in [path for path in sys.path_importer_cache if path.startswith(root)]:
                    del sys.path_importer_cache[path]


class Said(NamedTuple):
    """A hint and the kind of mistake that it is about."""

    kind: str
    text: str


def conversation_of(prompt: str, turns: Sequence[PlayedTurn], identity: str = "lesson") -> Conversation:
    """A transcript as the pipeline reads one."""
    said = [Turn(id="asked", role="user", origin="human", text=prompt, provenance=_HERE)]
    for number, turn in enumerate(turns):
        move, outcome = turn.move, turn.outcome
        call = ToolCall(id=f"c{number}", name=move.tool, arguments=dict(move.arguments))
        result = ToolResult(call_id=call.id, text=outcome.text, is_error=outcome.failed)
        said += [
            Turn(id=f"t{number}", role="assistant", origin="model", text=move.text, calls=(call,), provenance=_HERE),
            Turn(id=f"r{number}", role="tool", origin="tool", results=(result,), provenance=_HERE),
        ]
    return Conversation(id=identity, format="rollout", turns=tuple(said), cwd="/workspace")


def hint_of_last(prompt: str, turns: Sequence[PlayedTurn]) -> Said | None:
    """What the pipeline says of the last call, where it is a failure that may be taught."""
    conversation = conversation_of(prompt, turns)
    sites = [site for site in find_error_sites(conversation) if site.turn_id == f"t{len(turns) - 1}" and site.is_kept]
    hint = write_hint(sites[0], conversation, tool_schemas=SCHEMAS) if sites else None
    return Said(sites[0].kind, hint.text) if hint is not None else None


def hint_here(workspace: Workspace, situation: Situation, runner: TestRunner, draw: random.Random) -> Said | None:
    """The hint of a mistake that could be made at this turn; after a failure, of making it again."""
    if situation.turns and situation.turns[-1].outcome.failed:
        moves = [situation.turns[-1].move]
    else:
        right = expert_move(situation, Style())
        found = opportunities(situation, right, draw)
        weights = [RATES.get(name, 0.0) + OWN_SLIPS.get(name, 0.05) for name in found]
        moves = draw.choices(list(found.values()), weights) if found else []
    if not moves:
        return None
    aside: Workspace = copy.deepcopy(workspace, {id(runner): runner, id(workspace.task): workspace.task})
    outcome = aside.call(moves[0].tool, moves[0].arguments)
    return hint_of_last(situation.task.prompt, [*situation.turns, PlayedTurn(move=moves[0], outcome=outcome)])


class Lesson(NamedTuple):
    """Messages of an episode, and whether its last turn is a success; `said` is the hint in it."""

    messages: list[Message]
    has_tools: bool
    said: Said | None


def lesson(seed: int, foreign: Sequence[Said], runner: TestRunner) -> Lesson:
    """One episode; the same for the same seed."""
    draw = random.Random(f"lesson:{seed}")
    task = generate_task(seed, difficulty=draw.choices(("easy", "medium", "hard"), (7, 2, 1))[0])
    rates = dict(RATES) if draw.random() >= EXPERT_SHARE else {}
    player = FlawedAgent(rates=rates, corrects=CORRECTS).start(f"lesson:{seed}", {})
    workspace = Workspace(task, runner=runner)
    situation = Situation(workspace)
    hinted_turn = draw.choice(HINTED_TURNS) if draw.random() < HINTED_SHARE else None
    is_silent = draw.random() < SILENT_SHARE
    said: Said | None = None
    messages: list[Message] = [{"role": "user", "content": task.prompt}]
    while not workspace.finished:
        if len(situation.turns) == hinted_turn:
            own = hint_here(workspace, situation, runner, draw) if draw.random() < 0.5 or not foreign else None
            said = own or (draw.choice(foreign) if foreign else None)
            if said is not None:
                messages.append({"role": "system", "content": said.text})
                rates.update({name: 0.0 for name, each in MISTAKES.items() if each.kind == said.kind})
                if situation.turns and situation.turns[-1].outcome.failed:
                    rates["repeat"] = 0.0 if situation.turns[-1].outcome.kind == said.kind else rates.get("repeat", 0.0)
        choice = player.choose(situation)
        move = _as_known(choice.move) if choice.mistake == "edit_unread" else choice.move
        if said is not None and said.kind == COPYING and choice.mistake is None:
            move = _after_a_look(move, situation.turns[hinted_turn:])
        if is_silent:
            move = replace(move, text="")
        outcome = workspace.call(move.tool, move.arguments)
        situation.take(PlayedTurn(move=move, outcome=outcome))
        messages += _as_messages(move, outcome.text)
    return Lesson(messages, draw.random() >= WITHOUT_TOOLS, said)


def _after_a_look(move: Move, since: Sequence[PlayedTurn]) -> Move:
    """An edit only of what was read since the hint; before it, the reading."""
    is_read = any(each.move.tool == "Read" and each.move.path == move.path for each in since if not each.outcome.failed)
    if move.tool != "Edit" or is_read:
        return move
    text = f"I read {move.path.rpartition('/')[2]} again before I change it."
    return Move(text=text, tool="Read", arguments={"file_path": move.arguments["file_path"]})


def _as_known(move: Move) -> Move:
    """The beginning of the new text in the old one's place: who has not read the file cannot know more of it."""
    line = move.arguments["new_string"].partition("\n")[0]
    return replace(move, arguments={**move.arguments, "old_string": re.sub(r"\W*\w+\W*$", "", line) or line[:1]})


def _as_messages(move: Move, result: str) -> list[Message]:
    function = {"name": move.tool, "arguments": dict(move.arguments)}
    call: Message = {
        "role": "assistant",
        "content": move.text,
        "tool_calls": [{"type": "function", "function": function}],
    }
    return [call, {"role": "tool", "name": move.tool, "content": result}]


def foreign_hints(count: int, runner: TestRunner) -> list[Said]:
    """As many of each kind: hints of mistakes in sessions of other tasks."""
    by_kind: dict[str, list[Said]] = {}
    for number in range(count):
        draw = random.Random(f"foreign:{number}")
        task = generate_task(FIRST_SEED - 1 - number, difficulty=draw.choice(("easy", "easy", "medium", "hard")))
        workspace = Workspace(task, runner=runner)
        situation, style = Situation(workspace), Style.of(number)
        for _ in range(draw.randrange(8)):
            said = hint_here(workspace, situation, runner, draw)
            if said is not None:
                by_kind.setdefault(said.kind, []).append(said)
            move = expert_move(situation, style)
            situation.take(PlayedTurn(move=move, outcome=workspace.call(move.tool, move.arguments)))
            if workspace.finished:
                break
    most = max(map(len, by_kind.values()))
    return [said for own in by_kind.values() for said in islice(_again(own), most)]


def _again(items: Sequence[Said]) -> Iterator[Said]:
    while True:
        yield from items


def written(tokenizer: PreTrainedTokenizerBase, each: Lesson) -> str:
    """A lesson as its template writes it."""
    tools = list(TOOLS) if each.has_tools else None
    return tokenizer.apply_chat_template(each.messages, tools=tools, tokenize=False)


def encoded(tokenizer: PreTrainedTokenizerBase, each: Lesson) -> tuple[list[int], list[bool]]:
    """Ids, and which of them the assistant says: from behind its header to its end token."""
    ids: list[int] = tokenizer(written(tokenizer, each), add_special_tokens=False)["input_ids"]
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    is_target, at = [False] * len(ids), 0
    while at < len(ids):
        if ids[at : at + len(header)] != header:
            at += 1
            continue
        stop = ids.index(tokenizer.eos_token_id, at + len(header)) + 1
        is_target[at + len(header) : stop] = [True] * (stop - at - len(header))
        at = stop
    return ids, is_target


_worker: dict[str, Any] = {}


def _start_worker(folder: str, foreign: list[Said]) -> None:
    _worker.update(tokenizer=AutoTokenizer.from_pretrained(folder), foreign=foreign, runner=OwnProcess())


def _work(seed: int) -> tuple[list[int], list[bool]]:
    return encoded(_worker["tokenizer"], lesson(seed, _worker["foreign"], _worker["runner"]))


def write_tokens(folder: Path, numbered: Iterator[tuple[list[int], list[bool]]]) -> str:
    ids, targets, lengths, began = [], [], [], time.perf_counter()
    for own, is_target in numbered:
        ids.append(np.array(own, np.uint16))
        targets.append(np.array(is_target, bool))
        lengths.append(len(own))
        if len(lengths) % 2000 == 0:
            print(f"{len(lengths):,} episodes  {time.perf_counter() - began:.0f} s", flush=True)
    flat = np.concatenate(targets)
    np.savez_compressed(
        folder / "tokens.npz", ids=np.concatenate(ids), targets=np.packbits(flat), lengths=np.array(lengths, np.int32)
    )
    digest = hashlib.sha256(b"".join(each.tobytes() for each in ids)).hexdigest()
    counts = f"{len(lengths):,} episodes, {len(flat):,} tokens, {int(flat.sum()):,} targets, longest {max(lengths)}"
    return f"{counts}\ntokens sha256 {digest}"


def _own_tokenizer(foreign: Sequence[Said], runner: TestRunner) -> PreTrainedTokenizerBase:
    bare = train_tokenizer([])  # it has the template
    texts = (lesson(FIRST_SEED + number, foreign, runner) for number in range(TEXTS))
    return train_tokenizer([written(bare, each) for each in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--new-tokenizer", action="store_true", help="make one instead of the committed student's")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runner = OwnProcess()
    foreign = foreign_hints(POOL, runner)
    is_new = options.new_tokenizer
    tokenizer = _own_tokenizer(foreign, runner) if is_new else AutoTokenizer.from_pretrained(student_folder())
    tokenizer.save_pretrained(options.out)
    seeds = range(FIRST_SEED, FIRST_SEED + options.episodes)
    start = partial(_start_worker, str(options.out), foreign)
    with multiprocessing.get_context("fork").Pool(options.processes, start) as pool:
        print(write_tokens(options.out, pool.imap(_work, seeds, chunksize=16)))


if __name__ == "__main__":
    main()
