"""Build rollouts from the output of TRL's generation, find their error sites, and write hints for these.

A rollout consists of a prompt and a completion as token ids, a mask of the tokens that the model sampled, and the
messages parsed from the completion. It is converted to a `Conversation`, so that the rules for logged sessions find its
errors; everything that is computed uses the rollout's own ids. Environments can report errors too (`Rollout.signals`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from composer_replication.batch.hint_placement import Part, Placement
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.facts import parameter_facts
from composer_replication.hint_generator.hint_sources import HintSource, HintWriter, write_hint
from composer_replication.messages import THINKING_KEYS, WrittenCall, content_text, json_value, tool_call, written_calls
from composer_replication.sites.find import MIN_CONFIDENCE, find_error_sites
from composer_replication.sites.rule import USUAL_BLAME, FailureRule, rule
from composer_replication.types import Conversation, ErrorSite, Message, Provenance, ToolCall, ToolResult, Turn

HintGenerator = Callable[[str, Mapping[str, Any]], str | None]


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Settings for sampling rollouts, and for training on their error sites.

    `placement` is where a hint is inserted, `part` is the part of the erring turn that is trained on, and `extra_rules`
    are additional failure rules. `hints` says which hints are used: ones written from templates ("template"), the error
    message itself ("raw_error") or, as a control, the hint for an error of a different kind in another rollout
    ("other_kind"). Errors of `unhinted_kinds` get no hint. `only_failed_rollouts` skips the sites of rollouts that did
    better than their group. `max_resamples` limits how often groups with equal rewards are resampled. `k1_coefficient`
    penalizes KL divergence: that multiple of log p - log p_start for each token is subtracted from the token's
    advantage (the k1 estimator, without gradient). `fast_generation` says whether `rollouts.generation` replaces the
    model's `generate`: if the model supports it ("auto"), or never ("off"). `generation_batch` limits how many rollouts
    it generates at once.
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


class RolloutErrors(NamedTuple):
    """The error sites of a rollout, with the rollout in two forms: as a conversation and as rendered ids."""

    conversation: Conversation
    sequence: RenderedSequence
    sites: list[ErrorSite]
    num_turns: int


class RolloutErrorFinder:
    """A finder of error sites in the rollouts of one tokenizer and chat template, which also writes hints for them."""

    def __init__(self, renderer: Renderer, options: RolloutOptions) -> None:
        self.renderer, self.options = renderer, options
        self._rules = (*options.extra_rules, *ROLLOUT_RULES)
        self._header_ids = renderer.encoder.encode([renderer.dialect.header])[0] if renderer.dialect.header else []
        token = renderer.dialect.call_token
        self._call_id = renderer.protected.ids.get(token) if token else None
        self._call_text = token or "<tool_call>"
        self._stop_ids = {renderer.protected.ids[stop] for stop in renderer.dialect.stops}

    def find(self, rollout: Rollout) -> RolloutErrors:
        """Return all failed calls, regardless of who is to blame, and all errors that the environment reports."""
        runs = sampled_runs(rollout)
        conversation = conversation_of(rollout, runs)
        # Without tools no calls are parsed, so a turn that looks like a malformed call is just text.
        if rollout.tools and is_parsed(rollout, runs):
            conversation = self._add_malformed_calls(conversation)
        sites = find_error_sites(conversation, min_confidence=self.options.min_confidence, extra_rules=self._rules)
        sequence = self._render(rollout, runs)
        judged = _judged_by_schema(sites, conversation, rollout.tools)
        all_sites = [*judged, *_signalled_sites(rollout, conversation)]
        return RolloutErrors(conversation, sequence, all_sites, len(runs))

    def write_hint(self, site: ErrorSite, conversation: Conversation, rollout: Rollout) -> str | None:
        """Return the environment's own hint, or else a hint from the user's function, a model or a template.

        Returns None if no hint could be written.
        """
        signal = _find_signal(site, rollout)
        if signal is not None and signal.get("hint"):
            return str(signal["hint"])
        # The documented arguments of a user's hint function: the kind of error, and three fields of the call.
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
        writer, schemas = self.options.hint_writer, rollout.tools or None
        hint = write_hint(site, conversation, sources=sources, writer=writer, tool_schemas=schemas)
        return None if hint is None else hint.text

    def _add_malformed_calls(self, conversation: Conversation) -> Conversation:
        """Return the conversation with a failed call added to every turn whose call could not be parsed.

        Such a turn contains the token that opens a call, but no parsed call. It gets a call, followed by an error
        result.
        """
        turns: list[Turn] = []
        for turn in conversation.turns:
            turns.append(turn)
            ids = turn.token_ids or ()
            # Detected by the opening token if the tokenizer has one, because text may mention a call without making it.
            opens_call = self._call_id in ids if self._call_id is not None else self._call_text in turn.text
            # A turn without a stop token hit the token limit, so a truncated call is not an error of the model.
            was_cut = bool(ids) and ids[-1] not in self._stop_ids
            if turn.origin != "model" or turn.calls or not opens_call or was_cut:
                continue
            raw = self._text_after_call_token(turn)
            call = ToolCall(id=f"{turn.id}-call-0", name=_broken_call_name(raw), arguments={}, raw_arguments=raw)
            result = ToolResult(call_id=call.id, text=_parse_error_text(raw), is_error=True)
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

    def _text_after_call_token(self, turn: Turn) -> str:
        """Return the text after the token that opens a call."""
        if self._call_id is not None and turn.token_ids and self._call_id in turn.token_ids:
            rest = turn.token_ids[turn.token_ids.index(self._call_id) + 1 :]
            return str(self.renderer.tokenizer.decode(list(rest), skip_special_tokens=True)).strip()
        return turn.text.partition(self._call_text)[2].strip()

    def _render(self, rollout: Rollout, runs: Sequence[Run]) -> RenderedSequence:
        """Return the rollout's ids, with a span for every run of sampled tokens that follows a turn header."""
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
        """Return where the generation prompt before a turn begins, or None if there is no header before the turn."""
        header = self._header_ids
        if not header:
            return start
        if ids[start - len(header) : start] == header:
            return start - len(header)
        # Some templates add text to the header (such as an empty think block): look for its first token in the last 64.
        for position in range(start - 1, max(-1, start - len(header) - 64), -1):
            if ids[position] == header[0]:
                return position
        return None

    def _call_span(self, ids: list[int], start: int, end: int) -> tuple[int | None, int | None]:
        if self._call_id is None or self._call_id not in ids[start:end]:
            return None, None
        return ids.index(self._call_id, start, end), end - int(ids[end - 1] in self._stop_ids)


