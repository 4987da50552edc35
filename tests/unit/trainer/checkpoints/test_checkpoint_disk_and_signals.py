"""A full disk loses nothing that was saved; SIGTERM ends a run after its step, with a checkpoint."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading

import pytest
import torch
from transformers import TrainerCallback

from composer_replication.atomic import StagedFile
from composer_replication.errors import InputError, RunError
from composer_replication.trainer.checkpoints import newest_complete
from kill_and_resume.small_runs import small_trainer, weights_of
from refusals import refusal


class At(TrainerCallback):
    """Does something once, in the middle of a step."""

    def __init__(self, step, what):
        self._step, self._what = step, what

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self._step - 1:
            self._what()


def full_disk_for(name, monkeypatch):
    """No file of this name can be brought to the disk."""
    seal = StagedFile.seal

    def seal_or_fail(self):
        if self._target.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(self._target))
        seal(self)

    monkeypatch.setattr(StagedFile, "seal", seal_or_fail)


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """The weights of a run that nothing happened to; how often it saves does not matter to them."""
    trainer = small_trainer(tmp_path_factory.mktemp("whole"), max_steps=6, save_strategy="no")
    trainer.train()
    return weights_of(trainer.model)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "manifest.json"])
def test_a_full_disk_is_named_and_what_was_saved_stays(tmp_path, monkeypatch, six_steps, name):
    fill = At(4, lambda: full_disk_for(name, monkeypatch))
    trainer = small_trainer(tmp_path / "run", max_steps=6, save_total_limit=1, callbacks=[fill])
    with refusal(RunError, what=str(tmp_path / "run" / "checkpoint-4"), got=f"[Errno {errno.ENOSPC}]") as failed:
        trainer.train()
    assert isinstance(failed.value.__cause__, OSError)
    monkeypatch.undo()
    assert newest_complete(tmp_path / "run").name == "checkpoint-2"
    later = small_trainer(tmp_path / "run", max_steps=6, save_total_limit=1)
    later.train(resume_from_checkpoint=True)
    assert weights_of(later.model) == six_steps
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-6"]


def test_a_full_disk_under_the_weights_is_named_too(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    trainer = small_trainer(tmp_path, max_steps=4)
    save_pretrained = trainer.model.save_pretrained

    def no_space(*args, **options):
        if trainer.state.global_step == 4:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_pretrained(*args, **options)

    monkeypatch.setattr(trainer.model, "save_pretrained", no_space)
    with refusal(RunError, what="checkpoint-4", got="os error 28"):
        trainer.train()
    assert newest_complete(tmp_path).name == "checkpoint-2"


def test_extra_state_that_cannot_be_kept_is_named(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, max_steps=2)
    monkeypatch.setattr(trainer, "extra_state", lambda: {"environment": object()})
    with refusal(InputError, what="'extra-0'") as refused:
        trainer.train()
    assert "'environment'" in refused.value.what
    assert newest_complete(tmp_path) is None


@pytest.mark.parametrize("settings", [{}, {"save_strategy": "epoch"}, {"save_strategy": "no"}], ids=str)
def test_sigterm_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, caplog, six_steps, settings):
    before = signal.getsignal(signal.SIGTERM)
    ask = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer = small_trainer(tmp_path / "run", max_steps=6, callbacks=[ask], **settings)
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 3
    assert trainer.stopped_by == "SIGTERM"
    [told] = [each.getMessage() for each in caplog.records if "SIGTERM" in each.getMessage()]
    assert "step 3" in told
    assert str(tmp_path / "run" / "checkpoint-3") in told
    assert signal.getsignal(signal.SIGTERM) is before
    assert newest_complete(tmp_path / "run").name == "checkpoint-3"
    later = small_trainer(tmp_path / "run", max_steps=6, **settings)
    later.train(resume_from_checkpoint=True)
    assert later.stopped_by == ""
    assert weights_of(later.model) == six_steps


def test_ctrl_c_stops_like_sigterm_where_asked_for_and_twice_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell runs the tests in the background
    trainer = small_trainer(tmp_path, callbacks=[At(2, lambda: os.kill(os.getpid(), signal.SIGINT))])
    trainer.stop_signals = (signal.SIGTERM, signal.SIGINT)
    assert trainer.train().global_step == 2
    again = small_trainer(tmp_path, callbacks=[At(3, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])])
    again.stop_signals = trainer.stop_signals
    with pytest.raises(KeyboardInterrupt):
        again.train(resume_from_checkpoint=True)
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_go_back_when_training_raises(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    trainer = small_trainer(tmp_path)
    monkeypatch.setattr(trainer, "training_step", lambda *_args: torch.tensor(float("nan")).missing)
    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(AttributeError):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) is before
    assert trainer.callback_handler.callbacks == callbacks


def test_another_thread_trains_without_hearing_signals(tmp_path):
    trainer = small_trainer(tmp_path, max_steps=2)
    before, during = signal.getsignal(signal.SIGTERM), []
    trainer.add_callback(At(1, lambda: during.append(signal.getsignal(signal.SIGTERM))))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert during == [before]
    assert newest_complete(tmp_path).name == "checkpoint-2"
