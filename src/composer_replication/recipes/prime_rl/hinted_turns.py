"""GRPO with hints at erring turns, as an algorithm of PRIME-RL's orchestrator.

A group of rollouts gets GRPO's advantages, as computed by the engine. In addition, each turn in which the model erred
is scored in a context with a hint about the error: the token ids of the rollout up to the turn, the hint as a separate
message, then exactly the sampled ids. A server's log-probs of those ids are the turn's reference. The trainer's
`ref_kl` component, a sampled-token KL(student || teacher), pulls the turn's tokens towards this reference; all other
tokens of the rollout have weight 0 in it.

    trainer's loss = rl / rl tokens + sum over erring tokens of alpha * ref_kl / erring tokens

The hooks and their callers (PRIME-RL 559b447, 21 August 2026):

    setup()                  the orchestrator, once per environment, before the first rollout
    score_episode(episode)   the train sink, for each finished episode that can be trained on; scores erring turns
    score_group(episodes)    the train sink, for each complete group; GRPO's own, unchanged

PRIME-RL selects algorithms by `algo.type` from a fixed list, without import paths. So `register` replaces "grpo", only
in the orchestrator's process; `start` registers the algorithm and then runs the orchestrator. Sites and hints come from
`rollouts.sites`, with the same rules, templates, placement and checks as in our own trainer.
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
from composer_replication.errors import AlignmentError, ConfigError, MissingExtraError, explain
from composer_replication.optional import available, require
from composer_replication.trainer.rollouts.hint_distillation import ErringTurn, ErringTurnFinder
from composer_replication.trainer.rollouts.sites import Rollout, RolloutOptions

logger = logging.getLogger(__name__)
STREAM = "ref_kl"
"""The loss component of the trainer that reads a reference; its weights are stored by this name."""
SITES, COUNTS = "sites", "composer"
"""Keys of a trace's `info`: the error signals of its environment, and our counts of its sites by outcome."""
_LARGEST_LOGPROB = -1e-9
"""The maximum log-prob that is written: a server may return 0, which on a node would mean "not scored"."""
Score = Callable[[list[int]], Awaitable[list[float]]]
"""Returns the log-prob of each id given those before it (0 for the first), as PRIME-RL's `InferencePool.score` does."""


@table("composer")
class HintSettings:
    """The options of the algorithm. They are read from a separate file, because PRIME-RL's config has no fields for
    them.
    """

    alpha_sdpo: float = option(0.1, "Weight of channel 2 on the tokens of erring turns.", above=0)
    teacher_name: str | None = option(None, "Served name of the teacher model. Unset: the live policy.")
    teacher_url: str | None = option(None, "Base URL of the teacher's server, such as http://127.0.0.1:8001/v1.")
    placement: Literal["before_turn", "in_last_message", "head"] = option(
        "before_turn", "Position of a hint: before the erring turn, in the last message before it, or at the start."
    )
    part: Literal["turn", "call"] = option(
        "turn", "Part of an erring turn that is trained on: the whole turn, or only its tool calls."
    )
    hints: Literal["template", "raw_error"] = option(
        "template", "Text of a hint: from a template, or the raw error message."
    )
    unhinted_kinds: tuple[str, ...] = option((), "Kinds of errors without hints.")
    max_teacher_length: int | None = option(
        None,
        "Maximum length of a hinted context, in tokens: the server's max_model_len minus 1. Unset: no limit.",
        at_least=1,
    )

    def _check(self) -> None:
        if (self.teacher_name is None) != (self.teacher_url is None):
            setting = "teacher_name" if self.teacher_url is None else "teacher_url"
            expected = "both of teacher_name and teacher_url, or neither"
            raise ConfigError(explain("composer", got=f"only {setting}", expected=expected))