def _roles_before(rollout: Rollout) -> list[str]:
    """Return the role of the message before each assistant message of the completion."""
    messages = [*rollout.prompt, *rollout.messages]
    return [
        str(messages[index - 1].get("role", "")) if index else ""
        for index in range(len(rollout.prompt), len(messages))
        if messages[index].get("role") == "assistant"
    ]


def _parse_error_text(raw: str) -> str:
    """Return an error message for a call's text that says why it is invalid JSON, or that keys are missing."""
    text = raw.partition("</")[0].strip()
    try:
        json_value(text)
    except ValueError as error:
        return f"{_MALFORMED}: {error}"
    return f"{_MALFORMED} object with a name and arguments"


def _broken_call_name(raw: str) -> str:
    """Return the name of the tool in the text of a broken call, or "" if it contains none."""
    after = raw.partition('"name"')[2].partition('"')[2]
    return after.partition('"')[0] if after else ""


_FORMAT = "rollout"
_NOWHERE = Provenance(file="", lines=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory. `sampled` is 1 on the tokens that the model sampled (None: all of them).

    Each run of sampled tokens is one assistant message. `signals` are errors reported by the environment, as mappings
    with `turn` (number of the assistant message, from 0), `kind`, `message` and optionally a `hint`. `raised` says for
    each tool message, in order, whether the tool raised; without it, that is inferred from the message. `tools` are
    schemas by tool name.
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
    """Tokens [start, end) of a completion that the model sampled without interruption."""

    start: int
    end: int


def sampled_runs(rollout: Rollout) -> list[Run]:
    """Return the runs of sampled tokens in the completion, in order."""
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
    """Return the turn id of the n-th assistant message in a rollout."""
    return f"assistant-{number}"


def conversation_of(rollout: Rollout, runs: Sequence[Run]) -> Conversation:
    """Return the rollout as a conversation whose assistant turns contain their sampled ids; `assistant_id` gives the
    turn ids.

    A TRL rollout function returns a completion as a single message, even if it contains several turns. These turns then
    have only token ids.
    """
    turns = [_plain_turn(number, message) for number, message in enumerate(rollout.prompt)]
    if not is_parsed(rollout, runs):
        bare = [_assistant_turn({}, number, _run_ids(rollout, run)) for number, run in enumerate(runs)]
        return Conversation(id=rollout.rollout_id, format=_FORMAT, turns=(*turns, *bare))
    open_calls: list[ToolCall] = []
    number = 0
    raised = iter(rollout.raised) if rollout.raised is not None else None
    for index, message in enumerate(rollout.messages):
        if message.get("role") == "assistant":
            run = runs[number] if number < len(runs) else Run(0, 0)
            turn = _assistant_turn(message, number, _run_ids(rollout, run))
            open_calls = list(turn.calls)
            number += 1
        elif message.get("role") == "tool":
            turn = _result_turn(message, index, open_calls, None if raised is None else next(raised, False))
        else:
            turn = _plain_turn(len(rollout.prompt) + index, message)
        turns.append(turn)
    return Conversation(id=rollout.rollout_id, format=_FORMAT, turns=tuple(turns))


def is_parsed(rollout: Rollout, runs: Sequence[Run]) -> bool:
    """Return whether there is one assistant message for each run of sampled tokens."""
    return sum(message.get("role") == "assistant" for message in rollout.messages) == len(runs)


def _run_ids(rollout: Rollout, run: Run) -> tuple[int, ...]:
    return tuple(rollout.completion_ids[run.start : run.end])


def _plain_turn(number: int, message: Message) -> Turn:
    role = message.get("role")
    text = content_text(message.get("content"))
    if role == "assistant":
        calls = _parse_calls(message, f"prompt-{number}")
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
        calls=_parse_calls(message, name),
        provenance=_NOWHERE,
        token_ids=ids or None,
    )


