"""What `crf run` says before a training: whether it resumes, from where, and what begins again because of what."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.cli.pipeline import NOTHING_TO_DO
from composer_replication.evaluation import evaluate
from composer_replication.evaluation.verdict import record_of
from composer_replication.runs.artefacts import NOT_WRITTEN_YET, READ_COUNTS
from composer_replication.trainer.metrics_file import StepCallback
from composer_replication.trainer.sessions.phases import PhaseTimes
from output_facts import lines_with

SMALL = {
    "ingest.workers": "1",
    "run.fewest": "1",
    "run.without_verdict": "true",
    "split.test": "0.25",
    "train.adapter.rank": "4",
    "train.optimiser.steps": "3",
    "train.save.every": "1",
    "train.warmup.mode": "off",
    "evaluation.samples": "0",
    "evaluation.good_turns": "0",
    "evaluation.token_gaps": "0",
}


@pytest.fixture
def crf_run(folder, tmp_path, monkeypatch, capsys):
    """Calls `crf run` in a folder of its own, stopped where `stop` names a phase, or after a step; gives its lines."""
    original, after_step = PhaseTimes.__call__, StepCallback.on_step_end

    def call(*flags, stop=None, **options):
        def phase_begins(times, phase):
            if phase.name.startswith(str(stop)) and phase.done:
                raise KeyboardInterrupt
            original(times, phase)

        def step_ends(told, args, state, control, **given):
            after_step(told, args, state, control, **given)
            if stop == state.global_step - 1:  # after the checkpoint of the step before
                raise KeyboardInterrupt

        def evaluation_ends(*given, **named):
            if stop == "evaluation":
                raise KeyboardInterrupt
            return record_of(*given, **named)

        monkeypatch.setattr(evaluate, "record_of", evaluation_ends)
        monkeypatch.setattr(PhaseTimes, "__call__", phase_begins)
        monkeypatch.setattr(StepCallback, "on_step_end", step_ends)
        values = {**SMALL, **{name.replace("__", "."): value for name, value in options.items()}}
        given = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        command = [str(folder / "logs"), "--model", str(folder / "model"), "-o", str(tmp_path / "run"), *given, *flags]
        status = main(["run", *command])
        said = capsys.readouterr()
        assert status == (130 if stop is not None else 0), said.err
        return said.out if flags else said.err

    return call


def line(text, begin):
    return next(each for each in text.splitlines() if each.startswith(begin))


def step_resumed(text):
    """The step that a line says a training goes on from; None where it starts with its first."""
    found = re.search(r"\bstep (\d+)", text)
    return None if found is None else int(found[1])


def test_every_call_says_what_the_training_does(crf_run, tmp_path):
    assert line(crf_run(stop="hint proof"), "train: ") == f"train: {NOT_WRITTEN_YET}"
    again = line(crf_run(stop="hint proof"), "train: ")
    assert (step_resumed(again), re.findall(r"\d+", again)) == (None, ["3"])  # steps, of which none was saved
    changed = line(crf_run(stop="hint proof", loss__alpha_sdpo="0.3", train__optimiser__lr="1e-3"), "train: ")
    assert step_resumed(changed) is None
    for fact in ("loss.alpha_sdpo: 0.1 -> 0.3", "train.optimiser.lr: 2e-05 -> 0.001", "earlier/1"):
        assert lines_with(changed, fact)
    assert (tmp_path / "run" / "earlier" / "1" / "config.resolved.toml").exists()
    plan = json.loads(crf_run("--dry-run", "--json", loss__alpha_sdpo="0.2", train__optimiser__lr="1e-3"))
    said = {each["name"]: each["why"] for each in plan["steps"]}["train"]
    assert lines_with(said, "loss.alpha_sdpo: 0.3 -> 0.2")
    assert step_resumed(said) is None
    back = {"loss__alpha_sdpo": "0.1", "train__optimiser__lr": "2e-5"}
    back = line(crf_run(stop=2, **back), "train: ")  # step 3 is not reached
    assert lines_with(back, "loss.alpha_sdpo: 0.3 -> 0.1", "earlier/2")
    resumed = crf_run(train__optimiser__steps="4")
    said = line(resumed, "train: ")
    assert step_resumed(said) == 2
    assert lines_with(said, 4, "train.optimiser.steps: 3 -> 4")
    assert lines_with(resumed, "checkpoint-2")
    idle = crf_run(train__optimiser__steps="4").splitlines()
    assert NOTHING_TO_DO in idle
    assert not [each for each in idle if each.startswith(("train: ", "evaluate: ", "report: "))]
    said = line(crf_run(train__optimiser__steps="5"), "train: ")
    assert step_resumed(said) == 4
    assert lines_with(said, 5, "train.optimiser.steps: 4 -> 5")
    assert not (tmp_path / "run" / "earlier" / "3").exists()


def test_a_warm_up_that_was_stopped_is_resumed_and_an_evaluation_too(crf_run):
    warm = {"train__warmup__mode": "steps", "train__warmup__steps": "2"}
    crf_run(stop=1, **warm)
    for stop, step in (("hint proof", 1), ("evaluation", 2)):
        resumed = line(crf_run(stop=stop, **warm), "train: ")
        assert step_resumed(resumed) == step
        assert lines_with(resumed, "warm-up", 3, "steps")
    ended = crf_run(**warm)
    assert lines_with(line(ended, "evaluate: "), "evaluation", "scores")
    assert not [each for each in ended.splitlines() if each.startswith("train: ")]


def test_a_run_decodes_a_conversation_twice_at_most_and_seldom_opens_the_file(crf_run, monkeypatch):
    """Steps hand what they have read to the next: all steps with a control and sampled calls, then nothing to do."""
    opened, original = Counter(), Path.open

    def counted(path, mode="r", *args, **kwargs):
        opened[path.name] += 1
        return original(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", counted)
    before = Counter(READ_COUNTS)
    evaluation = {"evaluation__samples": "1", "evaluation__good_turns": "4", "evaluation__new_tokens": "8"}
    settings = {"run__control": "true", "run__shuffles": "2", "train__proof__on": "false", **evaluation}
    crf_run(**settings)
    assert (Counter(READ_COUNTS) - before)["decoded conversations"] <= 2
    assert 0 < opened["conversations.jsonl"] <= 20
    opened.clear()
    before = Counter(READ_COUNTS)
    assert NOTHING_TO_DO in crf_run(**settings)
    assert (Counter(READ_COUNTS) - before)["decoded conversations"] <= 2
    assert opened["conversations.jsonl"] <= 20
