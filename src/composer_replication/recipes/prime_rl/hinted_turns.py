"""GRPO with hints at erring turns, as an algorithm of PRIME-RL's orchestrator.

The method. A group of rollouts gets GRPO's advantages, as the engine computes them. Beside that, each turn in which the
model erred is read once more after a hint about its error: the ids of the rollout up to the turn, the hint as a message
of its own, then the very ids that were sampled. A server's log-probs of those ids are the turn's reference stream. The
trainer pulls the turn's tokens towards them (its `ref_kl` component, sampled-token KL(student || teacher)); no other
token of the rollout has a weight there, so nothing else is taught.

    trainer's loss = rl / rl tokens + sum over erring tokens of alpha * ref_kl / erring tokens

The hooks, and who calls them (PRIME-RL 559b447, 21 August 2026):

    setup()                  the orchestrator, once an environment, before the first rollout
    score_episode(episode)   the train sink, for each finished episode that can be trained on: what is below
    score_group(episodes)    the train sink, when a group is complete: GRPO's own, untouched

PRIME-RL chooses algorithms by `algo.type` from a closed list and takes no import path for one, so `register` puts this
one in the place of "grpo", in the orchestrator's process alone; `start` does so and then is the orchestrator.
Sites and hints are those of `rollouts.sites`: the same rules, words, placement and checks as in our own trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.render.renderer import Renderer
from composer_replication.config import option, table
from composer_replication.errors import (
    AlignmentError,
    ConfigError,
    MissingExtraError,
    explain,
)
from composer_replication.optional import available, require
from composer_replication.trainer.rollouts.sites import (
    Rollout,
    RolloutOptions,
    RolloutSites,
    TaughtTurn,
)

logger = logging.getLogger(__name__)
STREAM = "ref_kl"
"""The trainer's loss component that reads a reference; its weights go by this name."""
SITES, COUNTS = "sites", "composer"
"""Keys of a trace's `info`: what its environment says went wrong, and what became of it here."""
_CERTAIN = -1e-9
"""A server that is certain says 0, which on a node says that nobody scored the token (`composer_loss` reads it so)."""
Score = Callable[[list[int]], Awaitable[list[float]]]
"""A server's log-prob of each id after those before it (0 for the first), as PRIME-RL's `InferencePool.score`."""


@table("composer")
class HintSettings:
    """What the algorithm can be told; PRIME-RL's own config has no place for it."""

    alpha_sdpo: float = option(0.1, "Weight of an erring token, beside the policy gradient.", above=0)
    teacher_name: str | None = option(None, "Served name of the model that reads the hints; unset is the live policy.")
    teacher_url: str | None = option(None, "Where that model is served, such as http://127.0.0.1:8001/v1.")
    placement: Literal["before_turn", "in_last_message", "head"] = option(
        "before_turn", "Where a hint stands: before the erring turn, in the last message before it, or at the head."
    )
    part: Literal["turn", "call"] = option("turn", "What of an erring turn is taught: all of it, or its calls alone.")
    hints: Literal["template", "raw_error"] = option(
        "template", "What a hint about an error is: a template's words, or the error's own."
    )
    unhinted_kinds: tuple[str, ...] = option((), "Kinds of errors that get no hint.")
    max_teacher_length: int | None = option(
        None, "Longest hinted context, in tokens, that is scored: the server's max_model_len less 1.", at_least=1
    )

    def _check(self) -> None:
        if (self.teacher_name is None) != (self.teacher_url is None):
            setting = "teacher_name" if self.teacher_url is None else "teacher_url"
            expected = "both of teacher_name and teacher_url, or neither"
            raise ConfigError(explain("composer", got=f"{setting} alone", expected=expected))


