"""`train_loss` of a resumed run: over all steps where all are known, else over those of the last call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from composer_replication.tensor_file import load_tree
from composer_replication.trainer.overrides import SafeCheckpoints

STEPS = 10


class Part(SafeCheckpoints):
    """One call of `train`, from `first` on: what the loop keeps of its loss, without a model."""

    def __init__(self, first, saved):
        self.args, self.state = SimpleNamespace(process_index=0), SimpleNamespace(global_step=first)
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0), 0.0
        self._initial_global_step = self._globalstep_last_logged = first
        if saved is not None:
            self.checkpoints.restore_loss_sum(saved)

    def make_steps(self, loss):
        """Ten steps of this loss, the last three of them after the last log line."""
        self.state.global_step += STEPS
        self._total_loss_scalar += float(self._tr_loss) + (STEPS - 3) * loss
        self._tr_loss = torch.tensor(3.0 * loss)
        self._globalstep_last_logged = self.state.global_step - 3

    def saved(self, folder):
        self._save_rng_state(str(folder))
        return load_tree(folder, "cursor-0")["loss"]

    def train_loss(self):
        """As the loop ends."""
        self.checkpoints.average_loss_over_all_steps()
        made = max(self.state.global_step - self._initial_global_step, 0.001)
        return (self._total_loss_scalar + float(self._tr_loss)) / made


@pytest.mark.parametrize("first_is_of_an_earlier_version", [False, True])
def test_the_mean_is_of_all_steps_or_of_the_last_call_never_of_a_mixture(tmp_path, first_is_of_an_earlier_version):
    saved = None
    for number, loss in enumerate((8.0, 4.0, 1.0)):
        part = Part(number * STEPS, saved)
        part.make_steps(loss)
        saved = part.saved(tmp_path / str(number))
        if number == 0 and first_is_of_an_earlier_version:
            del saved["total"]
        known = [8.0, 4.0, 1.0][: number + 1]
        expected = known[-1] if first_is_of_an_earlier_version and number else sum(known) / len(known)
        assert part.train_loss() == pytest.approx(expected)