def _result_turn(message: Message, index: int, open_calls: list[ToolCall], raised: bool | None) -> Turn:
    """Return a tool message as a turn, and remove the answered call from `open_calls`."""
    # TRL's results identify their tool but not their call, and the results of asynchronous tools come last.
    call = next((open_call for open_call in open_calls if open_call.name == message.get("name")), None)
    if call is None and open_calls:
        call = open_calls[0]
    if call is not None:
        open_calls.remove(call)
    content = content_text(message.get("content"))
    text, is_error = _parse_result(content) if raised is not False else (content, None)
    result = ToolResult(call_id=call.id if call else f"result-{index}", text=text, is_error=is_error)
    return Turn(id=f"result-{index}", role="tool", origin="tool", results=(result,), provenance=_NOWHERE)


def _parse_result(content: str) -> tuple[str, bool | None]:
    """Return the text of a tool result, and whether the tool raised an exception: True, or None if that is unknown.

    TRL writes an exception as `{'error': 'text'}`. A tool that did not raise may still report a failure in its text, so
    the flag is never False.
    """
    if content.startswith("{") and "error" in content[:12]:
        try:
            value = ast.literal_eval(content)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return content, None
        if isinstance(value, dict) and list(value) == ["error"]:
            return str(value["error"]), True
    return content, None


def _parse_calls(message: Message, turn: str) -> tuple[ToolCall, ...]:
    entries = [call for call in written_calls(message) if isinstance(call.entry, Mapping)]
    return tuple(_to_tool_call(call, f"{turn}-call-{number}") for number, call in enumerate(entries))


def _to_tool_call(written: WrittenCall, identity: str) -> ToolCall:
    # Parsed arguments are converted back to text, so that `tool_call` checks all calls against the same limits.
    arguments = written.arguments
    text = (
        arguments
        if arguments is None or isinstance(arguments, str)
        else json.dumps(arguments, ensure_ascii=False, default=str)
    )
    return tool_call(identity, str(written.name or ""), text)


def _signalled_sites(rollout: Rollout, conversation: Conversation) -> list[ErrorSite]:
    """Return the error sites that the environment reports. No failure rules are applied, since the environment knows
    who is to blame.
    """
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


