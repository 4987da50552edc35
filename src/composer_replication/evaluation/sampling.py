"""Sample actions from each model at held-out states: before an error, and before a good call of the same session.

All samples at a state share its prompt, and every model gets the same random seed. Samples are stored as soon as they
are generated, so that an interrupted evaluation can resume. Then each sample is parsed, and the judge predicts from the
session up to this state whether the call would fail. The sample is also compared with the logged action and with the
correction in the session.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from composer_replication.action_text import parse_reply
from composer_replication.batch.render.renderer import Renderer, TurnSpan
from composer_replication.config.sections import EvaluationConfig
from composer_replication.errors import InputError
from composer_replication.evaluation.figures import Value
from composer_replication.evaluation.scored_calls import ScoredDecision, ScoreJournal, SiteDecisions, digest_of
from composer_replication.evaluation.vllm_sampling import ArmEngine
from composer_replication.runs.files import ToolTable
from composer_replication.sites.actions.equality import ActionContext, action_kind, is_read_only_call, same_action
from composer_replication.sites.judge.judge import Judge, Judgement
from composer_replication.sites.judge.judged_calls import judged_calls
from composer_replication.sites.judge.project_files import EarlierSessions
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.sessions.phases import Phase, report_phase
from composer_replication.types import Action, Turn

if TYPE_CHECKING:
    from composer_replication.evaluation.scored_calls import HeldOut, HeldOutSession


Sort = Literal["erring", "good"]
# Limits of a batch: its states, and the tokens of its longest prompt times its number of samples.
_MAX_BATCH_STATES, _MAX_BATCH_TOKENS = 8, 131_072


class State(NamedTuple):
    """A state of a held-out session, with the tokens of the prompt that a model is asked to continue."""

    id: str
    conversation_id: str
    session: str
    turn: int
    turn_id: str
    sort: Sort
    site_id: str
    kind: str | None
    prompt: list[int]

    @property
    def key(self) -> tuple[str, str, Sort]:
        """An id of the state that does not depend on the tokenizer."""
        return self.conversation_id, self.turn_id, self.sort


class SampledText(NamedTuple):
    """One sample: its text, its length in tokens, and whether the model ended the turn within its token limit."""

    text: str
    num_tokens: int
    has_ended: bool


def select_states(held_out: HeldOut, sites: Sequence[SiteDecisions], max_states: int, context: int) -> list[State]:
    """Return up to `max_states` states before errors and as many before good calls, round-robin over sessions."""
    spans = {
        (rendered.conversation_id, span.turn_id): (sequence.ids, span)
        for rendered in (session.rendered for session in held_out.sessions)
        for sequence in rendered.sequences
        for span in sequence.spans
    }
    states: dict[Sort, dict[tuple[str, str], State]] = {"erring": {}, "good": {}}
    for site in _round_robin(sites):
        decisions: dict[Sort, ScoredDecision] = {
            "erring": site.decisions[0],
            "good": next(decision for decision in site.decisions if decision.role == "good"),
        }
        for sort, decision in decisions.items():
            turn_key = (decision.conversation_id, decision.turn_id)
            if turn_key in spans and turn_key not in states[sort] and len(states[sort]) < max_states:
                states[sort][turn_key] = _make_state(site, sort, decision, *spans[turn_key], context)
    return [*states["erring"].values(), *states["good"].values()]


def _round_robin(sites: Sequence[SiteDecisions]) -> Iterator[SiteDecisions]:
    """Yield the first site of each session, then the second of each, and so on."""
    by_session: dict[str, list[SiteDecisions]] = {}
    for site in sites:
        by_session.setdefault(site.session, []).append(site)
    for at in range(max(map(len, by_session.values()), default=0)):
        yield from (session_sites[at] for session_sites in by_session.values() if at < len(session_sites))


def _make_state(
    site: SiteDecisions, sort: Sort, decision: ScoredDecision, ids: list[int], span: TurnSpan, context: int
) -> State:
    prompt = ids[max(0, span.header_start - context) : span.start]
    kind = site.kind if sort == "erring" else None
    return State(
        id=f"{site.site_id}:{sort}",
        conversation_id=decision.conversation_id,
        session=site.session,
        turn=decision.turn,
        turn_id=decision.turn_id,
        sort=sort,
        site_id=site.site_id,
        kind=kind,
        prompt=prompt,
    )


def sample_actions(
    model: Any,
    weights: str,
    renderer: Renderer,
    states: Sequence[State],
    section: EvaluationConfig,
    journal: ScoreJournal,
    arm: str,
    engine: ArmEngine | None = None,
) -> list[list[SampledText]]:
    """Return the samples at every state, generated by `engine` (vLLM), or by `model` if there is no engine.

    Samples that `journal` has for the same weights, settings and prompts are reused.
    """
    num_samples = _num_samples(section)
    make_sampler = _TransformersSampler if engine is None else partial(_VllmSampler, engine)
    sampler = make_sampler(model, renderer, section, num_samples)
    settings = f"{weights}:drawn:{num_samples}:{section.temperature}:{section.new_tokens}:{section.seed}:{sampler.name}"
    samples: list[list[SampledText]] = []
    phase = Phase(name=f"drawn actions, {arm}", done=0, total=len(states), items="states", stored_in=journal.path)
    for batch in _batches(states, num_samples, sampler.max_batch_states):
        report_phase(replace(phase, done=len(samples)))
        key = f"{settings}:{digest_of([(state.prompt, 0) for state in batch])}"
        if (rows := journal.get(key)) is None:
            batch_samples = sampler([state.prompt for state in batch])
            rows = journal.put(key, [[list(sample) for sample in state_samples] for state_samples in batch_samples])
        samples += [[SampledText(*row) for row in state_rows] for state_rows in rows]
    report_phase(replace(phase, done=len(samples)))
    return samples


def _num_samples(section: EvaluationConfig) -> int:
    # At temperature 0 every sample is the same text.
    return section.samples if section.temperature else min(1, section.samples)


def _batches(states: Sequence[State], num_samples: int, max_states: int) -> Iterator[list[State]]:
    batch: list[State] = []
    for state in states:
        # Prompts are padded to the longest, so a batch costs its longest prompt times its rows.
        longest = max(len(candidate.prompt) for candidate in (*batch, state))
        if batch and (len(batch) == max_states or (len(batch) + 1) * num_samples * longest > _MAX_BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(state)
    if batch:
        yield batch


class _TurnDecoder:
    """Base class of the samplers, which decodes generated tokens up to the first token that ends the turn."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        eos_id: Any = renderer.tokenizer.eos_token_id
        # A template may end a turn with a token other than the tokenizer's eos_token.
        ends = [renderer.protected.ids[stop] for stop in renderer.dialect.stops]
        self._stops: list[int] = sorted({*ends, *([] if eos_id is None else [int(eos_id)])})

    def _decode(self, ids: list[int], has_ended: bool = False) -> SampledText:
        end = next((at for at, token in enumerate(ids) if token in self._stops), None)
        text = self._renderer.tokenizer.decode(ids[:end], skip_special_tokens=False)
        return SampledText(str(text), len(ids) if end is None else end, has_ended or end is not None)


