"""Channel 2 on rollouts: the policy learns to do without a hint what it does after one (hint distillation, SDPO).

Where the model made an error in a rollout, say a call to a tool that does not exist, a hint tells it what would have
been right. The policy reads the erring turn twice: as it was sampled (the student), and with the hint inserted before
the turn (the hinted teacher). The hint makes the error less likely. The student is pulled towards the teacher's
distribution on the tokens of the erring turn, and nowhere else, so that it needs no hint next time.

    loss  = sum over n of  w_n * D(student_n, teacher_n)  /  num_tokens
    total = GRPO's loss + alpha * loss

    n           the tokens of the erring turn, exactly as sampled and with the end-of-turn token. With `part="call"`
                only the tokens of its tool calls.
    student_n   softmax(head(h_n) / temperature), where h_n is the policy's last hidden state at the token before n,
                taken from GRPO's own forward pass over prompt + completion. The only term with a gradient.
    teacher_n   softmax(sum over k of c_k * head_k(h_kn) / temperature), where h_kn is the hidden state of model k at
                the token before n in the context with the hint, and the c_k add up to 1. "trust_region" is 0.99 times
                the initial model + 0.01 times the policy; "live", "frozen" and "ema" have one model (`teacher_keeper`).
    D           the generalized Jensen-Shannon divergence over the whole vocabulary. `sdpo_jsd_beta` = 1 (in the
                presets) is KL(student || teacher), 0 is KL(teacher || student).
    w_n         min(sdpo_is_clip, p_now(n) / p_sampled(n)) if the policy has changed since it sampled; otherwise 1.
    num_tokens  the mean number of such tokens per optimizer step of a generation, over all processes.
    alpha       `alpha_sdpo`, annealed over the run; 0 while the gate is closed. It opens once own hints make errors
                rarer by clearly more than hints about other errors do, and may close again (`hint_gate`).

Off by default: other weights w_n and the contrast with an unrelated hint (`objective.row_weighting`), other divergences
(`sdpo_wrapper`). Sources: Cursor's Composer 2.5 (18 May 2026, "targeted RL with textual feedback") for the idea; SDPO
(arXiv 2601.20802) for trust region, KL direction and importance weights.

In a GRPO step (`trainer.grpo_step`, which the overrides of TRL's methods call):

1. TRL samples a group of rollouts per prompt and runs their tool calls.
2. `ErringTurnFinder.find` locates each rollout's error sites, writes a hint for each, and places the hint. The gate
   and the contrast need a second hint, about another kind of error (`unrelated_hints`).
3. TRL shuffles the rollouts and splits them into micro-batches. The turns travel with them (`SITES`).
4. For every micro-step, `HintDistillation.policy_and_term` finds the turns' rows in the padded micro-batch
   (`place_turns`), runs the teachers without gradient, and then GRPO's forward pass, inside which the loss is computed.
5. After the optimizer step, an EMA teacher moves towards the policy, and the gate decides about the next step.

What is reported: the loss as `loss/sdpo_kl`, the number of tokens as `items/sdpo_kl`, and whether the channel trained
as `ran/sdpo_kl`. If no rollout of any process has an erring turn, the step is plain GRPO: no loss is reported, and
`ran` is 0. While alpha is 0, the loss is reported but multiplied by 0, and `ran` is 0. Sites that are not trained on
are counted with the reason (`ErringTurns.counts`).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from composer_replication.batch.hint_placement import HintedTurn, hinted_turn
from composer_replication.batch.render.renderer import RenderedSequence, Renderer
from composer_replication.batch.tree import TokenTree, build_tree
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.loss.linear import LinearHead, linear_token_logprobs
from composer_replication.trainer.objective.channels import (
    Channel,
    ChannelOptions,
    ChannelSettings,
    channel_options,
    hint_channel,
)
from composer_replication.trainer.objective.distributed import max_over_shards
from composer_replication.trainer.objective.model_head import (
    cast_to_head_dtype,
    get_body,
    get_causal_lm,
    get_linear_head,
)
from composer_replication.trainer.objective.row_weighting import (
    Contrast,
    HintTargets,
    RowWeighting,
    WeightedTeacher,
    all_models,
    rows_by_part,
)
from composer_replication.trainer.rollouts.hint_gate import HintComparison, HintGate, hint_effects
from composer_replication.trainer.rollouts.sites import Rollout, RolloutErrorFinder, RolloutOptions
from composer_replication.types import ErrorSite

T = TypeVar("T")

SITES, ITEMS = "sdpo_sites", "sdpo_items"
"""Keys in a batch of rollouts: the erring turns of each rollout, and the number of their tokens on all processes."""
NO_HINT = "no_hint"


# ---- From error sites to erring turns: which turns, which tokens, and where the hint goes ----------------------------


class ErringTurn(NamedTuple):
    """An erring turn: its tokens [start, end) in prompt + completion, and its copies in contexts with a hint."""

    start: int
    end: int
    teacher_ids: Tensor
    """The context with the hint, up to the end of the turn. From `teacher_start` on it equals the rollout's ids."""
    teacher_start: int
    kind: str
    hint: str
    turn_id: str
    wrong_ids: Tensor | None = None
    """The same turn after an unrelated hint, for the gate and the contrast (`unrelated_hints` adds it)."""
    wrong_start: int = 0
    wrong_kind: str = ""
    hint_kind: str = ""
    """The kind of error that the hint is about. Set only in a control, where it is not the turn's own kind."""

    @property
    def kind_of_hint(self) -> str:
        return self.hint_kind or self.kind