class HintedTurns:
    """Finds the erring turns of a trace, requests scores for them after a hint, and writes the scores to the nodes
    of the trace.
    """

    def __init__(self, finder: ErringTurnFinder, alpha: float, *, max_length: int | None = None) -> None:
        self._finder, self._alpha, self._max_length = finder, alpha, max_length

    async def annotate(self, trace: Any, branches: Sequence[Any], score: Score) -> Counter[str]:
        """Score the erring turns in all branches of one trace. Returns counts of its error sites, which are also
        stored in the trace's `info`.
        """
        counts: Counter[str] = Counter()
        hinted_nodes: set[int] = set()
        turns = [
            (branch, turn) for branch in branches for turn in self._turns_to_score(trace, branch, hinted_nodes, counts)
        ]
        requests = (score(turn.teacher_ids.tolist()) for _, turn in turns)
        # Exceptions are collected: a turn that is too long for the server must not cancel the others.
        answers = await asyncio.gather(*requests, return_exceptions=True)
        for (branch, turn), answer in zip(turns, answers, strict=True):
            if isinstance(answer, BaseException):
                _warn_if_too_long(turn, answer)
                counts["dropped:not_scored"] += 1
                continue
            write_reference(branch, turn, answer, self._alpha)
            counts["taught_tokens"] += turn.end - turn.start
        counts["taught"] = len(turns) - counts["dropped:not_scored"]
        trace.info[COUNTS] = dict(counts)
        return counts

    def _turns_to_score(
        self, trace: Any, branch: Any, hinted_nodes: set[int], counts: Counter[str]
    ) -> Iterable[ErringTurn]:
        """Yield the turns of a branch that should be scored.

        A node has only one reference but may belong to several branches, so only the first hint for each node counts.
        """
        rollout_sites = self._finder.find(rollout_of(trace, branch))
        counts.update(rollout_sites.counts)
        for turn in rollout_sites.turns:
            # Not sent, because the server would reject it.
            if self._max_length is not None and len(turn.teacher_ids) > self._max_length:
                counts["dropped:too_long"] += 1
                continue
            # Branches share the nodes before their split.
            node, _ = node_at(branch, turn)
            if id(node) in hinted_nodes or node.reference_logprobs is not None:
                counts["dropped:turn_has_a_reference"] += 1
                continue
            hinted_nodes.add(id(node))
            yield turn


def _warn_if_too_long(turn: ErringTurn, error: BaseException) -> None:
    """Log a warning if the server rejected the token ids because there are too many; re-raise any other error.

    A run must not end because one turn cannot be scored. vLLM rejects such a request with status 400 and a message
    about the length, which the engine's client raises as an error; other servers use status 413.
    """
    # An error without a status, such as a lost connection, is raised too.
    status, text = getattr(error, "status_code", None), str(error).lower()
    if status != 413 and not (status in (400, 422) and ("length" in text or "too long" in text)):
        raise error
    logger.warning(
        "turn %s not scored: its hinted context of %d tokens is too long for the server: %s",
        turn.turn_id,
        len(turn.teacher_ids),
        error,
    )


def rollout_of(trace: Any, branch: Any) -> Rollout:
    """Convert a root-to-leaf path of verifiers' message graph to a rollout, which is the input of the rules and
    hints.
    """
    ids, mask = branch.token_ids, branch.sampled_mask
    # Everything before the first sampled token is the prompt, in ids as well as in messages.
    first_sampled = mask.index(True)  # exists, since the branch can be trained on
    first_answer = next(number for number, node in enumerate(branch.nodes) if any(node.mask))
    names = {call.id: call.name for node in branch.nodes for call in getattr(node.message, "tool_calls", None) or ()}
    messages = [_message_to_dict(node.message, names) for node in branch.nodes]
    # verifiers 0.4 declares tools on the first node of a branch, earlier versions on the trace.
    tools = getattr(branch, "tools", None) or getattr(trace, "tools", None) or ()
    return Rollout(
        rollout_id=str(trace.id),
        prompt_ids=ids[:first_sampled],
        completion_ids=ids[first_sampled:],
        sampled=[int(is_sampled) for is_sampled in mask[first_sampled:]],
        prompt=messages[:first_answer],
        messages=messages[first_answer:],
        signals=tuple(trace.info.get(SITES) or ()),
        tools={tool.name: tool.parameters for tool in tools},
    )


def _message_to_dict(message: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Convert a typed message of verifiers to a mapping in the OpenAI chat format."""
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if message.role == "tool":
        # Results in older records have no tool name, so it is taken from the call with the same id.
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
    """Return the text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(getattr(part, "text", "") or "") for part in content)


