"""Run optimizer steps on numbered batches, each exactly once, even if processes are killed in between.

    batches/batch-000003.safetensors       the batch of outer step 3
    steps/000003.json                      the metrics of outer step 3
    checkpoints/state-000004.safetensors   weights and optimizer after outer steps 0 to 3
    start.json                             the initial weights of the run
    shared memory: version 4               the same weights as the checkpoint, for the generator

An outer step consists of all optimizer steps on one batch. It is recorded, then checkpointed, then published. After a
restart the trainer loads the last checkpoint and repeats the later batches; for an earlier batch it returns the record.
A step draws random numbers only from its own seed, so repeating it gives the same weights.

The loss is the same as in the other engines (`loss.grpo`, `rollouts.hint_distillation`, `objective.compose`). Its three
terms are channel 1 (GRPO), channel 2 (hint distillation) and channel 3 (DPO on pairs of teachers' and student's
answers):

    total = grpo + alpha * sdpo + beta_replay * replay

Shape suffixes: B rows, T tokens of prompt and completion, C tokens of the completion, N sampled tokens, H hidden size.
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
from composer_replication.errors import InputError, NonFiniteError, StaleArtefactError, explain
from composer_replication.loss.grpo import LOSS_TYPES, LossType, grpo_loss
from composer_replication.loss.linear import linear_token_logprobs
from composer_replication.loss.rows import check_choice, check_positive, check_unit_interval
from composer_replication.recipes.monarch.tensor_file import (
    NumberedFiles,
    SharedWeights,
    StepBatch,
)
from composer_replication.trainer.objective.channels import (
    Anneal,
    LossKnobs,
    annealed_weight,
    channel_options,
    check_anneal,
)
from composer_replication.trainer.objective.compose import compose_loss
from composer_replication.trainer.objective.fingerprint import weights_digest
from composer_replication.trainer.objective.model_head import (
    cast_to_head_dtype,
    get_body,
    get_causal_lm,
    get_linear_head,
)
from composer_replication.trainer.objective.reference import reference_logprobs
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from composer_replication.trainer.rollouts.hint_distillation import ImportanceSampling, distill, place_turns

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""The state of AdamW per parameter, as torch names it."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of the loss in an optimizer step.

    `is_clip` is the upper bound of the importance weights in channel 2 (hint distillation); None turns them off.
    `rows_at_once` is the number of rows per micro-batch, which limits the memory used; the batch size must be a
    multiple of it.
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
            fix = "Use the TRL trainer for TAID: this trainer does not schedule TAID's target."
            raise InputError(explain("sdpo_wrapper", got="taid", expected="none or entropy_opd", fix=fix))


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The settings of the trainer. `folder` is the run's folder, and `weights` is the folder in shared memory.

    `total_steps` is the number of optimizer steps over which weights are annealed. `live_share` is the share of the
    current policy in the teacher's logits; the rest comes from the initial model. A share of 0.01 gives a trust-region
    teacher, 1.0 a teacher that is the current policy, and 0.0 a frozen teacher.
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
        """Return the loss weight of channel 2 (hint distillation) in the optimizer step that follows `step`
        completed steps.
        """
        return annealed_weight(self.loss.knobs.alpha_sdpo, self.anneal, step=step, total_steps=self.total_steps)


class PolicyTrainer:
    """The policy and its optimizer, and the number of batches on which the policy has been trained."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings, self.folder = settings, Path(settings.folder)
        self.shared = SharedWeights(settings.weights)
        self._checkpoints = NumberedFiles(self.folder / "checkpoints", "state", "trainer's state, schema 1")
        dtype = getattr(torch, settings.dtype)
        self.model: nn.Module = load_model(settings.model, what="model", dtype=dtype).to(settings.device)
        self.model.train()
        # Copied before a checkpoint is loaded into the model.
        self._initial_model = self._copy_initial_model()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
        )
        self.num_batches = 0
        self._check_initial_weights()
        self._restore()
        # Even if this version exists, because a killed process may have written it and its content is not checked.
        self.shared.publish(self.model, self.num_batches)

    def train_outer_step(self, batch_id: int) -> dict[str, Any]:
        """Train on a batch unless this has already been done, and return its record."""
        if type(batch_id) is not int or batch_id < 0:
            raise InputError(explain("batch_id", got=repr(batch_id), expected="a batch number, 0 or more"))
        if batch_id < self.num_batches:
            return json.loads(self._record_path(batch_id).read_text(encoding="utf-8"))
        for number in range(
            self.num_batches, batch_id
        ):  # batches after the last checkpoint, which were lost with a killed process
            self._train_and_save(number)
        return self._train_and_save(batch_id)

    def _train_and_save(self, number: int) -> dict[str, Any]:
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
        # Version n holds the weights after n batches, so batch n must be sampled with version n.
        if batch.old_logprobs is None and batch.weights_version != number:
            got = f"version {batch.weights_version} of the weights, without their log-probs"
            expected = f"version {number}, or old_logprobs"
            raise StaleArtefactError(explain(f"batch {number} was sampled with", got=got, expected=expected))
        # Seeded per batch, so that a step that is repeated after a restart draws the same random numbers.
        torch.manual_seed(settings.seed + number)
        steps: list[dict[str, Any]] = []
        for iteration in range(settings.num_iterations):
            num_finished = number * settings.num_iterations + iteration
            metrics, logprobs_BC = self._optimize(batch, settings.alpha_at(num_finished))
            steps.append({"step": num_finished + 1, **metrics})
            if batch.old_logprobs is None:  # in the next iteration the sampling weights are gone
                batch = replace(batch, old_logprobs=logprobs_BC)
        return {"batch_id": number, "weights_version": number + 1, "steps": steps}

    def _optimize(self, batch: StepBatch, alpha: float) -> tuple[dict[str, Any], Tensor]:
        """Run one optimizer step. Returns its metrics, and the log-probs that the sampled tokens had before the
        step.
        """
        settings, totals = self.settings, _batch_totals(batch, self.settings.loss)
        self._optimizer.zero_grad(set_to_none=True)
        terms: list[_StepTerms] = []
        for micro_batch in _split_batch(batch, totals):
            micro_terms = _step_terms(
                self.model, micro_batch, settings.loss, totals, alpha=alpha, teachers=self._teachers()
            )
            micro_terms.total.backward()
            terms.append(micro_terms)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        # Checked before the optimizer step, so that a NaN gradient never reaches the weights.
        if not bool(torch.isfinite(norm)):
            fix = "The weights are unchanged. Lower learning_rate, or look for the cause in this batch."
            raise NonFiniteError(explain("gradient norm", got=float(norm), expected="a finite number", fix=fix))
        self._optimizer.step()
        return _step_metrics(terms, alpha, float(norm)), torch.cat([term.logprobs_BC for term in terms])

    def _teachers(self) -> list[WeightedTeacher]:
        live_share = self.settings.live_share
        shares = [(self._initial_model, 1.0 - live_share), (None, live_share)]  # None is the live policy
        return [WeightedTeacher(model, coefficient) for model, coefficient in shares if coefficient > 0]

    def _copy_initial_model(self) -> nn.Module | None:
        """Return a copy of the initial model for the teacher and for the DPO reference, or None if neither needs it."""
        knobs = self.settings.loss.knobs
        for_hints = knobs.alpha_sdpo > 0 and self.settings.live_share < 1
        # SimPO needs no reference.
        for_pairs = knobs.beta_replay > 0 and knobs.dpo_variant == "dpo"
        return copy.deepcopy(self.model).eval().requires_grad_(False) if for_hints or for_pairs else None

    def _with_references(self, batch: StepBatch) -> StepBatch:
        batch = _on_device(batch, self.settings.device)
        knobs = self.settings.loss.knobs
        if not batch.pairs or not knobs.beta_replay or knobs.dpo_variant != "dpo":
            return batch
        assert self._initial_model is not None
        return replace(batch, pairs=batch.pairs | reference_logprobs(self._initial_model, batch.pairs))

    def _record_path(self, number: int) -> Path:
        path = self.folder / "steps" / f"{number:06d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            # One file for both, so that weights and optimizer can never belong to different steps.
            tensors[f"weight.{name}"] = parameter
            moments: dict[str, Tensor] = self._optimizer.state[parameter]
            tensors |= {f"{moment}.{name}": moments[moment] for moment in _MOMENTS if moment in moments}
        record = {"num_batches": self.num_batches, "model": self.settings.model}
        self._checkpoints.write(self.num_batches, tensors, record)
        # Keep the last two checkpoints.
        for path in list(self._checkpoints.paths().values())[:-2]:
            path.unlink()

    def _check_initial_weights(self) -> None:
        """Raise StaleArtefactError if the run's existing rollouts, batches or checkpoints were created from other
        initial weights.

        A run that has none of these may begin with any weights, which are then recorded.
        """
        path, digest = self.folder / "start.json", weights_digest(self.model)
        start = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if start.get("weights") == digest:
            return
        sampled_folders = [
            name for name in ("rollouts", "batches", "checkpoints") if any((self.folder / name).glob("*"))
        ]
        if start and sampled_folders:
            fix = "Resume with the model and dtype that the run began with, or start a new run in another folder."
            got = f"the weights of {self.settings.model} ({digest[:12]})"
            expected = (
                f"those of {start['model']} ({start['weights'][:12]}), with which its {sampled_folders[0]} were created"
            )
            raise StaleArtefactError(explain(f"initial weights of {self.folder}", got=got, expected=expected, fix=fix))
        self.shared.remove_versions()
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_json(path, {"model": self.settings.model, "weights": digest})

    @torch.no_grad()
    def _restore(self) -> None:
        """Load the last checkpoint if one exists."""
        self._checkpoints.remove_unfinished()
        if not (numbers := self._checkpoints.paths().keys()):
            return
        tensors, record = self._checkpoints.read(max(numbers))
        if record["model"] != self.settings.model:
            fix = "Resume with the model that the run began with, or start a new run in another folder."
            got, expected = self.settings.model, record["model"]
            raise StaleArtefactError(
                explain(f"model of {self._checkpoints.folder}", got=got, expected=expected, fix=fix)
            )
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            state = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS if f"{moment}.{name}" in tensors}
            if state:
                # `step` stays on the CPU, where AdamW creates it.
                self._optimizer.state[parameter] = {
                    moment: value if moment == "step" else value.to(parameter.device) for moment, value in state.items()
                }
        self.num_batches = int(record["num_batches"])