def _find_signal(site: ErrorSite, rollout: Rollout) -> Mapping[str, Any] | None:
    prefix = f"{rollout.rollout_id}-signal-"
    return rollout.signals[int(site.id.removeprefix(prefix))] if site.id.startswith(prefix) else None


_MALFORMED = "The tool call is not valid JSON"
"""The beginning of the error message for a call that cannot be parsed."""
# Failures of tools that are Python functions, in addition to the rules for logs. The model sees an exception's text
# without its type; cases that the text does not settle are decided by the tool's schema (`_judged_by_schema`).
ROLLOUT_RULES: tuple[FailureRule, ...] = (
    # "Tool open_file not found." (TRL); not "Tool not found"
    rule("tool_not_found", r"^Tool \S.* not found\.?$", "not found", where="start", confidence=0.98),
    # "Unsupported tool call type: code" (TRL)
    rule("tool_not_found", r"^Unsupported tool call type", "unsupported tool call", where="start", confidence=0.95),
    # "read() got an unexpected keyword argument 'file'" and "read() missing 1 required positional argument: 'path'"
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
    # A tool that returns its error as text; `channels="other"`, because its name does not show that it reads files.
    # "Error: file a.py does not exist" and "no such file or directory: a.py"; not "Created the file that was not found"
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
    # "The tool call is not valid JSON: Expecting value", from `_parse_error_text`
    rule("input_validation", rf"^{_MALFORMED}", _MALFORMED.lower(), where="start", confidence=0.98),
    # "main.read() argument after ** must be a mapping, not list": the arguments were not an object
    rule(
        "input_validation",
        r"^.*argument after \*\* must be a mapping",
        "must be a mapping",
        where="start",
        confidence=0.95,
    ),
)


def _judged_by_schema(
    sites: Sequence[ErrorSite], conversation: Conversation, tools: Mapping[str, Mapping[str, Any]]
) -> list[ErrorSite]:
    """Return the sites after deciding, from the calls' arguments, whether the model is to blame for each exception.

    The model is to blame if the arguments do not match the tool's schema, whatever the tool then failed at, or if the
    error message names an argument. Other exceptions are blamed on nobody and are not trained on.
    """
    calls = {call.id: call for turn in conversation.turns for call in turn.calls}
    return [_blame_for_arguments(site, calls.get(site.call_id), tools.get(site.tool)) for site in sites]


def _blame_for_arguments(site: ErrorSite, call: ToolCall | None, schema: Mapping[str, Any] | None) -> ErrorSite:
    if site.kind != "other" or site.blame != "unknown" or site.is_soft or call is None:
        return site
    does_not_fit = bool(parameter_facts(call, site.evidence_text, schema))
    # "path": in "path must not be empty"; not in "the paths are empty"
    names = [name for name in call.arguments if re.search(rf"\b{re.escape(name)}\b", site.evidence_text)]
    if not (does_not_fit or names):
        return site
    why = "its arguments do not fit the schema" if does_not_fit else f"the message names its argument {names[0]}"
    return replace(
        site, kind="input_validation", blame="model", confidence=0.8, is_kept=True, reason=f"a tool raised: {why}"
    )


# Python raises this error before it calls the function, so a wrapper cannot record it.
_NOT_A_MAPPING = "argument after ** must be a mapping"


