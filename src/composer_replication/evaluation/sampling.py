"""Sample actions from each model at held-out states: before an error, and before a good call of the same session.

All samples at a state share its prompt, and every model gets the same random seed. Samples are stored as they are
generated, so that an interrupted evaluation resumes. Then each is parsed, judged by what the session had shown until
then, and compared with the logged action and with the correction.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from composer_replication.action_text import parse_reply
from composer_replication.batch.render.renderer import Renderer, TurnSpan
from composer_replication.config.sections import EvaluationConfig
from composer_replication.errors import InputError
from composer_replication.evaluation.decisions import ScoreJournal, SiteDecisions, digest_of
from composer_replication.evaluation.figures import Value
from composer_replication.evaluation.vllm_sampling import ArmEngine
from composer_replication.runs.files import ToolTable
from composer_replication.sites.actions.equality import ActionContext, action_kind, only_looks_at, same_action
from composer_replication.sites.judge.checkout import EarlierSessions
from composer_replication.sites.judge.judge import Judge, Judgement
from composer_replication.sites.judge.walk import judged_calls
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.sessions.phases import Phase, report_phase
from composer_replication.types import Action, Turn

if TYPE_CHECKING:
    from composer_replication.evaluation.decisions import HeldOut, HeldOutSession


Sort = Literal["erring", "good"]
_MOST_AT_ONCE, _MOST_TOKENS = 8, 131_072
"""At most this many states, and tokens (longest prompt times samples), are generated in one batch."""


class State(NamedTuple):
    """A state of a held-out session: the tokens before a turn, from which a model is asked to continue."""

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
    def place(self) -> tuple[str, str, Sort]:
        """The state's identity without its tokens: the same for models with different tokenizers."""
        return self.conversation_id, self.turn_id, self.sort


class SampledText(NamedTuple):
    """One sample: its text, its length in tokens, and whether the model ended the turn within its token limit."""

    text: str
    num_tokens: int
    has_ended: bool


def states_of(held: HeldOut, sites: Sequence[SiteDecisions], *, most: int, context: int) -> list[State]:
    """Return up to `most` states of each sort, round-robin over sessions: one of every session
    before a second of any.
    """
    spans = {
        (rendered.conversation_id, span.turn_id): (sequence.ids, span)
        for rendered in (session.rendered for session in held.sessions)
        for sequence in rendered.sequences
        for span in sequence.spans
    }
    states: dict[Sort, dict[tuple[str, str], State]] = {"erring": {}, "good": {}}
    for site in _round_robin(sites):
        decisions: dict[Sort, Any] = {
            "erring": site.decided[0],
            "good": next(decision for decision in site.decided if decision.role == "good"),
        }
        for sort, decision in decisions.items():
            turn_key = (decision.conversation_id, decision.turn_id)
            if turn_key in spans and turn_key not in states[sort] and len(states[sort]) < most:
                states[sort][turn_key] = _state(site, sort, decision, *spans[turn_key], context)
    return [*states["erring"].values(), *states["good"].values()]


def _round_robin(sites: Sequence[SiteDecisions]) -> Iterator[SiteDecisions]:
    """Yield the first site of each session, then the second of each, and so on."""
    by_session: dict[str, list[SiteDecisions]] = {}
    for site in sites:
        by_session.setdefault(site.session, []).append(site)
    for at in range(max(map(len, by_session.values()), default=0)):
        yield from (several[at] for several in by_session.values() if at < len(several))


def _state(site: SiteDecisions, sort: Sort, call: Any, ids: list[int], span: TurnSpan, context: int) -> State:
    prompt = ids[max(0, span.header_start - context) : span.start]
    kind = site.kind if sort == "erring" else None
    name = f"{site.site_id}:{sort}"
    return State(name, call.conversation_id, site.session, call.turn, call.turn_id, sort, site.site_id, kind, prompt)


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
    """Return the samples of every state, generated by vLLM's `engine` if there is one, otherwise by the model.

    Samples that an earlier call stored for the same weights, settings and prompts are reused.
    """
    number = section.samples if section.temperature else min(1, section.samples)
    draw = (_TransformersSampler if engine is None else partial(_VllmSampler, engine))(model, renderer, section, number)
    settings = f"{weights}:drawn:{number}:{section.temperature}:{section.new_tokens}:{section.seed}:{draw.name}"
    draws: list[list[SampledText]] = []
    for batch in _batches(states, number, draw.most_at_once):
        report_phase(
            Phase(
                name=f"drawn actions, {arm}", done=len(draws), total=len(states), items="states", stored_in=journal.path
            )
        )
        key = f"{settings}:{digest_of([(state.prompt, 0) for state in batch])}"
        kept_rows = journal.get(key)
        rows = (
            kept_rows if kept_rows is not None else journal.put(key, _as_rows(draw([state.prompt for state in batch])))
        )
        draws += [[SampledText(*row) for row in several] for several in rows]
    report_phase(
        Phase(name=f"drawn actions, {arm}", done=len(draws), total=len(states), items="states", stored_in=journal.path)
    )
    return draws