def _step_metrics(terms: list[_StepTerms], alpha: float, norm: float) -> dict[str, Any]:
    """Return the metrics of a step, with losses summed over its micro-batches. A channel that was active in none of
    them gets no metric.
    """
    metrics: dict[str, Any] = {"alpha_sdpo": alpha, "grad_norm": norm}
    for name in ("total", "grpo", "sdpo", "replay"):
        # None means that the micro-batch has no items of this channel, which is not the same as 0.
        values = [float(value.detach()) for term in terms if (value := getattr(term, name)) is not None]
        if values:
            metrics[f"loss/{name}"] = sum(values)
    metrics["clipped_share"] = sum(term.clipped_share for term in terms) / len(terms)
    metrics["active"] = [name for name in ("grpo", "sdpo", "replay") if f"loss/{name}" in metrics]
    return metrics


def _on_device(batch: StepBatch, device: str) -> StepBatch:
    tensors = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    pairs = {name: value.to(device) for name, value in batch.pairs.items()}
    return replace(batch, **tensors, pairs=pairs)


class _StepTerms(NamedTuple):
    """The loss terms of one forward pass over a batch or micro-batch. The term of a channel without items is None,
    not 0.
    """

    total: Tensor
    grpo: Tensor
    sdpo: Tensor | None
    replay: Tensor | None
    logprobs_BC: Tensor
    """Log-probs of the sampled tokens, detached; 0 elsewhere."""
    clipped_share: float


