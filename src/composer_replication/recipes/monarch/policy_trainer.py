"""What the trainer's actor does: steps on numbered batches, each exactly once, whoever is killed in between.

    batches/batch-000003.safetensors   what outer step 3 trains on
    steps/000003.json                  what came of it
    checkpoints/state-000004.safetensors   weights and optimiser after outer steps 0 to 3
    start.json                         which weights the run began with
    shared memory: version 4           the same weights, for whoever samples

An outer step is all optimiser steps on one batch. It is recorded, then checkpointed, then published. Whoever starts
anew begins at the last checkpoint, trains again on the batches after it, and answers for a batch that is behind it with
the record. A step draws no random numbers but those of its own seed, so the weights come out the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.atomic import atomic_write_json
from composer_replication.batch.model_folder import load_model
from composer_replication.errors import (
    InputError,
    NonFiniteError,
    StaleArtefactError,
    explain,
)
from composer_replication.loss.grpo import LOSS_TYPES, LossType, grpo_loss
from composer_replication.loss.linear import linear_token_logprobs
from composer_replication.loss.rows import check_choice, check_positive, check_unit_interval
from composer_replication.recipes.monarch.tensor_file import (
    SharedWeights,
    StepBatch,
    numbered_files,
    numbered_path,
    read_tensor_file,
    remove_unfinished,
    write_tensor_file,
)
from composer_replication.trainer.objective.channels import (
    Anneal,
    LossKnobs,
    annealed,
    check_anneal,
    in_head_dtype,
)
from composer_replication.trainer.objective.compose import channel_options, compose_loss
from composer_replication.trainer.objective.fingerprint import weights_digest
from composer_replication.trainer.objective.model_head import causal_lm_of, decoder_of, head_of
from composer_replication.trainer.objective.reference import reference_logprobs
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from composer_replication.trainer.rollouts.channel import Importance, RolloutChannel, place_sites

_KIND, _STEM = "trainer's state, schema 1", "state"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


# The loss of one batch of rollouts: the clipped policy gradient, channel 2 on the same pass, channel 3 on its pairs.
#
# total = grpo + alpha * sdpo + beta_replay * replay
#
# The kernels are those of every other engine: `loss.grpo`, `rollouts.channel`, `objective.compose`. A batch may be cut
# into pieces of rows, whose losses and gradients add up to the whole's.


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What a step computes. `is_clip` bounds the importance weights of channel 2, None leaves them out.

    `rows_at_once` cuts a batch into pieces of so many rows, for memory; it must divide the batch.
    """

    knobs: LossKnobs = field(default_factory=lambda: LossKnobs(beta_replay=0.0))
    loss_type: LossType = "dr_grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    max_completion_length: int = 256
    temperature: float = 1.0
    is_clip: float | None = 2.0
    rows_at_once: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.loss_type, LOSS_TYPES, "loss_type")
        check_positive(self.temperature, "temperature")
        if self.knobs.sdpo_wrapper == "taid":
            fix = "Use the TRL trainer for it; here no schedule moves its target."
            raise InputError(explain("sdpo_wrapper", got="taid", expected="none or entropy_opd", fix=fix))


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """`folder` is the run's, `weights` the shared memory's. `total_steps` are optimiser steps, for the annealing.

    `live_share` 0.01 is the trust-region teacher: that much of the live weights, the rest of the start's; 1.0 is a live
    teacher, 0.0 a frozen one.
    """

    model: str
    folder: str
    weights: str
    total_steps: int
    num_iterations: int = 1
    loss: LossSettings = field(default_factory=LossSettings)
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    anneal: Anneal = "linear"
    live_share: float = 0.01
    seed: int = 0
    checkpoint_every: int = 1
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("total_steps", "num_iterations", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(explain(name, got=getattr(self, name), expected="1 or more"))
        check_anneal(self.anneal)
        check_unit_interval(self.live_share, "live_share")

    def alpha_at(self, step: int) -> float:
        """Channel 2's weight at the optimiser step after `step` finished ones."""
        return annealed(self.loss.knobs.alpha_sdpo, self.anneal, step=step, total_steps=self.total_steps)


class PolicyTrainer:
    """The policy, its optimiser, and where both stand."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings, self.folder = settings, Path(settings.folder)
        self.shared = SharedWeights(settings.weights)
        dtype = getattr(torch, settings.dtype)
        self.model: nn.Module = load_model(settings.model, what="model", dtype=dtype).to(settings.device)
        self.model.train()
        self._start = self._frozen_start()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
        )
        self.num_batches = 0
        self._begin()
        self._restore()
        # Also where there is such a version: a lost process may have left it, and what is there is not looked into.
        self.shared.publish(self.model, self.num_batches)

    def train_outer_step(self, batch_id: int) -> dict[str, Any]:
        """Train on a batch, or say what came of it where that was done before."""
        if type(batch_id) is not int or batch_id < 0:
            raise InputError(explain("batch_id", got=repr(batch_id), expected="the number of a batch, from 0"))
        if batch_id < self.num_batches:
            return json.loads(self._record_path(batch_id).read_text(encoding="utf-8"))
        for number in range(self.num_batches, batch_id):  # batches that a lost process had trained on
            self._train_and_keep(number)
        return self._train_and_keep(batch_id)

    def _train_and_keep(self, number: int) -> dict[str, Any]:
        record = self._train(number)
        self.num_batches = number + 1
        atomic_write_json(self._record_path(number), record)
        if self.num_batches % self.settings.checkpoint_every == 0:
            self._save()
        self.shared.publish(self.model, self.num_batches)
        return record

    def _train(self, number: int) -> dict[str, Any]:
        settings = self.settings
        batch = self._with_references(StepBatch.load(self.folder / "batches", number))
        if batch.old_logprobs is None and batch.weights_version != number:
            got = f"weights of version {batch.weights_version}, and no log-probs of theirs"
            expected = f"version {number}, or old_logprobs"
            raise StaleArtefactError(explain(f"batch {number} was sampled with", got=got, expected=expected))
        torch.manual_seed(settings.seed + number)
        steps: list[dict[str, Any]] = []
        for iteration in range(settings.num_iterations):
            done = number * settings.num_iterations + iteration
            figures, logprobs_BC = self._optimise(batch, settings.alpha_at(done))
            steps.append({"step": done + 1, **figures})
            if batch.old_logprobs is None:  # from now on the weights are others than those that sampled
                batch = replace(batch, old_logprobs=logprobs_BC)
        return {"batch_id": number, "weights_version": number + 1, "steps": steps}

    def _optimise(self, batch: StepBatch, alpha: float) -> tuple[dict[str, Any], Tensor]:
        """One optimiser step: its figures, and the log-probs before it."""
        settings, shares = self.settings, shares_of(batch, self.settings.loss)
        self._optimizer.zero_grad(set_to_none=True)
        terms: list[StepTerms] = []
        for _, piece in pieces_of(batch, shares):
            piece_terms = step_terms(self.model, piece, settings.loss, shares, alpha=alpha, teachers=self._teachers())
            piece_terms.total.backward()
            terms.append(piece_terms)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            fix = "The weights are as they were before this step."
            raise NonFiniteError(explain("gradient norm", got=float(norm), expected="a finite one", fix=fix))
        self._optimizer.step()
        return _figures(terms, alpha, float(norm)), torch.cat([term.logprobs_BC for term in terms])

    def _teachers(self) -> list[WeightedTeacher]:
        share = self.settings.live_share
        shares = [(self._start, 1.0 - share), (None, share)]
        return [WeightedTeacher(model, coefficient) for model, coefficient in shares if coefficient > 0]

    def _frozen_start(self) -> nn.Module | None:
        """The start weights, for the teacher and for pairs; None where neither asks for them."""
        knobs = self.settings.loss.knobs
        for_hints = knobs.alpha_sdpo > 0 and self.settings.live_share < 1
        for_pairs = knobs.beta_replay > 0 and knobs.dpo_variant == "dpo"
        return copy.deepcopy(self.model).eval().requires_grad_(False) if for_hints or for_pairs else None

    def _with_references(self, batch: StepBatch) -> StepBatch:
        batch = _on_device(batch, self.settings.device)
        knobs = self.settings.loss.knobs
        if not batch.pairs or not knobs.beta_replay or knobs.dpo_variant != "dpo":
            return batch
        assert self._start is not None
        return replace(batch, pairs=batch.pairs | reference_logprobs(self._start, batch.pairs))

    def _record_path(self, number: int) -> Path:
        path = self.folder / "steps" / f"{number:06d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"weight.{name}"] = parameter
            moments: dict[str, Tensor] = self._optimizer.state[parameter]
            tensors |= {f"{moment}.{name}": moments[moment] for moment in _MOMENTS if moment in moments}
        record = {"kind": _KIND, "num_batches": self.num_batches, "model": self.settings.model}
        folder = self.folder / "checkpoints"
        write_tensor_file(numbered_path(folder, _STEM, self.num_batches), tensors, record, lasting=True)
        for path in list(numbered_files(folder, _STEM).values())[:-2]:
            path.unlink()

    def _begin(self) -> None:
        """Compare the start weights with those the run began with: its batches were drawn by those or their children.

        Where nothing was drawn yet the run begins anew.
        """
        path, digest = self.folder / "start.json", weights_digest(self.model)
        start = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if start.get("weights") == digest:
            return
        drawn = [name for name in ("rollouts", "batches", "checkpoints") if any((self.folder / name).glob("*"))]
        if start and drawn:
            fix = "Go on with the model (and dtype) the run began with, or begin another run in another folder."
            got = f"the weights of {self.settings.model} ({digest[:12]})"
            expected = f"those of {start['model']} ({start['weights'][:12]}), which the folder's {drawn[0]} are of"
            raise StaleArtefactError(explain(f"start weights of {self.folder}", got=got, expected=expected, fix=fix))
        self.shared.remove_versions()
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_json(path, {"model": self.settings.model, "weights": digest})

    @torch.no_grad()
    def _restore(self) -> None:
        """The last checkpoint, where there is one."""
        folder = self.folder / "checkpoints"
        remove_unfinished(folder)
        if not (checkpoints := numbered_files(folder, _STEM)):
            return
        tensors, record = read_tensor_file(checkpoints[max(checkpoints)], _KIND)
        if record["model"] != self.settings.model:
            fix = "Go on with the model the run began with, or begin another run."
            got, expected = self.settings.model, record["model"]
            raise StaleArtefactError(explain(f"model of {folder}", got=got, expected=expected, fix=fix))
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            state = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS if f"{moment}.{name}" in tensors}
            if state:
                self._optimizer.state[parameter] = {
                    moment: value if moment == "step" else value.to(parameter.device) for moment, value in state.items()
                }
        self.num_batches = int(record["num_batches"])


def _figures(terms: list[StepTerms], alpha: float, norm: float) -> dict[str, Any]:
    """Sums over the pieces; a channel that ran in none of them has no figure."""
    figures: dict[str, Any] = {"alpha_sdpo": alpha, "grad_norm": norm}
    for name in ("total", "grpo", "sdpo", "replay"):
        values = [float(value.detach()) for term in terms if (value := getattr(term, name)) is not None]
        if values:
            figures[f"loss/{name}"] = sum(values)
    figures["clipped_share"] = sum(term.clipped_share for term in terms) / len(terms)
    figures["active"] = [name for name in ("grpo", "sdpo", "replay") if f"loss/{name}" in figures]
    return figures


def _on_device(batch: StepBatch, device: str) -> StepBatch:
    tensors = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    pairs = {name: value.to(device) for name, value in batch.pairs.items()}
    return replace(batch, **tensors, pairs=pairs)


class StepTerms(NamedTuple):
    """Values of one pass over a batch or a piece of it; a channel that had no items is None, not 0."""

    total: Tensor
    grpo: Tensor
    sdpo: Tensor | None
    replay: Tensor | None
    logprobs_BC: Tensor
    """Of the sampled tokens, detached; 0 elsewhere."""
    clipped_share: float


class Shares(NamedTuple):
    """How many pieces a batch is cut into, and what all of them hold together."""

    pieces: int
    sampled_tokens: int
    taught_tokens: int


def shares_of(batch: StepBatch, settings: LossSettings) -> Shares:
    rows = batch.completion_ids.shape[0]
    size = settings.rows_at_once or rows
    if size < 1 or rows % size:
        raise InputError(explain("rows_at_once", got=f"{size} for {rows} rows", expected="a divisor of the batch"))
    taught = sum(turn.end - turn.start for turns in batch.sites for turn in turns)
    return Shares(rows // size, int(batch.loss_mask.sum()), taught)


def pieces_of(batch: StepBatch, shares: Shares) -> Iterator[tuple[slice, StepBatch]]:
    """The pieces with their rows; pairs go with the first."""
    size = batch.completion_ids.shape[0] // shares.pieces
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampled_mask", "advantages", "sites")
    for number in range(shares.pieces):
        rows = slice(number * size, (number + 1) * size)
        cut: dict[str, Any] = {name: getattr(batch, name)[rows] for name in names}
        old = None if batch.old_logprobs is None else batch.old_logprobs[rows]
        yield rows, replace(batch, **cut, old_logprobs=old, pairs=batch.pairs if number == 0 else {})


def step_terms(
    model: nn.Module,
    batch: StepBatch,
    settings: LossSettings,
    shares: Shares,
    *,
    alpha: float,
    teachers: Sequence[WeightedTeacher] | None = None,
) -> StepTerms:
    """All channels of a piece. Without old log-probs the weights at hand are those that sampled: every ratio is 1."""
    head = head_of(model, batch.input_ids[:1])  # its first look runs the body, which channel 2 must not hear

    def policy() -> tuple[Tensor, Tensor, float]:
        now_BC = completion_logprobs(model, batch, settings.temperature, head)
        then_BC = now_BC.detach() if batch.old_logprobs is None else batch.old_logprobs
        policy_loss = grpo_loss(
            now_BC,
            then_BC,
            batch.advantages,
            batch.loss_mask,
            loss_type=settings.loss_type,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high,
            max_completion_length=settings.max_completion_length,
            num_items=shares.sampled_tokens,
            accumulation=shares.pieces,
        )
        return policy_loss.loss, now_BC.detach(), float(policy_loss.clipped_share)

    (grpo, logprobs_BC, clipped), sdpo = _with_hints(model, batch, settings, shares, alpha, teachers, policy)
    replay = _replay(model, batch, settings.knobs)
    total = grpo if sdpo is None else grpo + alpha * sdpo
    total = total if replay is None else total + settings.knobs.beta_replay * replay
    return StepTerms(total, grpo, sdpo, replay, logprobs_BC, clipped)


def completion_logprobs(model: nn.Module, batch: StepBatch, temperature: float, head: Any = None) -> Tensor:
    """(B, C) of the sampled tokens, 0 elsewhere; the LM head is applied to their rows alone."""
    head = head or head_of(model, batch.input_ids[:1])
    warm = replace(head, scale=head.scale / temperature)
    body: Any = decoder_of(causal_lm_of(model))
    hidden_BTH: Tensor = body(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state
    width, mask_BC = batch.completion_ids.shape[1], batch.loss_mask
    rows_NH = in_head_dtype(hidden_BTH[:, -width - 1 : -1][mask_BC], head)
    logprobs_N = linear_token_logprobs(rows_NH, warm, batch.completion_ids[mask_BC])
    return torch.zeros(mask_BC.shape, dtype=logprobs_N.dtype, device=mask_BC.device).index_put(
        mask_BC.nonzero(as_tuple=True), logprobs_N
    )


def _with_hints(
    model: nn.Module,
    batch: StepBatch,
    settings: LossSettings,
    shares: Shares,
    alpha: float,
    teachers: Sequence[WeightedTeacher] | None,
    policy: Callable[[], tuple[Tensor, Tensor, float]],
) -> tuple[tuple[Tensor, Tensor, float], Tensor | None]:
    """The policy's loss, and channel 2 on the rows of its pass; also where its weight has sunk to 0."""
    knobs = settings.knobs
    placed = None
    if knobs.alpha_sdpo > 0:
        placed = place_sites(batch.sites, batch.prompt_mask, batch.input_ids, batch.completion_mask)
    if placed is None:
        return policy(), None
    options = channel_options(
        model,
        replace(knobs, alpha_sdpo=alpha, beta_replay=0.0),
        denominators={"sdpo_jsd": float(shares.taught_tokens)},
        sdpo_teachers=teachers,
    )
    importance = None
    if batch.old_logprobs is not None and settings.is_clip is not None:
        importance = Importance(batch.old_logprobs, settings.temperature, settings.is_clip)
    channel = RolloutChannel(model, placed, options, importance)
    channel.run_teachers(batch.input_ids)
    with channel.capture_student_rows():
        policy_terms = policy()
    hints = channel.result(*batch.input_ids.shape)
    assert hints is not None
    return policy_terms, hints.value


def _replay(model: nn.Module, batch: StepBatch, knobs: LossKnobs) -> Tensor | None:
    """Channel 3; channel 1's stand-in has no row here."""
    if not batch.pairs or not knobs.beta_replay:
        return None
    ids = batch.pairs["dpo_chosen_input_ids"][:1]
    inputs = {"input_ids": ids, "response_mask": torch.zeros_like(ids), **batch.pairs}
    options: dict[str, Any] = {**vars(knobs), "alpha_sdpo": 0.0}
    return compose_loss(model, inputs, **options).trace_replay_dpo