def _as_rows(samples: Sequence[Sequence[SampledText]]) -> list[list[list[Any]]]:
    return [[list(draw) for draw in several] for several in samples]


def _batches(states: Sequence[State], number: int, most: int) -> Iterator[list[State]]:
    batch: list[State] = []
    for state in states:
        # Prompts are padded to the longest, so a batch costs its longest prompt times its rows.
        longest = max(len(candidate.prompt) for candidate in (*batch, state))
        if batch and (len(batch) == most or (len(batch) + 1) * number * longest > _MOST_TOKENS):
            yield batch
            batch = []
        batch.append(state)
    if batch:
        yield batch


class _TurnDecoder:
    """Decodes generated tokens up to the first one that ends the turn."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        own_end: Any = renderer.tokenizer.eos_token_id
        # A template may end a turn with a token other than the tokenizer's eos_token.
        ends = [renderer.protected.ids[stop] for stop in renderer.dialect.stops]
        self._stops: list[int] = sorted({*ends, *([] if own_end is None else [int(own_end)])})

    def _sampled_text(self, ids: list[int], has_ended: bool = False) -> SampledText:
        end = next((at for at, token in enumerate(ids) if token in self._stops), None)
        text = self._renderer.tokenizer.decode(ids[:end], skip_special_tokens=False)
        return SampledText(str(text), len(ids) if end is None else end, has_ended or end is not None)


class _VllmSampler(_TurnDecoder):
    """Samples with vLLM, with the settings of `_TransformersSampler`."""

    name = "vllm"

    def __init__(
        self, engine: ArmEngine, _model: Any, renderer: Renderer, section: EvaluationConfig, number: int
    ) -> None:
        super().__init__(renderer)
        self._seed, self.most_at_once = section.seed, engine.most_at_once
        self._draw = engine.drawer(self._stops, number, section.new_tokens, section.temperature)

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[SampledText]]:
        answers = self._draw(prompts, _batch_seed(prompts, self._seed))
        return [[self._sampled_text(*answer) for answer in several] for several in answers]


class _TransformersSampler(_TurnDecoder):
    """Samples with transformers: plain temperature sampling, whatever generation config the model ships with."""

    name = "transformers"

    def __init__(self, model: Any, renderer: Renderer, section: EvaluationConfig, number: int) -> None:
        from transformers import GenerationConfig

        super().__init__(renderer)
        self._model, self._number, self._seed, self.most_at_once = model, number, section.seed, _MOST_AT_ONCE
        warmth = {"do_sample": True, "temperature": section.temperature, "top_k": 0, "top_p": 1.0}
        self._config = GenerationConfig(
            **(warmth if section.temperature else {"do_sample": False}),
            repetition_penalty=1.0,
            max_new_tokens=section.new_tokens,
            eos_token_id=self._stops,
            pad_token_id=self._stops[0] if self._stops else 0,
        )
        self._generate: Callable[..., torch.Tensor] = RolloutGenerator().generate

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[SampledText]]:
        rows = [prompt for prompt in prompts for _ in range(self._number)]
        width = max(map(len, rows))
        pad = int(self._config.pad_token_id or 0)
        device = next(self._model.parameters()).device
        # Left padding: generation continues at the right end of every row.
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        torch.manual_seed(_batch_seed(prompts, self._seed))
        sequences = self._generate(self._model, input_ids=ids, attention_mask=mask, generation_config=self._config)
        samples = [self._sampled_text(row[width:]) for row in sequences.tolist()]
        return [samples[at : at + self._number] for at in range(0, len(samples), self._number)]


def _batch_seed(prompts: Sequence[list[int]], seed: int) -> int:
    """Return a seed that depends on the prompts only: the same for every model and every order of batches."""
    digest = hashlib.sha256(f"{seed}:{digest_of([(prompt, 0) for prompt in prompts])}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


# ---- samples as rows

Draws = Mapping[str, Sequence[Sequence[SampledText]]]
"""By arm, the samples of each state."""
# How the chat templates of several model families begin a call; text with one was meant as a call.
_CALL_MARKS = ("<tool_call>", "[TOOL_USE]", "<function", "<|python_tag|>")
# The order in which the verdict on several calls of one turn is chosen: the worst counts.
_WORST_FIRST = ("fails", "risky", "unknown", "ok")
# Rules of samples that hold no call to judge.
UNPARSED, CUT_OFF, NO_CALL = "unparsed", "cut_off", "no_call"
_UNREADABLE = (UNPARSED, CUT_OFF)
"""Rules of calls that a harness cannot run. They count as failures; otherwise a model that writes nothing else looks
good."""


class _ParsedSample(NamedTuple):
    """A sample after parsing: its action, or None with the `rule` that says why there is no call to judge."""

    action: Action | None
    rule: str


def sampled_rows(
    held: HeldOut,
    tools: ToolTable,
    states: Sequence[State],
    draws: Draws,
    earlier: EarlierSessions | None = None,
) -> list[dict[str, Any]]:
    """Return one row per sample, in the order of states, arms and samples, in one pass over the sessions.

    `earlier` is what sessions that ended before a held-out one began knew about the project. The judge learns nothing
    from them, so they may be from any part of the split; later sessions are never used.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, state in enumerate(states):
        numbers.setdefault((state.conversation_id, state.turn_id), []).append(number)
    conversation_ids = {conversation for conversation, _ in numbers}
    rows: dict[int, list[dict[str, Any]]] = {}
    for session in held.sessions:
        if session.conversation.id not in conversation_ids:
            continue
        for turn, judge in _turns_with_judge(session, earlier):
            for number in numbers.get((session.conversation.id, turn.id), ()):
                comparison = _StateComparison(session, tools, states[number], turn, judge)
                rows[number] = [
                    comparison.row(arm, at, sample)
                    for arm, every in draws.items()
                    for at, sample in enumerate(every[number])
                ]
    return [row for number in sorted(rows) for row in rows[number]]