@dataclass(eq=False, slots=True)
class ErringTurns:
    """The erring turns of a rollout that channel 2 trains on, all error sites, and counts of sites by outcome."""

    sequence: RenderedSequence
    turns: list[ErringTurn] = field(default_factory=list[ErringTurn])
    sites: list[ErrorSite] = field(default_factory=list[ErrorSite])
    counts: Counter[str] = field(default_factory=Counter[str])


class ErringTurnFinder:
    """A finder of erring turns in the rollouts of one tokenizer and chat template."""

    def __init__(self, renderer: Renderer, options: RolloutOptions | None = None) -> None:
        self.renderer, self.options = renderer, options or RolloutOptions()
        self._error_finder = RolloutErrorFinder(renderer, self.options)

    def find(self, rollout: Rollout) -> ErringTurns:
        """Return every failed call in the rollout, and the turns that channel 2 may train on, each with its hint.

        A site is trained on if the failure is the model's fault (`is_kept`), and a hint can be written and placed.
        """
        errors = self._error_finder.find(rollout)
        erring = ErringTurns(errors.sequence, sites=errors.sites)
        counts = erring.counts
        counts.update(rollouts=1, turns=errors.num_turns, sites=len(errors.sites))
        for site in errors.sites:
            if not site.is_kept:
                counts["not_taught:" + site.reason.partition(":")[0]] += 1
                continue
            if site.kind in self.options.unhinted_kinds:
                counts["not_taught:unhinted_kind"] += 1
                continue
            hint = self._error_finder.write_hint(site, errors.conversation, rollout)
            turn = self.place_hint(errors.sequence, site.turn_id, hint) if hint else NO_HINT
            if hint is None or isinstance(turn, str):
                counts[f"dropped:{turn}"] += 1
                continue
            counts["kind:" + site.kind] += 1
            # The call cannot be separated in this turn, so the whole turn is trained on; the count reports it.
            if self.options.part == "call" and turn.is_whole:
                counts["whole_turn_without_call"] += 1
            ids, start = torch.tensor(turn.ids), turn.teacher_start
            erring.turns.append(ErringTurn(turn.start, turn.end, ids, start, site.kind, hint, site.turn_id))
        return erring

    def place_hint(self, sequence: RenderedSequence, turn_id: str, hint: str) -> HintedTurn | str:
        """Return the turn in its context with a hint inserted, or the reason why no hint can be inserted there.

        The hint is a separate message between the last message before the turn and the turn's header, or at one of the
        other places in `options.placement`. All other ids of the context are those of the rollout.
        """
        span = next((candidate for candidate in sequence.spans if candidate.turn_id == turn_id), None)
        if span is None:
            return "no_header_before_turn"
        options = self.options
        turn = hinted_turn(self.renderer, sequence, span, hint, placement=options.placement, part=options.part)
        limit = options.max_teacher_length
        is_too_long = not isinstance(turn, str) and limit is not None and len(turn.context.ids) > limit
        return "teacher_context_too_long" if is_too_long else turn


