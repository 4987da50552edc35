"""Error sites of a rollout with what channel 2 needs of each: the erring turn's tokens, and the hinted context's."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from composer_replication.batch.hint_placement import (
    HintedTurn,
    Part,
    Placement,
    hinted_turn,
)
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.context import parameter_facts
from composer_replication.hint_generator.write import HintSource, HintWriter, write_hint
from composer_replication.messages import (
    THINKING_KEYS,
    WrittenCall,
    content_text,
    json_value,
    tool_call,
    written_calls,
)
from composer_replication.sites.find import MIN_CONFIDENCE, find_error_sites
from composer_replication.sites.rule import USUAL_BLAME, FailureRule, rule
from composer_replication.types import (
    Conversation,
    ErrorSite,
    Message,
    Provenance,
    ToolCall,
    ToolResult,
    Turn,
)

HintGenerator = Callable[[str, Mapping[str, Any]], str | None]
NO_HINT = "no_hint"
NO_HEADER = "no_header_before_turn"
TOO_LONG = "teacher_context_too_long"

SITES, ITEMS = "sdpo_sites", "sdpo_items"
"""Keys of a batch of rollouts: the taught turns of each, and how many tokens of all of them are taught."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How rollouts are taught from, beside their reward.

    Error sites: where a hint goes, which part of the erring turn is taught, who writes hints, which rules are added.
    `hints` are a template's words, the error's own ("raw_error"), or, as a control, the hint of another rollout's error
    of another kind ("other_kind"); `unhinted_kinds` have none.
    `only_failed_rollouts` leaves out the sites of rollouts that did better than their group. `max_resamples` draws
    groups with equal rewards again, that many times at most. `k1_coefficient` takes log p - log p_start of each token
    off its advantage (k1, without gradient). `fast_generation` samples from kept keys where TRL would call the model's
    own `generate` and the model allows it ("auto"), at most `generation_batch` rollouts at once, or never ("off").
    """

    placement: Placement = "before_turn"
    part: Part = "turn"
    hints: Literal["template", "raw_error", "other_kind"] = "template"
    unhinted_kinds: tuple[str, ...] = ()
    hint_generator: HintGenerator | None = None
    hint_writer: HintWriter | None = None
    extra_rules: tuple[FailureRule, ...] = ()
    min_confidence: float = MIN_CONFIDENCE
    max_teacher_length: int | None = None
    only_failed_rollouts: bool = False
    max_resamples: int = 0
    k1_coefficient: float = 0.0
    fast_generation: Literal["auto", "off"] = "auto"
    generation_batch: int | None = None

    def __post_init__(self) -> None:
        if self.generation_batch is not None and self.generation_batch < 1:
            raise InputError(explain("generation_batch", got=self.generation_batch, expected="1 or more"))
        if self.max_resamples < 0:
            raise InputError(explain("max_resamples", got=self.max_resamples, expected="0 or more"))
        if not self.k1_coefficient >= 0:
            raise InputError(explain("k1_coefficient", got=self.k1_coefficient, expected="0 or more"))


class TaughtTurn(NamedTuple):
    """An erring turn: its tokens [start, end) of prompt + completion, and the same tokens in the hinted ids."""

    start: int
    end: int
    teacher_ids: Tensor
    teacher_start: int
    kind: str
    hint: str
    turn_id: str
    wrong_ids: Tensor | None = None
    wrong_start: int = 0
    """The same tokens after a hint that does not belong to the site, for a contrast."""
    wrong_kind: str = ""
    hint_kind: str = ""
    """The kind of error that the hint is about, where it is not the turn's own: a control's."""

    @property
    def about(self) -> str:
        """The kind of error that its hint is about."""
        return self.hint_kind or self.kind


@dataclass(eq=False, slots=True)
class FoundSites:
    """What a rollout taught: the turns, every site the rules saw, and counts of what happened to each."""

    sequence: RenderedSequence
    taught: list[TaughtTurn] = field(default_factory=list[TaughtTurn])
    sites: list[ErrorSite] = field(default_factory=list[ErrorSite])
    counts: Counter[str] = field(default_factory=Counter[str])


class RolloutSites:
    """Finds the sites of rollouts made with one tokenizer and template."""

    def __init__(self, renderer: Renderer, options: RolloutOptions | None = None) -> None:
        self.renderer, self.options = renderer, options or RolloutOptions()
        self._rules = (*self.options.extra_rules, *ROLLOUT_RULES)
        self._header_ids = renderer.encoder.encode([renderer.dialect.header])[0] if renderer.dialect.header else []
        token = renderer.dialect.call_token
        self._call_id = renderer.protected.ids.get(token) if token else None
        self._call_text = token or "<tool_call>"
        self._stop_ids = {renderer.protected.ids[stop] for stop in renderer.dialect.stops}

    def find(self, rollout: Rollout) -> FoundSites:
        """Every failure of the rollout, and the turns that may be taught."""
        runs = sampled_runs(rollout)
        conversation = conversation_of(rollout, runs)
        if rollout.tools and is_parsed(rollout, runs):  # without tools nobody parses calls
            conversation = self._with_malformed(conversation)
        sites = find_error_sites(conversation, min_confidence=self.options.min_confidence, extra_rules=self._rules)
        sequence = self._rendered(rollout, runs)
        judged = judged_by_schema(sites, conversation, rollout.tools)
        found_sites = FoundSites(sequence, sites=[*judged, *signalled_sites(rollout, conversation)])
        found_sites.counts.update(rollouts=1, turns=len(runs), sites=len(found_sites.sites))
        for site in found_sites.sites:
            if not site.is_kept:
                found_sites.counts["not_taught:" + site.reason.partition(":")[0]] += 1
                continue
            if site.kind in self.options.unhinted_kinds:
                found_sites.counts["not_taught:unhinted_kind"] += 1
                continue
            hint = self._hint(site, conversation, rollout)
            turn = self.hinted(sequence, site.turn_id, hint) if hint else NO_HINT
            if hint is None or isinstance(turn, str):
                found_sites.counts[f"dropped:{turn}"] += 1
                continue
            found_sites.counts["kind:" + site.kind] += 1
            if self.options.part == "call" and turn.is_whole:
                found_sites.counts["whole_turn_without_call"] += 1
            ids = torch.tensor(turn.ids)
            found_sites.taught.append(
                TaughtTurn(turn.start, turn.end, ids, turn.teacher_start, site.kind, hint, site.turn_id)
            )
        return found_sites

    def _with_malformed(self, conversation: Conversation) -> Conversation:
        """With the parser's refusals: a turn that opens a call and has none is answered by what was wrong with it."""
        turns: list[Turn] = []
        for turn in conversation.turns:
            turns.append(turn)
            ids = turn.token_ids or ()
            opens = self._call_id in ids if self._call_id is not None else self._call_text in turn.text
            was_cut = bool(ids) and ids[-1] not in self._stop_ids  # half a call, because the budget ended
            if turn.origin != "model" or turn.calls or not opens or was_cut:
                continue
            raw = self._call_part(turn)
            call = ToolCall(id=f"{turn.id}-call-0", name=_name_in(raw), arguments={}, raw_arguments=raw)
            result = ToolResult(call_id=call.id, text=_why_not_json(raw), is_error=True)
            turns[-1] = replace(turn, calls=(call,))
            turns.append(
                Turn(
                    id=f"{turn.id}-parser",
                    role="tool",
                    origin="tool",
                    results=(result,),
                    provenance=turn.provenance,
                )
            )
        return replace(conversation, turns=tuple(turns))

    def _call_part(self, turn: Turn) -> str:
        """What the turn wrote after the token that opens a call."""
        if self._call_id is not None and turn.token_ids and self._call_id in turn.token_ids:
            rest = turn.token_ids[turn.token_ids.index(self._call_id) + 1 :]
            return str(self.renderer.tokenizer.decode(list(rest), skip_special_tokens=True)).strip()
        return turn.text.partition(self._call_text)[2].strip()

    def _rendered(self, rollout: Rollout, runs: Sequence[Run]) -> RenderedSequence:
        """The rollout's own ids, with the span of every sampled run that has a header before it."""
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        offset = len(rollout.prompt_ids)
        roles = _roles_before(rollout)
        spans: list[TurnSpan] = []
        for number, run in enumerate(runs):
            start, end = run.start + offset, run.end + offset
            header = self._header_start(ids, start)
            if header is None:
                continue
            call = self._call_span(ids, start, end)
            spans.append(
                TurnSpan(
                    turn_id=assistant_id(number),
                    header_start=header,
                    start=start,
                    end=end,
                    call_start=call[0],
                    call_end=call[1],
                    text="",
                    previous_role=roles[number] if number < len(roles) else "tool",
                    is_verbatim=True,
                )
            )
        return RenderedSequence(conversation_id=rollout.rollout_id, ids=ids, spans=spans, notes={})

    def _header_start(self, ids: list[int], start: int) -> int | None:
        """Where the generation prompt before a turn begins; one that ends on more than the header begins the same."""
        header = self._header_ids
        if not header:
            return start
        if ids[start - len(header) : start] == header:
            return start - len(header)
        for position in range(start - 1, max(-1, start - len(header) - 64), -1):
            if ids[position] == header[0]:
                return position
        return None

    def _call_span(self, ids: list[int], start: int, end: int) -> tuple[int | None, int | None]:
        if self._call_id is None or self._call_id not in ids[start:end]:
            return None, None
        return ids.index(self._call_id, start, end), end - int(ids[end - 1] in self._stop_ids)

    def hinted(self, sequence: RenderedSequence, turn_id: str, hint: str) -> HintedTurn | str:
        """The turn after a hint, or why not."""
        span = next((candidate for candidate in sequence.spans if candidate.turn_id == turn_id), None)
        if span is None:
            return NO_HEADER
        options = self.options
        turn = hinted_turn(self.renderer, sequence, span, hint, placement=options.placement, part=options.part)
        limit = options.max_teacher_length
        return TOO_LONG if not isinstance(turn, str) and limit is not None and len(turn.context.ids) > limit else turn

    def _hint(self, site: ErrorSite, conversation: Conversation, rollout: Rollout) -> str | None:
        signal = _signal_of(site, rollout)
        if signal is not None and signal.get("hint"):
            return str(signal["hint"])
        if self.options.hint_generator is not None:
            about = {
                "error_message": site.evidence_text,
                "tool_name": site.tool,
                "available_tools": sorted(rollout.tools),
            }
            return self.options.hint_generator(site.kind, about)
        sources: tuple[HintSource, ...] = ("template", "raw_error")
        if self.options.hints == "raw_error":
            sources = ("raw_error",)
        elif self.options.hint_writer is not None:
            sources = ("writer", *sources)
        hint = write_hint(
            site, conversation, sources=sources, writer=self.options.hint_writer, tool_schemas=rollout.tools or None
        )
        return None if hint is None else hint.text