def _turns_with_judge(session: HeldOutSession, earlier: EarlierSessions | None) -> Iterator[tuple[Turn, Judge]]:
    """Yield each turn that has calls, with the judge as it was when the model decided on them."""
    failures = {site.call_id: site for site, _ in session.logged.sites}
    project, turn_id = None if earlier is None else earlier.before(session.conversation), ""
    for judged in judged_calls(session.conversation, sites=failures, project=project):
        if judged.turn.id != turn_id:
            turn_id = judged.turn.id
            yield judged.turn, judged.judge


class _StateComparison:
    """One state with everything that a sampled action is compared with."""

    def __init__(self, session: HeldOutSession, tools: ToolTable, state: State, turn: Turn, judge: Judge) -> None:
        conversation = session.conversation
        self._state, self._turn, self._judge = state, turn, judge
        self._schemas = tools.schemas(conversation.format)
        self._context = ActionContext(
            cwd=conversation.cwd,
            tools=self._schemas,
            files=judge.state.files,
            shell_moved=judge.state.shell_moved,
        )
        # At good states the logged action is what was right.
        right = session.logged.corrections.get(state.site_id) if state.sort == "erring" else None
        self._right = None if right is None else Action(text="", calls=(right,))

    def row(self, arm: str, at: int, sample: SampledText) -> dict[str, Any]:
        action, rule = _parse(sample)
        calls = () if action is None else action.calls
        # Logs without a list of tools cannot tell an unknown tool from a rare one.
        is_known = all(call.name in self._schemas for call in calls) if self._schemas else True
        judgement = self._judgement(action, rule, is_known)
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
            "action": None if action is None else _plain(action),
            "tool": action_kind(action) if calls and action is not None else None,
            "parsed": action is not None,
            "known_tool": is_known,
            "only_looks": bool(calls) and all(map(only_looks_at, calls)),
            "verdict": judgement.says,
            "rule": judgement.rule,
            "kind": judgement.kind or None,
            "same_as_logged": action is not None and same_action(action, self._turn.action, self._context),
            "same_as_correction": self._is_right(action),
            "tokens": sample.num_tokens,
        }

    def _judgement(self, action: Action | None, rule: str, is_known: bool) -> Judgement:
        if action is None or not action.calls:
            return Judgement("unknown", rule)
        if not is_known:
            return Judgement("fails", "unknown_tool", "tool_not_found", "no tool of this name is there")
        # Every call is judged in the state before the turn: none of them has run.
        verdicts = [self._judge.verdict(call) for call in action.calls]
        return min(verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.says))

    def _is_right(self, action: Action | None) -> bool | None:
        if self._right is None:
            return None
        return action is not None and same_action(action, self._right, self._context)