# ---- Alignment: student rows and teacher rows that predict the same tokens -------------------------------------------


class TurnRows(NamedTuple):
    """The N positions in a padded micro-batch that predict tokens of erring turns, with the matching rows of the tree.

    A token is predicted at the position before it. The tree stores what contexts share only once. M of the N positions
    are in turns with an unrelated hint: `compared_M` has their indices, the other two their rows in the tree.
    """

    sample_N: Tensor
    position_N: Tensor
    tokens_N: Tensor
    """The tokens that these rows predict."""
    index_N: Tensor
    """The index of each token in its turn."""
    tree: TokenTree
    hinted_N: Tensor
    compared_M: Tensor
    unrelated_M: Tensor
    unhinted_M: Tensor
    num_without_unrelated: int


def place_turns(
    turns: Sequence[Sequence[ErringTurn]], prompt_mask: Tensor, input_ids: Tensor, completion_mask: Tensor | None = None
) -> TurnRows | None:
    """Return the positions of each sample's turns in the left-padded batch, or None if there are no turns.

    Raises AlignmentError if student and teacher rows predict different tokens, as after a shuffle.
    """
    flat = [(sample, turn) for sample, sample_turns in enumerate(turns) for turn in sample_turns]
    if not flat:
        return None
    device = input_ids.device
    padding = (prompt_mask.shape[1] - prompt_mask.sum(1)).tolist()  # where each sample's prompt begins
    sizes = [turn.end - turn.start for _, turn in flat]
    # - 1, because a row predicts the next token.
    begins = [padding[sample] + turn.start - 1 for sample, turn in flat]
    sample_N = torch.cat([torch.full((size,), sample) for (sample, _), size in zip(flat, sizes, strict=True)])
    position_N = torch.cat([torch.arange(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)])
    first, last, width = int(position_N.min()), int(position_N.max()), input_ids.shape[1]
    if last + 1 >= width or first < 0:
        got = f"rows {first} to {last} of {width}"
        raise AlignmentError(explain("erring turns in the batch", got=got, expected=f"rows 0 to {width - 2}"))
    sample_N, position_N = sample_N.to(device), position_N.to(device)
    if completion_mask is not None:
        mask_N = torch.cat([prompt_mask, completion_mask], 1)[sample_N, position_N]
        if not bool(mask_N.all()):
            got = f"{int((mask_N == 0).sum())} rows excluded by the attention mask"
            raise AlignmentError(explain("erring turns in the batch", got=got, expected="only unmasked rows"))
    tokens_N = input_ids[sample_N, position_N + 1]

    # The contexts as (number of the turn, ids, start of the turn's tokens): first each turn after its own hint, then
    # each turn with an unrelated hint twice, after that hint and without a hint. On the CPU, where trees are built.
    rows, compared = input_ids.cpu(), [number for number, (_, turn) in enumerate(flat) if turn.wrong_ids is not None]
    contexts = [(number, turn.teacher_ids.cpu(), turn.teacher_start) for number, (_, turn) in enumerate(flat)]
    for number in compared:
        sample, turn = flat[number]
        assert turn.wrong_ids is not None
        contexts.append((number, turn.wrong_ids.cpu(), turn.wrong_start))
        contexts.append((number, rows[sample, padding[sample] : padding[sample] + turn.end], turn.start))
    tree = build_tree([ids for _, ids, _ in contexts]).to(device)
    turn_tokens, tree_rows = tokens_N.cpu().split(sizes), list[Tensor]()
    for index, (number, ids, start) in enumerate(contexts):
        end = start + sizes[number]
        if not torch.equal(ids[start:end], turn_tokens[number]):
            got = f"turn {flat[number][1].turn_id} with other tokens than in the batch"
            fix = "Reorder the batch together with its sites."
            raise AlignmentError(explain("erring turns in the batch", got=got, expected="the same tokens", fix=fix))
        tree_rows.append(tree.rows[index][start - 1 : end - 1])

    none = torch.empty(0, dtype=torch.int64, device=device)
    index_N = torch.cat([torch.arange(size) for size in sizes]).to(device)
    row_numbers = torch.arange(len(index_N), device=device).split(sizes)
    return TurnRows(
        sample_N,
        position_N,
        tokens_N,
        index_N,
        tree,
        hinted_N=torch.cat(tree_rows[: len(flat)]),
        compared_M=torch.cat([none, *(row_numbers[number] for number in compared)]),
        unrelated_M=torch.cat([none, *tree_rows[len(flat) :: 2]]),
        unhinted_M=torch.cat([none, *tree_rows[len(flat) + 1 :: 2]]),
        num_without_unrelated=len(flat) - len(compared),
    )


