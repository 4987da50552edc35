"""The trainer's sites are those of scripts that somebody wrote who had not seen its rules, token for token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from composer_replication.batch.render.renderer import Renderer
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.rollouts.hint_distillation import ErringTurnFinder
from composer_replication.trainer.rollouts.sites import Rollout, ToolRecord, schemas_of
from data.scripted_rollouts import SCRIPTS, Found, Scripted, batches, differences
from rollouts.tiny_policy import load_tokenizer, save_policy, turn_ids
from rollouts.trainers import make, questions, quick_config
from rollouts.workshop import Workshop


class Recorded:
    """Every script's sites as the trainer put them into its batch."""

    def __init__(self, policy: Path, folder: Path) -> None:
        config = quick_config(folder, per_device_train_batch_size=2, num_generations=2)
        self.tokenizer = load_tokenizer(policy)
        trainer: Any = make(
            ComposerReplicationTrainer,
            policy,
            config,
            train_dataset=questions(),
            environment_factory=Workshop,
            measure_channels=True,
        )
        self.found: dict[str, list[list[Found]]] = {}
        self.teacher_ids: dict[str, list[tuple[list[int], list[int]]]] = {}
        for batch in batches(self.tokenizer):
            batch.attach(trainer)
            output = trainer._generate_and_score_completions(batch.rows(2))
            for index, script in enumerate(batch.scripts_of_rows(2)):
                prompt = int(output["prompt_mask"][index].sum())
                ids = output["completion_ids"][index].tolist()
                sites = output["sdpo_sites"][index]
                self.found.setdefault(script.name, []).append([_found(each, prompt, ids) for each in sites])


def _found(site: dict[str, Any], prompt: int, ids: list[int]) -> Found:
    start, end = site.start - prompt, site.end - prompt
    turn = int(site.turn_id.removeprefix("assistant-"))
    taught = site.teacher_ids.tolist()[site.teacher_start :]
    assert taught == ids[start:end]  # the teacher scores the sampled ids, not a rendering of their text
    return Found(turn, start, end, tuple(ids[start:end]), kind=site.kind)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(save_policy(tmp_path_factory.mktemp("policy")), tmp_path_factory.mktemp("out"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_taught_turns_are_those_of_the_script(recorded: Recorded, script: Scripted) -> None:
    for sites in recorded.found[script.name]:
        assert differences(script, recorded.tokenizer, sites) == []


def test_a_rollout_functions_turns_are_found_by_their_signals_alone(recorded: Recorded) -> None:
    """Nobody parsed its calls, so none was refused; a later turn is one however few messages there are."""
    tokenizer = recorded.tokenizer
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    first = turn_ids(tokenizer, '<tool_call>\n{"name": "add", "arguments": {"first": 1, "second": 2}}\n</tool_call>')
    between = [*tokenizer.encode("\n<|im_start|>user\n3<|im_end|>\n", add_special_tokens=False), *header]
    second = turn_ids(tokenizer, "It is 4.")
    rollout = Rollout(
        rollout_id="r",
        prompt_ids=[*tokenizer.encode("<|im_start|>user\nAdd<|im_end|>\n", add_special_tokens=False), *header],
        completion_ids=[*first, *between, *second],
        sampled=[1] * len(first) + [0] * len(between) + [1] * len(second),
        prompt=[{"role": "user", "content": "Add"}],
        messages=[{"role": "assistant", "content": "all of it"}],
        signals=[{"turn": 1, "kind": "other", "message": "wrong", "hint": "Read the result."}],
    )
    (turn,) = ErringTurnFinder(Renderer(tokenizer)).find(rollout).turns
    assert (turn.turn_id, turn.teacher_ids.tolist()[turn.teacher_start :]) == ("assistant-1", second)


def test_tools_are_watched_without_a_trace_in_what_they_say() -> None:
    class Desk:
        def add(self, first: int) -> int:
            return first + 1

        async def fetch(self, path: str) -> str:
            return path

    desk, record = Desk(), ToolRecord()
    wrapped = record.wrap_tools({"add": desk.add, "fetch": desk.fetch})
    for name, arguments in (("add", {"second": 1}), ("fetch", {"where": 1}), ("add", "no mapping")):
        said = []
        for tool in (getattr(desk, name), wrapped[name]):
            with pytest.raises(TypeError) as refusal:
                tool(**arguments)  # type: ignore[arg-type]  # at the call, also of the asynchronous one
            said.append(str(refusal.value))
        assert said[0] == said[1]
    assert wrapped["add"](first=1) == 2
    assert asyncio.run(wrapped["fetch"](path="p")) == "p"
    refused = {"role": "tool", "name": "add", "content": "{'error': 'Desk.add() argument after ** must be a mapping'}"}
    messages = [
        refused,
        {"role": "tool", "name": "add"},
        {"role": "tool", "name": "add"},
        {"role": "tool", "name": "no"},
    ]
    assert record.raised_by_message(messages) == [True, True, False, True]


def test_each_function_has_its_own_schema() -> None:
    def made(default: str) -> Any:
        def tool(path: str = default) -> str:
            """Reads.

            Args:
                path: where
            """
            return path

        tool.__name__ = f"tool_{default}"
        return tool

    first, second = made("a"), made("b")
    assert [list(schemas_of([each])) for each in (first, second)] == [["tool_a"], ["tool_b"]]