def _parse(sample: SampledText) -> _ParsedSample:
    """Return the parsed action. Text with the mark of a call but no readable call is broken, or was cut off."""
    try:
        action = parse_reply(sample.text)
    except InputError:
        return _ParsedSample(None, UNPARSED)
    if action.calls:
        return _ParsedSample(action, "")
    if any(mark in sample.text for mark in _CALL_MARKS):
        return _ParsedSample(None, UNPARSED if sample.has_ended else CUT_OFF)
    return _ParsedSample(action, NO_CALL)


def _plain(action: Action) -> dict[str, Any]:
    calls = [
        {"name": call.name, "arguments": dict(call.arguments), "raw_arguments": call.raw_arguments}
        for call in action.calls
    ]
    return {"text": action.text, "calls": calls}


# ---- metrics of the samples


def _share_of_rules(*rules: str) -> Any:
    return lambda row: 1000.0 * (row["rule"] in rules)


_MEASURES: Mapping[str, Any] = {
    "sampled_failures": lambda row: 1000.0 * (row["verdict"] == "fails" or row["rule"] in _UNREADABLE),
    "sampled_unparsed": _share_of_rules(*_UNREADABLE),
    "sampled_no_call": _share_of_rules(NO_CALL),
    "sampled_unknown_tool": _share_of_rules("unknown_tool"),
    "sampled_agreement": lambda row: 1000.0 * row["same_as_logged"] if row["state"] == "good" else None,
    "sampled_corrected": lambda row: None if row["same_as_correction"] is None else 1000.0 * row["same_as_correction"],
    "sampled_looks": lambda row: 1000.0 * row["only_looks"],
    "sampled_length": lambda row: float(row["tokens"]),
}


def sampled_values(rows: Sequence[Mapping[str, Any]], states: Sequence[State]) -> dict[str, list[Value]]:
    """Return by metric one value per state: the mean over its samples, minus that of the model before training."""
    kinds = {(state.conversation_id, state.turn_id, state.sort): state.kind for state in states}
    by_state: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        state_key = (row["conversation_id"], row["turn_id"], row["state"])
        by_state.setdefault(state_key, {}).setdefault(row["arm"], []).append(row)
    values: dict[str, list[Value]] = {name: [] for name in _MEASURES}
    for state_key, arms in by_state.items():
        session = arms["before"][0]["session"]
        for name, measure in _MEASURES.items():
            means = {arm: _mean(measure, several) for arm, several in arms.items()}
            # A metric that is undefined at a state, such as agreement at an error, has no value there.
            if all(mean is not None for mean in means.values()):
                change = {arm: mean - means["before"] for arm, mean in means.items() if arm != "before"}
                values[name].append(Value(session, kinds[state_key], change))
    return values


def _mean(measure: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    values = [value for value in map(measure, rows) if value is not None]
    return fmean(values) if values else None


def sampled_summary(
    rows: Sequence[Mapping[str, Any]], states: Sequence[State], draws: Draws, section: Any
) -> dict[str, Any]:
    """Return the record's `sampled`: the means of each arm, the judge's verdicts, and the tools that were called."""
    by_arm = {arm: _of_arm([row for row in rows if row["arm"] == arm]) for arm in draws}
    number = section.samples if section.temperature else min(1, section.samples)
    return {"n_states": len(states), "n_samples": number, "temperature": section.temperature, "by_arm": by_arm}


def _of_arm(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name.removeprefix("sampled_"): _mean(measure, rows) for name, measure in _MEASURES.items()}
    tools = Counter(row["tool"] or row["rule"] for row in rows)
    return {
        **means,
        "cut_off": _mean(_share_of_rules(CUT_OFF), rows),
        "verdicts": dict(sorted(Counter(row["verdict"] for row in rows).items())),
        "calls": dict(sorted(tools.items(), key=lambda entry: (-entry[1], entry[0]))),
        "rows": len(rows),
    }