class ImportanceSampling(NamedTuple):
    """The data for importance weights: log-probs and temperature at sampling time, and the maximum weight."""

    old_logprobs_BC: Tensor
    temperature: float
    clip: float

    def weights(self, head: LinearHead, student_NH: Tensor, rows: TurnRows, width: int) -> Tensor:
        """Return the importance weight min(clip, p now / p at sampling time) of each token, without gradient."""
        tempered = replace(head, scale=head.scale / self.temperature)
        now_N = linear_token_logprobs(student_NH.detach(), tempered.detached(), rows.tokens_N)
        # A row predicts the token after it; the log-probs start at the first token of the completion.
        completion = rows.position_N + 1 - (width - self.old_logprobs_BC.shape[1])
        then_N = self.old_logprobs_BC[rows.sample_N, completion]
        # Clamp before exp(), which would overflow for large differences.
        return (now_N - then_N).clamp(-20.0, 20.0).exp().clamp(max=self.clip)


# ---- The loss: teachers first, then the student inside GRPO's forward pass -------------------------------------------


def distill(
    model: nn.Module,
    input_ids: Tensor,
    rows: TurnRows | None,
    options: ChannelOptions,
    run_policy: Callable[[], T],
    importance: ImportanceSampling | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[T, Channel | None, Tensor | None]:
    """Run the hinted teachers, then the policy, and compute channel 2 from the policy's own hidden states.

    `run_policy` must run the model's body exactly once, on `input_ids`. Returns its result; the channel, whose `value`
    is the sum over the rows divided by `options.divide`, or None without rows; and the effects of both hints on each
    turn that has both, (T, 2) in nats/token, or None.
    """
    # The policy's forward pass runs under autocast, so the teachers must as well.
    with autocast():
        teachers, targets, effects = _run_teachers(model, input_ids, rows, options)

    def channel_of(hidden_BTH: Tensor) -> Channel | None:
        if rows is None:
            return None
        head = get_linear_head(model, rows.tree.input_ids[None])
        student_NH = cast_to_head_dtype(hidden_BTH[rows.sample_N, rows.position_N], head)
        weighted = targets
        if importance is not None:
            weighted = targets._replace(importance_N=importance.weights(head, student_NH, rows, hidden_BTH.shape[1]))
        return hint_channel(head, student_NH, teachers, options, weighted)

    policy, channel = _run_and_compute(model, run_policy, channel_of, tuple(input_ids.shape))
    return policy, channel, effects


def _run_teachers(
    model: nn.Module, input_ids: Tensor, rows: TurnRows | None, options: ChannelOptions
) -> tuple[list[Any], HintTargets, Tensor | None]:
    """Return the teachers' hidden states for the turns' tokens, the loss's other inputs, and the hints' effects."""
    # Processes that share sharded weights must make the same passes, so all run the teachers if any has a turn.
    (is_needed,) = max_over_shards(all_models(model, options.teachers), [int(rows is not None)])
    if not is_needed:
        return [], HintTargets(), None
    # A process without turns runs them over a tree of two tokens.
    tree = build_tree([[0, 0]]).to(input_ids.device) if rows is None else rows.tree
    numbers = [input_ids.new_empty(0)] * 3 if rows is None else [rows.hinted_N, rows.unrelated_M, rows.unhinted_M]
    hinted, unrelated, unhinted = rows_by_part(model, options.teachers, [(tree, part) for part in numbers])
    if rows is None:
        return [], HintTargets(), None
    contrast = Contrast(rows.compared_M, unrelated, unhinted)
    # The hints' effects are always measured, but the loss uses the unrelated hint only if the contrast is on.
    used_contrast = contrast if options.contrasts else None
    targets = HintTargets(rows.tokens_N, rows.index_N, used_contrast, rows.num_without_unrelated)
    effects = hint_effects(hinted, contrast, rows.tokens_N, rows.index_N) if rows.compared_M.numel() else None
    return hinted, targets, effects


def _run_and_compute(
    model: nn.Module, run_policy: Callable[[], T], compute: Callable[[Tensor], Any], shape: tuple[int, ...]
) -> tuple[T, Any]:
    """Run the policy, call `compute` with its last hidden states, and return the results of both.

    `compute` runs in a forward hook, because FSDP2 gathers the weights of the head only for the forward pass.
    """
    results: list[tuple[tuple[int, ...], Any]] = []
    is_computing = False

    def hook(_body: nn.Module, _inputs: object, output: Any) -> None:
        nonlocal is_computing
        if is_computing:  # the first call of `get_linear_head` for a model runs its body too
            return
        if results:
            fix = "Run the policy on the whole micro-batch at once."
            raise InputError(explain("policy passes in one loss", got="two or more", expected="exactly one", fix=fix))
        hidden_BTH: Tensor = output.last_hidden_state
        is_computing = True
        try:
            results.append((tuple(hidden_BTH.shape[:2]), compute(hidden_BTH)))
        finally:
            is_computing = False

    handle = get_body(get_causal_lm(model)).register_forward_hook(hook)
    try:
        policy = run_policy()
    finally:
        handle.remove()
    if not results or results[0][0] != shape:
        got = f"shape {results[0][0]}" if results else "no pass"
        raise AlignmentError(explain("hidden states of the policy", got=got, expected=f"shape {shape}"))
    return policy, results[0][1]


# ---- The term in GRPO's total ----------------------------------------------------------------------------------------


class MicroStep(NamedTuple):
    """A micro-step's position in a run. `accumulation` is the number of micro-steps per optimizer step and process."""

    num_finished_steps: int
    total_steps: int
    accumulation: int
    num_processes: int
    steps_per_generation: int
    """Micro-steps that train on the rollouts of one generation, on one process."""
    is_training: bool
    temperature: float = 1.0
    is_first_pass: bool = True
    """Whether this is the first pass over these rollouts (`num_iterations` may be above 1)."""


class ChannelTerm(NamedTuple):
    """A channel's weighted share of a micro-step's loss, and its mean and item count over all processes."""

    loss: Tensor
    mean: float
    items: float


class HintDistillation:
    """Channel 2 on the rollouts of one run.

    Args:
        settings: The divergence, alpha and its annealing, and the maximum importance weight.
        teachers: Returns the models of the teacher with their coefficients c_k; None is the policy itself.
        taid_t: Returns TAID's share of the teacher in its target, or None if `sdpo_wrapper` is not "taid".
        weighting: Weights of single tokens, and the contrast with an unrelated hint.
        hint_gate: The gate that switches the channel on once the policy reacts to hints; None if it is always on.
        sum_over: Sums a tensor over all processes.
        autocast: The precision in which the trainer runs the policy.
    """

    def __init__(
        self,
        settings: ChannelSettings,
        *,
        teachers: Callable[[], Sequence[WeightedTeacher] | None],
        taid_t: Callable[[MicroStep], float | None],
        weighting: RowWeighting | None,
        hint_gate: HintGate | None,
        sum_over: Callable[[Tensor], Tensor],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.settings, self.hint_gate = settings, hint_gate
        self._teachers, self._taid_t, self._weighting = teachers, taid_t, weighting
        self._sum_over, self._autocast = sum_over, autocast

    def alpha(self, micro_step: MicroStep) -> float:
        """Return channel 2's weight on rollouts: 0 while the gate is closed, except in evaluations."""
        is_off = self.hint_gate is not None and not self.hint_gate.is_open and micro_step.is_training
        return 0.0 if is_off else self.settings.alpha_at(micro_step.num_finished_steps, micro_step.total_steps)

    def policy_and_term(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        micro_step: MicroStep,
        run_policy: Callable[[], Tensor],
    ) -> tuple[Tensor, ChannelTerm | None]:
        """Return GRPO's loss, which `run_policy` computes, and channel 2's term for the same forward pass.

        The term is None if no rollout in this generation has an erring turn, on any process.
        """
        turns: list[list[ErringTurn]] = inputs[SITES]
        num_tokens = float(inputs[ITEMS])
        if not num_tokens:
            return run_policy(), None
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        # `num_tokens` is for a whole generation, of which an optimizer step trains on only a share. DDP averages the
        # gradients over the processes, so each divides by its part of the tokens. TRL's loss and this one are then sums
        # over micro-steps.
        share = micro_step.accumulation / micro_step.steps_per_generation if micro_step.is_training else 1.0
        options = channel_options(
            model,
            self.settings,
            taid_t=self._taid_t(micro_step),
            denominators={"sdpo_jsd": num_tokens * share / micro_step.num_processes},
            sdpo_teachers=self._teachers(),
            sdpo_weighting=self._weighting,
        )
        rows = place_turns(turns, inputs["prompt_mask"], input_ids, inputs["completion_mask"])
        # TRL stores the log-probs of sampling only if the policy has changed since.
        old_logprobs, clip = inputs.get("old_per_token_logps"), self.settings.sdpo_is_clip
        importance = None
        if old_logprobs is not None and clip is not None:
            importance = ImportanceSampling(old_logprobs, micro_step.temperature, clip)
        loss, channel, effects = distill(model, input_ids, rows, options, run_policy, importance, self._autocast)
        # Later passes over the same rollouts would count the same comparisons again.
        if self.hint_gate is not None and effects is not None and micro_step.is_training and micro_step.is_first_pass:
            self.hint_gate.add(_comparisons(turns, inputs, effects))
        term = loss.new_zeros(()) if channel is None else self.alpha(micro_step) * channel.value
        # Sums and counts are reduced, since a mean of per-process means would weight tokens unequally.
        items = 0 if channel is None else channel.items
        local_sum = 0.0 if channel is None else float(channel.value.detach()) * options.divide.of("sdpo_jsd", items)
        total, count = self._sum_over(torch.tensor([local_sum, float(items)], device=loss.device)).tolist()
        return loss, ChannelTerm(term, total / count if count else 0.0, count)


def _comparisons(
    turns: Sequence[Sequence[ErringTurn]], inputs: Mapping[str, Any], effects_T2: Tensor
) -> list[HintComparison]:
    """Return a comparison for each turn that was scored after two hints, in the order of the rows of `effects_T2`."""
    comparisons: list[HintComparison] = []
    effects = iter(effects_T2.tolist())
    for sample, sample_turns in enumerate(turns):
        prompt_ids = inputs["prompt_ids"][sample][inputs["prompt_mask"][sample].bool()].tolist()
        # A checksum instead of an index, so that a prompt gets the same number on every process and in every step.
        prompt = zlib.crc32(repr(prompt_ids).encode())
        compared = [turn for turn in sample_turns if turn.wrong_ids is not None]
        comparisons += [HintComparison(prompt, turn.kind_of_hint, turn.wrong_kind, *next(effects)) for turn in compared]
    return comparisons