class _BatchTotals(NamedTuple):
    """The totals of a whole batch by which the losses of its micro-batches are normalized."""

    num_micro_batches: int
    num_sampled_tokens: int
    num_target_tokens: int


def _batch_totals(batch: StepBatch, settings: LossSettings) -> _BatchTotals:
    """Return the totals of a batch. Raises InputError if the number of rows is not a multiple of `rows_at_once`."""
    rows = batch.completion_ids.shape[0]
    size = settings.rows_at_once or rows
    if size < 1 or rows % size:
        raise InputError(
            explain("rows_at_once", got=f"{size} for {rows} rows", expected="a divisor of the number of rows")
        )
    num_target_tokens = sum(turn.end - turn.start for turns in batch.sites for turn in turns)
    return _BatchTotals(rows // size, int(batch.loss_mask.sum()), num_target_tokens)


def _split_batch(batch: StepBatch, totals: _BatchTotals) -> Iterator[StepBatch]:
    """Yield the micro-batches, each with its slice of rows. The first micro-batch gets all DPO pairs."""
    size = batch.completion_ids.shape[0] // totals.num_micro_batches
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampled_mask", "advantages", "sites")
    for number in range(totals.num_micro_batches):
        rows = slice(number * size, (number + 1) * size)
        sliced: dict[str, Any] = {name: getattr(batch, name)[rows] for name in names}
        old_logprobs = None if batch.old_logprobs is None else batch.old_logprobs[rows]
        yield replace(batch, **sliced, old_logprobs=old_logprobs, pairs=batch.pairs if number == 0 else {})


def _step_terms(
    model: nn.Module,
    batch: StepBatch,
    settings: LossSettings,
    totals: _BatchTotals,
    *,
    alpha: float,
    teachers: Sequence[WeightedTeacher] | None = None,
) -> _StepTerms:
    """Return the loss terms of one micro-batch.

    Without `old_logprobs`, the current weights are the ones that sampled the batch, so every importance ratio is 1.
    """
    head = get_linear_head(
        model, batch.input_ids[:1]
    )  # runs the decoder once, hence before channel 2 captures its output

    def policy() -> tuple[Tensor, Tensor, float]:
        logprobs_BC = _completion_logprobs(model, batch, settings.temperature, head)
        old_logprobs_BC = logprobs_BC.detach() if batch.old_logprobs is None else batch.old_logprobs
        policy_loss = grpo_loss(
            logprobs_BC,
            old_logprobs_BC,
            batch.advantages,
            batch.loss_mask,
            loss_type=settings.loss_type,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high,
            max_completion_length=settings.max_completion_length,
            num_items=totals.num_sampled_tokens,
            accumulation=totals.num_micro_batches,
        )
        return policy_loss.loss, logprobs_BC.detach(), float(policy_loss.clipped_share)

    (grpo, logprobs_BC, clipped), sdpo = _with_channel_2(model, batch, settings, totals, teachers, policy)
    replay = _channel_3(model, batch, settings.knobs)
    total = grpo if sdpo is None else grpo + alpha * sdpo
    total = total if replay is None else total + settings.knobs.beta_replay * replay
    return _StepTerms(total, grpo, sdpo, replay, logprobs_BC, clipped)


def _completion_logprobs(model: nn.Module, batch: StepBatch, temperature: float, head: Any = None) -> Tensor:
    """Return the log-probs of the sampled tokens as a (B, C) tensor, with 0 at all other positions.

    The LM head runs only on the hidden states that predict sampled tokens.
    """
    head = head or get_linear_head(model, batch.input_ids[:1])
    # Sampling divided the logits by the temperature, and the ratios need log-probs under the same distribution.
    scaled_head = replace(head, scale=head.scale / temperature)
    body: Any = get_body(get_causal_lm(model))
    hidden_BTH: Tensor = body(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state
    width, mask_BC = batch.completion_ids.shape[1], batch.loss_mask
    # One position to the left, because the hidden state of a token predicts the next token.
    rows_NH = cast_to_head_dtype(hidden_BTH[:, -width - 1 : -1][mask_BC], head)
    logprobs_N = linear_token_logprobs(rows_NH, scaled_head, batch.completion_ids[mask_BC])
    return torch.zeros(mask_BC.shape, dtype=logprobs_N.dtype, device=mask_BC.device).index_put(
        mask_BC.nonzero(as_tuple=True), logprobs_N
    )


def _with_channel_2(
    model: nn.Module,
    batch: StepBatch,
    settings: LossSettings,
    totals: _BatchTotals,
    teachers: Sequence[WeightedTeacher] | None,
    policy: Callable[[], tuple[Tensor, Tensor, float]],
) -> tuple[tuple[Tensor, Tensor, float], Tensor | None]:
    """Return the result of `policy` together with the loss of channel 2 (hint distillation), computed on the hidden
    states of the same forward pass. The latter is None if no row has an error site.

    Channel 2 is computed even after its annealed weight has reached 0.
    """
    knobs = settings.knobs
    placed = None
    if knobs.alpha_sdpo > 0:
        placed = place_turns(batch.sites, batch.prompt_mask, batch.input_ids, batch.completion_mask)
    # No row of this micro-batch has a site.
    if placed is None:
        return policy(), None
    options = channel_options(
        model, knobs, denominators={"sdpo_jsd": float(totals.num_target_tokens)}, sdpo_teachers=teachers
    )
    # Only batches sampled with other weights need importance weights.
    importance = None
    if batch.old_logprobs is not None and settings.is_clip is not None:
        importance = ImportanceSampling(batch.old_logprobs, settings.temperature, settings.is_clip)
    policy_terms, channel, _ = distill(model, batch.input_ids, placed, options, policy, importance)
    assert channel is not None
    return policy_terms, channel.value


def _channel_3(model: nn.Module, batch: StepBatch, knobs: LossKnobs) -> Tensor | None:
    """Return the loss of channel 3 (DPO), or None if there are no pairs. The response mask is empty, so that channel
    1 (GRPO) does not contribute.
    """
    if not batch.pairs or not knobs.beta_replay:
        return None
    ids = batch.pairs["dpo_chosen_input_ids"][:1]
    inputs = {"input_ids": ids, "response_mask": torch.zeros_like(ids), **batch.pairs}
    options: dict[str, Any] = {**vars(knobs), "alpha_sdpo": 0.0}
    return compose_loss(model, inputs, **options).trace_replay_dpo