class ToolRecord:
    """A record of which tool calls in a rollout raised an exception. An error returned as text is not an exception."""

    def __init__(self) -> None:
        self._raised: dict[str, list[bool]] = {}

    def wrap_tools(self, tools: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Return the tool functions, wrapped so that they record whether each call raised an exception."""
        return {name: self._wrap_tool(name, tool) for name, tool in tools.items()}

    def _wrap_tool(self, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        # The wrapper accepts any arguments, so that wrong ones raise the tool's own TypeError.
        raised = self._raised.setdefault(name, [])

        async def outcome(coroutine: Any, index: int) -> Any:
            result = await coroutine
            raised[index] = False
            return result

        @functools.wraps(tool)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            raised.append(True)  # until the call returns
            index = len(raised) - 1
            result = tool(*args, **kwargs)
            if inspect.iscoroutine(result):
                return outcome(result, index)
            raised[index] = False
            return result

        return recorded

    def raised_by_message(self, messages: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Return, for each tool message, whether its call raised. A call to an unknown tool counts as raised."""
        remaining = {name: iter(raised) for name, raised in self._raised.items()}
        return [_did_next_call_raise(remaining, message) for message in messages if message.get("role") == "tool"]


def _did_next_call_raise(remaining: dict[str, Iterator[bool]], message: Mapping[str, Any]) -> bool:
    name, content = str(message.get("name", "")), message.get("content")
    never_ran = isinstance(content, str) and content.startswith("{'error'") and _NOT_A_MAPPING in content
    return True if never_ran or name not in remaining else next(remaining[name], True)


def gather_rollouts(
    prompts: Sequence[Any],
    generated: tuple[Any, ...],
    *,
    name: str,
    environments: Sequence[Any] | None,
    tools_of: Callable[[int], Sequence[Any]],
    raised: Sequence[ToolRecord] | None = None,
) -> list[Rollout]:
    """Return one rollout per sample, in the order of `prompts`. Call this before the samples are shuffled.

    `generated` is the return value of TRL's `_generate`. Environments are pooled and reused, so their error reports are
    read now: from an environment's attribute `signals`, or from the output `signals` of a rollout function. A rollout
    function may also return the `messages` of each rollout, which TRL treats as one turn, and the schemas of its
    `tools`.
    """
    prompt_ids, completion_ids, masks, completions, _, extra, *_ = generated
    fields: Mapping[str, Any] = extra if isinstance(extra, Mapping) else {}
    rollouts: list[Rollout] = []
    for number, prompt in enumerate(prompts):
        signals: Any = fields["signals"][number] if "signals" in fields else None
        if signals is None and environments:
            signals = getattr(environments[number], "signals", None)
        completion = fields["messages"][number] if "messages" in fields else completions[number]
        messages: list[Any] = (
            completion if isinstance(completion, list) else [{"role": "assistant", "content": str(completion)}]
        )
        rollouts.append(
            Rollout(
                rollout_id=f"{name}-{number}",
                prompt_ids=prompt_ids[number],
                completion_ids=completion_ids[number],
                sampled=None if masks is None else masks[number],
                prompt=prompt if isinstance(prompt, list) else [],
                messages=messages,
                signals=_check_signals(signals, number),
                raised=None if raised is None else raised[number].raised_by_message(messages),
                tools=schemas_of(fields["tools"][number] if "tools" in fields else tools_of(number)),
            )
        )
    return rollouts


def _check_signals(signals: Any, number: int) -> tuple[Mapping[str, Any], ...]:
    """Return copies of the environment's signals. A copy is needed because a reset clears the environment's list.

    Raises InputError unless each signal is a mapping with an integer `turn`.
    """
    if signals is None:
        return ()
    if isinstance(signals, str | Mapping) or not isinstance(signals, Sequence):
        expected = "a list of mappings with turn, kind and message"
        raise InputError(explain(f"signals of rollout {number}", got=type(signals).__name__, expected=expected))
    for signal in signals:
        if not isinstance(signal, Mapping) or not isinstance(signal.get("turn"), int):
            expected = "a mapping with `turn` (number of the assistant message, from 0), `kind` and `message`"
            raise InputError(explain(f"signal of rollout {number}", got=repr(signal)[:80], expected=expected))
    return tuple(dict(signal) for signal in signals)


# Schemas parsed from the docstrings of functions. Weak references, so that a tool can be freed.
_schemas: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()


def schemas_of(tools: Sequence[Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return parameter schemas by tool name. The schema of a function is made from its signature and docstring, as
    in the prompt.
    """
    schemas = [tool if isinstance(tool, Mapping) else _schema(tool) for tool in tools]
    functions: list[Any] = [schema.get("function", schema) for schema in schemas]
    return {str(function["name"]): function.get("parameters") or {} for function in functions}


def _schema(tool: Callable[..., Any]) -> Mapping[str, Any]:
    # A bound method is a new object at every access, so the cache is keyed by its function.
    function = getattr(tool, "__func__", tool)
    if function not in _schemas:
        from transformers.utils.chat_template_utils import get_json_schema

        _schemas[function] = get_json_schema(tool)
    return _schemas[function]
