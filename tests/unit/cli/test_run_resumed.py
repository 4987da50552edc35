"""What `crf run` says before a training: whether it resumes, from where, and what begins again because of what."""

from __future__ import annotations

import json

import pytest

from composer_replication.cli.main import main
from composer_replication.evaluation import evaluate
from composer_replication.evaluation.record import record_of
from composer_replication.sessions.phases import PhaseTimes
from composer_replication.trainer.metrics_file import TellSteps

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
    original, after_step = PhaseTimes.__call__, TellSteps.on_step_end

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
        monkeypatch.setattr(TellSteps, "on_step_end", step_ends)
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


def test_every_call_says_what_the_training_does(crf_run, tmp_path):
    assert line(crf_run(stop="hint proof"), "train: ") == "train: is not there yet"
    again = crf_run(stop="hint proof")
    assert line(again, "train: ") == "train: starts from the beginning: none of its 3 steps was saved"
    changed = line(crf_run(stop="hint proof", loss__alpha_sdpo="0.3", train__optimiser__lr="1e-3"), "train: ")
    for words in ("starts from the beginning", "loss.alpha_sdpo: 0.1 -> 0.3", "train.optimiser.lr: 2e-05 -> 0.001"):
        assert words in changed
    assert "earlier/1" in changed
    assert (tmp_path / "run" / "earlier" / "1" / "config.resolved.toml").exists()
    plan = json.loads(crf_run("--dry-run", "--json", loss__alpha_sdpo="0.2", train__optimiser__lr="1e-3"))
    said = {each["name"]: each["why"] for each in plan["steps"]}["train"]
    assert "loss.alpha_sdpo: 0.3 -> 0.2" in said
    assert "from the beginning" in said
    back = {"loss__alpha_sdpo": "0.1", "train__optimiser__lr": "2e-5"}
    back = line(crf_run(stop=2, **back), "train: ")  # step 3 is not reached
    assert "loss.alpha_sdpo: 0.3 -> 0.1" in back
    assert "earlier/2" in back
    resumed = crf_run(train__optimiser__steps="4")
    assert line(resumed, "train: ") == "train: resumes from step 2 of 4; train.optimiser.steps: 3 -> 4"
    assert line(resumed, "going on from checkpoint-2 ")
    assert line(crf_run(train__optimiser__steps="4"), "nothing to do")
    assert line(crf_run(train__optimiser__steps="5"), "train: ") == (
        "train: resumes from step 4 of 5 (train.optimiser.steps: 4 -> 5)"
    )
    assert not (tmp_path / "run" / "earlier" / "3").exists()


def test_a_warm_up_that_was_stopped_is_resumed_and_an_evaluation_too(crf_run):
    warm = {"train__warmup__mode": "steps", "train__warmup__steps": "2"}
    crf_run(stop=1, **warm)
    resumed = crf_run(stop="hint proof", **warm)
    assert line(resumed, "train: ") == "train: resumes from step 1 of its warm-up: none of its 3 steps was made"
    after = crf_run(stop="evaluation", **warm)
    assert line(after, "train: ") == "train: resumes from step 2 of its warm-up: none of its 3 steps was made"
    ended = crf_run(**warm)
    assert "scores that an interrupted evaluation kept" in line(ended, "evaluate: ")
    assert not [each for each in ended.splitlines() if each.startswith("train: ")]