class HintedTurns:
    """Finds the erring turns of a trace, has their ids scored after a hint, and writes what came back on its nodes."""

    def __init__(self, finder: RolloutSites, alpha: float, *, max_length: int | None = None) -> None:
        self._finder, self._alpha, self._max_length = finder, alpha, max_length

    async def annotate(self, trace: Any, branches: Sequence[Any], score: Score) -> Counter[str]:
        """All branches of one trace; what happened to each site is returned, and kept in the trace's `info`."""
        counts: Counter[str] = Counter()
        hinted_nodes: set[int] = set()
        turns = [(branch, turn) for branch in branches for turn in self._turns(trace, branch, hinted_nodes, counts)]
        requests = (score(turn.teacher_ids.tolist()) for _, turn in turns)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        for (branch, turn), answer in zip(turns, answers, strict=True):
            if isinstance(answer, BaseException):
                _tell_too_long(turn, answer)
                counts["dropped:not_scored"] += 1
                continue
            write_reference(branch, turn, answer, self._alpha)
            counts["taught_tokens"] += turn.end - turn.start
        counts["taught"] = len(turns) - counts["dropped:not_scored"]
        trace.info[COUNTS] = dict(counts)
        return counts

    def _turns(self, trace: Any, branch: Any, taken_ids: set[int], counts: Counter[str]) -> Iterable[TaughtTurn]:
        """A node has one reference, and is trained in the first branch that has it: the first hint about it counts."""
        rollout_sites = self._finder.find(rollout_of(trace, branch))
        counts.update(rollout_sites.counts)
        for turn in rollout_sites.taught:
            if self._max_length is not None and len(turn.teacher_ids) > self._max_length:
                counts["dropped:too_long"] += 1
                continue
            node, _ = node_at(branch, turn)
            if id(node) in taken_ids or node.reference_logprobs is not None:
                counts["dropped:turn_has_a_reference"] += 1
                continue
            taken_ids.add(id(node))
            yield turn


def _tell_too_long(turn: TaughtTurn, error: BaseException) -> None:
    """A turn less is no reason to end a run, where the server has no room for its ids; any other failure is raised.

    vLLM says so with status 400 and words about a length, which the engine's client raises; others say 413.
    """
    status, text = getattr(error, "status_code", None), str(error).lower()
    if status != 413 and not (status in (400, 422) and ("length" in text or "too long" in text)):
        raise error
    logger.warning("turn %s: %d hinted ids not scored: %s", turn.turn_id, len(turn.teacher_ids), error)


def rollout_of(trace: Any, branch: Any) -> Rollout:
    """A root-to-leaf path of verifiers' message graph, as rules and hints read rollouts."""
    ids, mask = branch.token_ids, branch.sampled_mask
    first = mask.index(True)  # of a branch that can be trained on
    begins = next(number for number, node in enumerate(branch.nodes) if any(node.mask))
    names = {call.id: call.name for node in branch.nodes for call in getattr(node.message, "tool_calls", None) or ()}
    messages = [_plain(node.message, names) for node in branch.nodes]
    # Tools are declared on a branch's first node; before verifiers 0.4 they were the trace's.
    tools = getattr(branch, "tools", None) or getattr(trace, "tools", None) or ()
    return Rollout(
        rollout_id=str(trace.id),
        prompt_ids=ids[:first],
        completion_ids=ids[first:],
        sampled=[int(is_sampled) for is_sampled in mask[first:]],
        prompt=messages[:begins],
        messages=messages[begins:],
        signals=tuple(trace.info.get(SITES) or ()),
        tools={tool.name: tool.parameters for tool in tools},
    )