class _VllmSampler(_TurnDecoder):
    """Samples with vLLM, with the same settings as `_TransformersSampler`."""

    name = "vllm"

    def __init__(
        self, engine: ArmEngine, _model: Any, renderer: Renderer, section: EvaluationConfig, num_samples: int
    ) -> None:
        super().__init__(renderer)
        self._seed, self.max_batch_states = section.seed, engine.max_batch_states
        self._sample = engine.make_sampler(self._stops, num_samples, section.new_tokens, section.temperature)

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[SampledText]]:
        samples = self._sample(prompts, _batch_seed(prompts, self._seed))
        return [[self._decode(*sample) for sample in prompt_samples] for prompt_samples in samples]


class _TransformersSampler(_TurnDecoder):
    """Samples with transformers: plain temperature sampling that ignores the model's own generation config."""

    name = "transformers"

    def __init__(self, model: Any, renderer: Renderer, section: EvaluationConfig, num_samples: int) -> None:
        from transformers import GenerationConfig

        super().__init__(renderer)
        self._model, self._num_samples, self._seed = model, num_samples, section.seed
        self.max_batch_states = _MAX_BATCH_STATES
        sampling = {"do_sample": True, "temperature": section.temperature, "top_k": 0, "top_p": 1.0}
        self._config = GenerationConfig(
            **(sampling if section.temperature else {"do_sample": False}),
            repetition_penalty=1.0,
            max_new_tokens=section.new_tokens,
            eos_token_id=self._stops,
            pad_token_id=self._stops[0] if self._stops else 0,
        )
        self._generate: Callable[..., torch.Tensor] = RolloutGenerator().generate

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[SampledText]]:
        rows = [prompt for prompt in prompts for _ in range(self._num_samples)]
        width = max(map(len, rows))
        pad = int(self._config.pad_token_id or 0)
        device = next(self._model.parameters()).device
        # Left padding: generation continues at the right end of every row.
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        torch.manual_seed(_batch_seed(prompts, self._seed))
        sequences = self._generate(self._model, input_ids=ids, attention_mask=mask, generation_config=self._config)
        samples = [self._decode(row[width:]) for row in sequences.tolist()]
        return [samples[at : at + self._num_samples] for at in range(0, len(samples), self._num_samples)]