def node_at(branch: Any, turn: ErringTurn) -> tuple[Any, int]:
    """Return the node that contains a turn's tokens, and the position in the branch at which the node begins."""
    begin = 0
    for node in branch.nodes:
        end = begin + len(node.token_ids)
        if begin <= turn.start and turn.end <= end:
            return node, begin
        begin = end
    got = f"tokens {turn.start} to {turn.end} of {begin}, across nodes"
    raise AlignmentError(explain(f"erring turn {turn.turn_id}", got=got, expected="a turn that is one node"))


def write_reference(branch: Any, turn: ErringTurn, logprobs: Sequence[float], alpha: float) -> None:
    """Write the scores of a turn's tokens into its node as reference log-probs with loss weight `alpha`.

    All other tokens of the node get a reference of 0 and a weight of 0. Raises AlignmentError unless the scores belong
    to exactly the tokens that were sampled.
    """
    node, begin = node_at(branch, turn)
    positions = range(turn.start - begin, turn.end - begin)
    scored = turn.teacher_ids.tolist()[turn.teacher_start : turn.teacher_start + len(positions)]
    # The server must have scored exactly the ids that were sent, and the node must contain exactly the sampled ones.
    if len(logprobs) != len(turn.teacher_ids) or scored != [node.token_ids[position] for position in positions]:
        got = f"{len(logprobs)} log-probs of {len(turn.teacher_ids)} ids"
        raise AlignmentError(
            explain(f"scores of turn {turn.turn_id}", got=got, expected="one per id, ending with the sampled ids")
        )
    if not all(node.mask[position] for position in positions):
        got = "tokens that were not sampled"
        raise AlignmentError(explain(f"erring turn {turn.turn_id}", got=got, expected="the model's own tokens"))
    sampled = [position for position, is_sampled in enumerate(node.mask) if is_sampled]
    scores = [min(float(logprob), _LARGEST_LOGPROB) for logprob in logprobs[turn.teacher_start :]]
    score_at = dict(zip(positions, scores, strict=False))
    # The engine expects one reference per sampled token of the node, but one weight per token of any kind.
    node.reference_logprobs = [score_at.get(position, 0.0) for position in sampled]
    weights = [alpha if position in score_at else 0.0 for position in range(len(node.token_ids))]
    # Other components keep their weights.
    node.loss_weights = {**(node.loss_weights or {}), STREAM: weights}


def make_finder(model_name: str, settings: HintSettings) -> ErringTurnFinder:
    """Create a finder of erring turns that renders hints with the policy's own tokenizer and chat template."""
    options = RolloutOptions(
        placement=settings.placement,
        part=settings.part,
        hints=settings.hints,
        unhinted_kinds=settings.unhinted_kinds,
    )
    return ErringTurnFinder(Renderer(load_tokenizer(model_name)), options)


def composer_algorithm(grpo: type, settings: HintSettings, traces_of: Any, branches_of: Any, model_config: Any) -> type:
    """Return a subclass of the engine's GRPO class that adds hints.

    All arguments except `settings` are classes and functions of the engine, which this module does not import.
    """

    # Defined here, because the base class is known only once PRIME-RL is imported.
    class ComposerAlgorithm(grpo):
        """The engine's GRPO algorithm, extended by hints at erring turns."""

        async def setup(self) -> None:
            await super().setup()
            finder = make_finder(self.policy_pool.model_name, settings)
            self.hinted_turns = HintedTurns(finder, settings.alpha_sdpo, max_length=settings.max_teacher_length)
            # The live policy, unless a teacher is configured.
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
    """Import a module of PRIME-RL. Raises MissingExtraError, with instructions, if PRIME-RL is not installed."""
    if not available("prime_rl"):
        fix = "Install PRIME-RL from its repository and this package into its environment: recipes/prime_rl/README.md."
        message = explain("prime_rl", got="not installed (it is not on PyPI)", expected="PRIME-RL", fix=fix)
        raise MissingExtraError(message, name="prime_rl")
    return require(name, extra="prime-rl")


def register(settings: HintSettings | None = None) -> type:
    """Replace the engine's "grpo" by this algorithm in the current process, and return the new class."""
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