def _roles_before(rollout: Rollout) -> list[str]:
    """The role of the message before each assistant message of the completion."""
    everything = [*rollout.prompt, *rollout.messages]
    first = len(rollout.prompt)
    return [
        str(everything[index - 1].get("role", "")) if index else ""
        for index in range(first, len(everything))
        if everything[index].get("role") == "assistant"
    ]


def _why_not_json(raw: str) -> str:
    """The parser's words about a call's text; one that is JSON lacks what a call needs."""
    text = raw.partition("</")[0].strip()
    try:
        json_value(text)
    except ValueError as error:
        return f"{MALFORMED}: {error}"
    return f"{MALFORMED} object with a name and arguments"


def _name_in(raw: str) -> str:
    """The tool's name as far as a broken call shows it."""
    after = raw.partition('"name"')[2].partition('"')[2]
    return after.partition('"')[0] if after else ""


# A rollout as a conversation: its messages for the rules that find errors, its ids for everything that is computed.
#
# A trainer's rollout is a prompt and a completion as token ids, a mask that says which of the completion's tokens the
# model sampled, and the messages they were parsed into. Each run of sampled tokens is one assistant message.

FORMAT = "rollout"
_NOWHERE = Provenance(file="", lines=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory. `sampled` is 1 on the tokens the model wrote (None: all of them).

    `signals` are what the environment itself says went wrong: mappings with `turn` (number of the assistant message,
    from 0), `kind`, `message`, and a `hint` if it has one. `raised` says of each tool message, in order, whether the
    tool raised; without it, that is read from the message. `tools` are schemas by name.
    """

    rollout_id: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    sampled: Sequence[int] | None
    prompt: Sequence[Message]
    messages: Sequence[Message]
    signals: Sequence[Mapping[str, Any]] = ()
    raised: Sequence[bool] | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


class Run(NamedTuple):
    """Tokens [start, end) of a completion, written by the model in one go."""

    start: int
    end: int


def sampled_runs(rollout: Rollout) -> list[Run]:
    """The completion's runs of sampled tokens, in order."""
    if rollout.sampled is None:
        return [Run(0, len(rollout.completion_ids))] if rollout.completion_ids else []
    runs: list[Run] = []
    start: int | None = None
    for position, is_sampled in enumerate([*rollout.sampled, 0]):
        if is_sampled and start is None:
            start = position
        elif not is_sampled and start is not None:
            runs.append(Run(start, position))
            start = None
    return runs


def assistant_id(number: int) -> str:
    """The turn id of the n-th assistant message of a rollout."""
    return f"assistant-{number}"


def conversation_of(rollout: Rollout, runs: Sequence[Run]) -> Conversation:
    """The whole rollout; assistant turns of the completion have their sampled ids and the id of their number.

    A rollout function's completion is one message however many turns it has: then a turn is its ids and nothing else.
    """
    turns = [_plain_turn(number, message) for number, message in enumerate(rollout.prompt)]
    if not is_parsed(rollout, runs):
        bare = [_assistant_turn({}, number, _ids(rollout, run)) for number, run in enumerate(runs)]
        return Conversation(id=rollout.rollout_id, format=FORMAT, turns=(*turns, *bare))
    open_calls: list[ToolCall] = []
    number = 0
    raised = iter(rollout.raised) if rollout.raised is not None else None
    for index, message in enumerate(rollout.messages):
        if message.get("role") == "assistant":
            run = runs[number] if number < len(runs) else Run(0, 0)
            turn = _assistant_turn(message, number, _ids(rollout, run))
            open_calls = list(turn.calls)
            number += 1
        elif message.get("role") == "tool":
            turn = _result_turn(message, index, open_calls, None if raised is None else next(raised, False))
        else:
            turn = _plain_turn(len(rollout.prompt) + index, message)
        turns.append(turn)
    return Conversation(id=rollout.rollout_id, format=FORMAT, turns=tuple(turns))


def is_parsed(rollout: Rollout, runs: Sequence[Run]) -> bool:
    """Whether each run of sampled tokens has a message of its own."""
    return sum(message.get("role") == "assistant" for message in rollout.messages) == len(runs)


def _ids(rollout: Rollout, run: Run) -> tuple[int, ...]:
    return tuple(rollout.completion_ids[run.start : run.end])


def _plain_turn(number: int, message: Message) -> Turn:
    role = message.get("role")
    text = content_text(message.get("content"))
    if role == "assistant":
        calls = _calls(message, f"prompt-{number}")
        return Turn(
            id=f"prompt-{number}", role="assistant", origin="copied", text=text, calls=calls, provenance=_NOWHERE
        )
    role = "system" if role == "system" else "user"
    return Turn(id=f"prompt-{number}", role=role, origin="human", text=text, provenance=_NOWHERE)


def _assistant_turn(message: Message, number: int, ids: tuple[int, ...]) -> Turn:
    name = assistant_id(number)
    return Turn(
        id=name,
        role="assistant",
        origin="model",
        text=content_text(message.get("content")),
        thinking=content_text(next((message[key] for key in THINKING_KEYS if message.get(key)), "")),
        calls=_calls(message, name),
        provenance=_NOWHERE,
        token_ids=ids or None,
    )


def _result_turn(message: Message, index: int, open_calls: list[ToolCall], raised: bool | None) -> Turn:
    """Results name their tool, not their call, and those of asynchronous tools come last: the first open call of it."""
    call = next((open_call for open_call in open_calls if open_call.name == message.get("name")), None)
    if call is None and open_calls:
        call = open_calls[0]
    if call is not None:
        open_calls.remove(call)
    content = content_text(message.get("content"))
    text, is_error = _result_of(content) if raised is not False else (content, None)
    result = ToolResult(call_id=call.id if call else f"result-{index}", text=text, is_error=is_error)
    return Turn(id=f"result-{index}", role="tool", origin="tool", results=(result,), provenance=_NOWHERE)


def _result_of(content: str) -> tuple[str, bool | None]:
    """A result's text, and whether the tool raised: TRL writes that as a dict with the one key `error`.

    A tool that did not raise may still say in words that it failed, so the flag is then unknown, not False.
    """
    if content.startswith("{") and "error" in content[:12]:
        try:
            value = ast.literal_eval(content)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return content, None
        if isinstance(value, dict) and list(value) == ["error"]:
            return str(value["error"]), True
    return content, None


def _calls(message: Message, turn: str) -> tuple[ToolCall, ...]:
    entries = [call for call in written_calls(message) if isinstance(call.entry, Mapping)]
    return tuple(_call(call, f"{turn}-call-{number}") for number, call in enumerate(entries))


def _call(written: WrittenCall, identity: str) -> ToolCall:
    """A parsed value goes through the one reader of arguments as text: an engine's parser has limits of its own."""
    arguments = written.arguments
    text = (
        arguments
        if arguments is None or isinstance(arguments, str)
        else json.dumps(arguments, ensure_ascii=False, default=str)
    )
    return tool_call(identity, str(written.name or ""), text)


def signalled_sites(rollout: Rollout, conversation: Conversation) -> list[ErrorSite]:
    """What the environment itself says; it knows whose doing it was, and says so by saying it."""
    turn_ids = {turn.id for turn in conversation.turns}
    sites: list[ErrorSite] = []
    for number, signal in enumerate(rollout.signals):
        kind, message = str(signal.get("kind", "other")), str(signal.get("message", ""))
        turn_id = assistant_id(int(signal.get("turn", -1)))
        blame = signal.get("blame") or ("model" if USUAL_BLAME.get(kind, "model") in ("model", "unknown") else None)
        is_kept = turn_id in turn_ids and blame == "model"
        why = "the environment's signal" if is_kept else "blame or turn of a signal: not the model's, or no such turn"
        sites.append(
            ErrorSite(
                id=f"{rollout.rollout_id}-signal-{number}",
                conversation_id=rollout.rollout_id,
                turn_id=turn_id,
                call_id=str(signal.get("call", "")),
                result_turn_id=None,
                tool=str(signal.get("tool", "")),
                kind=kind,
                blame="model" if blame == "model" else "env",
                confidence=1.0,
                evidence=(0, len(message)),
                evidence_text=message,
                is_soft=False,
                is_rewound=False,
                repeats=0,
                repeat_of=None,
                between=0,
                is_kept=is_kept,
                reason=why,
            )
        )
    return sites


def _signal_of(site: ErrorSite, rollout: Rollout) -> Mapping[str, Any] | None:
    prefix = f"{rollout.rollout_id}-signal-"
    return rollout.signals[int(site.id.removeprefix(prefix))] if site.id.startswith(prefix) else None


# How failures look in a rollout whose tools are Python functions, besides the rules that logs have.
#
# A tool's exception reaches the model as its text alone, without its type, so what the words do not say is asked of the
# call and of the tool's schema.

MALFORMED = "The tool call is not valid JSON"
"""What the parser's refusal of a call begins with."""
ROLLOUT_RULES: tuple[FailureRule, ...] = (
    rule("tool_not_found", r"^Tool \S.* not found\.?$", "not found", where="start", confidence=0.98),
    rule("tool_not_found", r"^Unsupported tool call type", "unsupported tool call", where="start", confidence=0.95),
    rule(
        "input_validation",
        r"^.*\bgot (?:an unexpected keyword argument|multiple values for argument)|^.*\bmissing \d+ required "
        r"(?:positional|keyword-only) arguments?:",
        "unexpected keyword",
        "multiple values",
        "missing",
        where="start",
        confidence=0.98,
    ),
    # A tool that says it in words instead of raising; its name tells nobody that it reads files.
    rule(
        "file_not_found",
        r"^(?:\w*error:\s*)?(?:the )?(?:file|path|folder|directory)\b[^\n]{0,200}?\b(?:not found|does not exist)"
        r"|^(?:\w*error:\s*)?no such file or directory",
        "not found",
        "does not exist",
        "no such file",
        channels="other",
        where="start",
        confidence=0.85,
    ),
    rule("input_validation", rf"^{MALFORMED}", MALFORMED.lower(), where="start", confidence=0.98),
    rule(
        "input_validation",
        r"^.*argument after \*\* must be a mapping",
        "must be a mapping",
        where="start",
        confidence=0.95,
    ),
)


def judged_by_schema(
    sites: Sequence[ErrorSite], conversation: Conversation, tools: Mapping[str, Mapping[str, Any]]
) -> list[ErrorSite]:
    """Exceptions that no rule knows, where the call itself explains them; others stay nobody's, and are not taught.

    Arguments that do not fit the tool's schema are the model's doing whatever the tool then stumbled over, and so is an
    argument that the message names.
    """
    calls = {call.id: call for turn in conversation.turns for call in turn.calls}
    return [_judged(site, calls.get(site.call_id), tools.get(site.tool)) for site in sites]


def _judged(site: ErrorSite, call: ToolCall | None, schema: Mapping[str, Any] | None) -> ErrorSite:
    if site.kind != "other" or site.blame != "unknown" or site.is_soft or call is None:
        return site
    does_not_fit = bool(parameter_facts(call, site.evidence_text, schema))
    names = [name for name in call.arguments if re.search(rf"\b{re.escape(name)}\b", site.evidence_text)]
    if not (does_not_fit or names):
        return site
    why = "its arguments do not fit the schema" if does_not_fit else f"the message names its argument {names[0]}"
    return replace(
        site, kind="input_validation", blame="model", confidence=0.8, is_kept=True, reason=f"a tool raised: {why}"
    )