def _batch_seed(prompts: Sequence[list[int]], seed: int) -> int:
    """Return a random seed derived from the prompts, so that it does not depend on the model or the order of
    batches.
    """
    digest = hashlib.sha256(f"{seed}:{digest_of([(prompt, 0) for prompt in prompts])}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


# ---- samples as rows

Samples = Mapping[str, Sequence[Sequence[SampledText]]]
"""By arm: the samples at each state."""
# How the chat templates of several model families begin a call; a text that contains one was meant as a call.
_CALL_PREFIXES = ("<tool_call>", "[TOOL_USE]", "<function", "<|python_tag|>")
# The worst of the judgements on the calls of one turn is the turn's.
_WORST_FIRST = ("fails", "risky", "unknown", "ok")
# Rules for samples without a call to judge.
UNPARSED, CUT_OFF, NO_CALL = "unparsed", "cut_off", "no_call"
# Rules for calls that a harness cannot run. They count as failures; a model that wrote nothing else would look good.
_UNREADABLE = (UNPARSED, CUT_OFF)


class _ParsedSample(NamedTuple):
    """A parsed sample: the action if it could be parsed, and, if there is no call to judge, the rule that applies."""

    action: Action | None
    rule: str


def sampled_rows(
    held_out: HeldOut,
    tools: ToolTable,
    states: Sequence[State],
    samples: Samples,
    earlier: EarlierSessions | None = None,
) -> list[dict[str, Any]]:
    """Return one row per sample, ordered by state, arm and sample.

    `earlier` holds what earlier sessions reveal about the project: those that ended before the held-out session began.
    These may belong to any part of the split, because the judge does not learn from them.
    """
    state_numbers: dict[tuple[str, str], list[int]] = {}
    for number, state in enumerate(states):
        state_numbers.setdefault((state.conversation_id, state.turn_id), []).append(number)
    conversation_ids = {conversation for conversation, _ in state_numbers}
    rows: dict[int, list[dict[str, Any]]] = {}
    for session in held_out.sessions:
        if session.conversation.id not in conversation_ids:
            continue
        for turn, judge in _turns_with_judge(session, earlier):
            for number in state_numbers.get((session.conversation.id, turn.id), ()):
                comparison = _StateComparison(session, tools, states[number], turn, judge)
                rows[number] = [
                    comparison.row(arm, at, sample)
                    for arm, arm_samples in samples.items()
                    for at, sample in enumerate(arm_samples[number])
                ]
    return [row for number in sorted(rows) for row in rows[number]]


def _turns_with_judge(session: HeldOutSession, earlier: EarlierSessions | None) -> Iterator[tuple[Turn, Judge]]:
    """Yield each turn that has calls, with the judge as it was before the turn."""
    failures = {site.call_id: site for site, _ in session.logged.sites}
    project, turn_id = None if earlier is None else earlier.before(session.conversation), ""
    for judged in judged_calls(session.conversation, sites=failures, project=project):
        if judged.turn.id != turn_id:
            turn_id = judged.turn.id
            yield judged.turn, judged.judge


class _StateComparison:
    """Compares the actions sampled at one state with the logged action and the correction, and asks the judge about
    them.
    """

    def __init__(self, session: HeldOutSession, tools: ToolTable, state: State, turn: Turn, judge: Judge) -> None:
        conversation = session.conversation
        self._state, self._turn, self._judge = state, turn, judge
        self._schemas = tools.schemas(conversation.format)
        self._context = ActionContext(
            cwd=conversation.cwd,
            tools=self._schemas,
            files=judge.state.files,
            may_have_left_cwd=judge.state.may_have_left_cwd,
        )
        # At good states the logged action is the right one.
        right_call = session.logged.corrections.get(state.site_id) if state.sort == "erring" else None
        self._correction = None if right_call is None else Action(text="", calls=(right_call,))

    def row(self, arm: str, at: int, sample: SampledText) -> dict[str, Any]:
        action, rule = _parse(sample)
        calls = () if action is None else action.calls
        # A log without a list of tools cannot tell an unknown tool from a rarely used one.
        is_known = all(call.name in self._schemas for call in calls) if self._schemas else True
        judgement = self._judge_action(action, rule, is_known)
        state = self._state
        return {
            "id": f"{state.id}:{arm}:{at}",
            "conversation_id": state.conversation_id,
            "session": state.session,
            "turn": state.turn,
            "turn_id": state.turn_id,
            "site_id": state.site_id,
            "state": state.sort,
            "arm": arm,
            "sample": at,
            "text": sample.text,
            "action": None if action is None else _action_as_json(action),
            "tool": action_kind(action) if calls and action is not None else None,
            "parsed": action is not None,
            "known_tool": is_known,
            "only_looks": bool(calls) and all(map(is_read_only_call, calls)),
            "verdict": judgement.says,
            "rule": judgement.rule,
            "kind": judgement.kind or None,
            "same_as_logged": action is not None and same_action(action, self._turn.action, self._context),
            "same_as_correction": self._matches_correction(action),
            "tokens": sample.num_tokens,
        }

    def _judge_action(self, action: Action | None, rule: str, is_known: bool) -> Judgement:
        if action is None or not action.calls:
            return Judgement("unknown", rule)
        if not is_known:
            return Judgement("fails", "unknown_tool", "tool_not_found", "no tool of this name is there")
        # Every call is judged in the state before the turn, because none of them has run.
        verdicts = [self._judge.verdict(call) for call in action.calls]
        return min(verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.says))

    def _matches_correction(self, action: Action | None) -> bool | None:
        if self._correction is None:
            return None
        return action is not None and same_action(action, self._correction, self._context)