def _plain(message: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """A typed message of verifiers as the mapping that everybody else passes around."""
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if message.role == "tool":
        plain["name"] = getattr(message, "name", None) or names.get(message.tool_call_id, "")
    if message.role == "assistant":
        plain["reasoning_content"] = getattr(message, "reasoning_content", None) or ""
        calls = getattr(message, "tool_calls", None) or ()
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return plain


def _text(content: Any) -> str:
    """Of parts, those that are text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(getattr(part, "text", "") or "") for part in content)


def node_at(branch: Any, turn: TaughtTurn) -> tuple[Any, int]:
    """The node that holds a turn's tokens, and where it begins in the branch."""
    begin = 0
    for node in branch.nodes:
        end = begin + len(node.token_ids)
        if begin <= turn.start and turn.end <= end:
            return node, begin
        begin = end
    got = f"tokens {turn.start} to {turn.end} of {begin}, across nodes"
    raise AlignmentError(explain(f"erring turn {turn.turn_id}", got=got, expected="a turn that is one node"))


def write_reference(branch: Any, turn: TaughtTurn, logprobs: Sequence[float], alpha: float) -> None:
    """The scores of the turn's own tokens as its node's reference, and alpha as their weight; 0 for all others."""
    node, begin = node_at(branch, turn)
    positions = range(turn.start - begin, turn.end - begin)
    scored = turn.teacher_ids.tolist()[turn.teacher_start : turn.teacher_start + len(positions)]
    if len(logprobs) != len(turn.teacher_ids) or scored != [node.token_ids[position] for position in positions]:
        got = f"{len(logprobs)} log-probs of {len(turn.teacher_ids)} ids"
        raise AlignmentError(explain(f"scores of turn {turn.turn_id}", got=got, expected="one of each verbatim id"))
    if not all(node.mask[position] for position in positions):
        got = "tokens that nobody sampled"
        raise AlignmentError(explain(f"erring turn {turn.turn_id}", got=got, expected="the model's own tokens"))
    sampled = [position for position, is_sampled in enumerate(node.mask) if is_sampled]
    scores = [min(float(logprob), _CERTAIN) for logprob in logprobs[turn.teacher_start :]]
    by_place = dict(zip(positions, scores, strict=False))
    node.reference_logprobs = [by_place.get(position, 0.0) for position in sampled]
    weights = [alpha if position in by_place else 0.0 for position in range(len(node.token_ids))]
    node.loss_weights = {**(node.loss_weights or {}), STREAM: weights}


def make_finder(model_name: str, settings: HintSettings) -> RolloutSites:
    """Sites and hints in the words of the policy's own tokenizer and chat template."""
    options = RolloutOptions(
        placement=settings.placement,
        part=settings.part,
        hints=settings.hints,
        unhinted_kinds=settings.unhinted_kinds,
    )
    return RolloutSites(Renderer(load_tokenizer(model_name)), options)


def composer_algorithm(grpo: type, settings: HintSettings, traces_of: Any, branches_of: Any, model_config: Any) -> type:
    """The engine's GRPO class with what is above; the others are functions and a record of the engine's."""

    class ComposerAlgorithm(grpo):
        """GRPO, and hints at erring turns."""

        async def setup(self) -> None:
            await super().setup()
            finder, longest = make_finder(self.policy_pool.model_name, settings), settings.max_teacher_length
            self.hinted_turns = HintedTurns(finder, settings.alpha_sdpo, max_length=longest)
            self.teacher_pool = self.policy_pool
            if settings.teacher_name is not None:
                served = model_config(name=settings.teacher_name, base_url=settings.teacher_url)
                self.teacher_pool = await self.connect(served)

        async def score_episode(self, episode: Any) -> None:
            await super().score_episode(episode)
            for _, trace in traces_of([episode]):
                branches = [branch for branch, _ in branches_of(trace)]
                await self.hinted_turns.annotate(trace, branches, self.teacher_pool.score)

    return ComposerAlgorithm


def engine_module(name: str) -> Any:
    """A module of PRIME-RL, or what to do where there is none: no index has it."""
    if not available("prime_rl"):
        fix = (
            "Install PRIME-RL from its repository, then this package into its environment: recipes/prime_rl/README.md."
        )
        message = explain("prime_rl", got="not installed, and not on PyPI", expected="PRIME-RL", fix=fix)
        raise MissingExtraError(message, name="prime_rl")
    return require(name, extra="prime-rl")


def register(settings: HintSettings | None = None) -> type:
    """Put the algorithm in the place of the engine's "grpo" in this process, and return it."""
    algo = engine_module("prime_rl.orchestrator.algo")
    algorithm = composer_algorithm(
        algo.ALGORITHM_CLASSES["grpo"],
        settings or HintSettings(),
        engine_module("prime_rl.orchestrator.algo.base").iter_trainable_traces,
        engine_module("prime_rl.orchestrator.trajectories").iter_trainable_branches,
        engine_module("prime_rl.configs.algorithm").FrozenModelConfig,
    )
    algo.ALGORITHM_CLASSES["grpo"] = algorithm
    return algorithm