def _parse(sample: SampledText) -> _ParsedSample:
    """Parse a sample.

    Text that begins a call but contains no complete one counts as unparsed, or as cut off if the turn did not end.
    """
    try:
        action = parse_reply(sample.text)
    except InputError:
        return _ParsedSample(None, UNPARSED)
    if action.calls:
        return _ParsedSample(action, "")
    if any(prefix in sample.text for prefix in _CALL_PREFIXES):
        return _ParsedSample(None, UNPARSED if sample.has_ended else CUT_OFF)
    return _ParsedSample(action, NO_CALL)


def _action_as_json(action: Action) -> dict[str, Any]:
    calls = [
        {"name": call.name, "arguments": dict(call.arguments), "raw_arguments": call.raw_arguments}
        for call in action.calls
    ]
    return {"text": action.text, "calls": calls}


# ---- metrics of the samples


def _per_1000_with_rule(*rules: str) -> Any:
    return lambda row: 1000.0 * (row["rule"] in rules)


_MEASURES: Mapping[str, Any] = {
    "sampled_failures": lambda row: 1000.0 * (row["verdict"] == "fails" or row["rule"] in _UNREADABLE),
    "sampled_unparsed": _per_1000_with_rule(*_UNREADABLE),
    "sampled_no_call": _per_1000_with_rule(NO_CALL),
    "sampled_unknown_tool": _per_1000_with_rule("unknown_tool"),
    "sampled_agreement": lambda row: 1000.0 * row["same_as_logged"] if row["state"] == "good" else None,
    "sampled_corrected": lambda row: None if row["same_as_correction"] is None else 1000.0 * row["same_as_correction"],
    "sampled_looks": lambda row: 1000.0 * row["only_looks"],
    "sampled_length": lambda row: float(row["tokens"]),
}


def sampled_values(rows: Sequence[Mapping[str, Any]], states: Sequence[State]) -> dict[str, list[Value]]:
    """Return, for each metric, one value per state: each arm's mean over its samples minus the mean before training."""
    kinds = {(state.conversation_id, state.turn_id, state.sort): state.kind for state in states}
    by_state: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        state_key = (row["conversation_id"], row["turn_id"], row["state"])
        by_state.setdefault(state_key, {}).setdefault(row["arm"], []).append(row)
    values: dict[str, list[Value]] = {name: [] for name in _MEASURES}
    for state_key, arms in by_state.items():
        session = arms["before"][0]["session"]
        for name, measure in _MEASURES.items():
            means = {arm: _mean(measure, arm_rows) for arm, arm_rows in arms.items()}
            # A metric that is undefined at a state, such as agreement at an error, has no value there.
            if all(mean is not None for mean in means.values()):
                change = {arm: mean - means["before"] for arm, mean in means.items() if arm != "before"}
                values[name].append(Value(session, kinds[state_key], change))
    return values


def _mean(measure: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    values = [value for value in map(measure, rows) if value is not None]
    return fmean(values) if values else None


def sampled_summary(
    rows: Sequence[Mapping[str, Any]], states: Sequence[State], samples: Samples, section: EvaluationConfig
) -> dict[str, Any]:
    """Return the record's `sampled`: for each arm, the means, the counts of the judge's verdicts, and the counts of
    tools.
    """
    by_arm = {arm: _arm_summary([row for row in rows if row["arm"] == arm]) for arm in samples}
    settings = {"n_samples": _num_samples(section), "temperature": section.temperature}
    return {"n_states": len(states), **settings, "by_arm": by_arm}


def _arm_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name.removeprefix("sampled_"): _mean(measure, rows) for name, measure in _MEASURES.items()}
    tools = Counter(row["tool"] or row["rule"] for row in rows)
    return {
        **means,
        "cut_off": _mean(_per_1000_with_rule(CUT_OFF), rows),
        "verdicts": dict(sorted(Counter(row["verdict"] for row in rows).items())),
        "calls": dict(sorted(tools.items(), key=lambda entry: (-entry[1], entry[0]))),
        "rows": len(rows),
    }
