"""Let a model write the hints: one short, general rule per error, checked before it is used.

A hint must not contain what the session shows only later, or the student learns to expect knowledge that it will not
have. So the model sees the failing call and its result, but nothing after them. A hint is rejected if it contains a
name that occurs only later in the session, is too long, quotes the failing call, or contains a secret. A site whose
hint was rejected gets its template hint.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from composer_replication.action_text import arguments_text
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.context import (
    MAX_SENTENCES,
    HintContext,
    correct_texts,
    count_sentences,
    failing_result_text,
    find_call,
)
from composer_replication.hint_generator.facts import collect_facts
from composer_replication.hint_generator.hint_sources import HintWriter, quoted_call_parts
from composer_replication.privacy import Scrubber
from composer_replication.privacy.outgoing import Find, LastGate
from composer_replication.teacher_replay.ask_and_retry import (
    KEPT_BACK,
    NOT_SENT,
    BudgetedClient,
    TeacherAnswer,
    run_jobs,
)
from composer_replication.teacher_replay.endpoint import TeacherClient
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import ReplayOptions, teachers_of
from composer_replication.teacher_replay.requests import RequestBuilder, fence_text
from composer_replication.teacher_replay.teachers import check_cap, to_dollars
from composer_replication.types import Conversation, ErrorSite, Message, Turn

_SYSTEM = (
    "You coach a coding agent. You are shown one tool call of it, the error that came back, and what is known to be "
    "right. Write the hint it should have read just before that call: one or two sentences of at most 40 words in all "
    "that say what to do, in words that hold for the next case too. Name the right tool, name or value where the error "
    "or what is known to be right tells it. Quote nothing of the call itself: no path, name, text or option of it, not "
    "even to warn of it. No greeting, no solution of its task."
)
QUOTES = "quotes the failing call"
_MAX_WORDS = 60
# Maximum number of characters shown to the model, for each of the arguments, the result and the facts.
_MAX_SHOWN = 2000
# A component of a name or path that occurs only later is knowledge from the future. Plain words of later text are not:
# any rule contains them.
# "any word" -> "any"
_WORDS = re.compile(r"\S+")
# "src/a.py"; "maxTokens"; "v2.1"; not "the parameter"
_NAMES = re.compile(r"\S*[\d_./\\][^\s.,;:!?]\S*|\S*[a-z][A-Z]\S*")
# "src/main_test.py" -> "src"
_PART = re.compile(r"[^\W_]+")


class WrittenHints(NamedTuple):
    """The hints that a model wrote, and the outcome of the other requests."""

    texts: Mapping[str, str]
    """The accepted hints, by site id."""
    counts: Mapping[str, int]
    """The number of hints written, and the number rejected for each reason."""
    held_back: Mapping[str, str] = MappingProxyType({})
    """Sites whose request was withheld because it may contain a secret, each with the finding."""
    cost_usd: float = 0.0
    """The cost of the answers in US dollars. A cached answer counts with its original price."""

    def writer(self) -> HintWriter:
        """Return the function to pass as `write_hint(sources=("writer", "template", "raw_error"), writer=...)`."""

        def look_up(site: ErrorSite, _conversation: Conversation, _facts: HintContext) -> str | None:
            return self.texts.get(site.id)

        return look_up


async def write_hints(
    sites: Iterable[tuple[ErrorSite, Conversation]],
    teacher: Mapping[str, Any],
    *,
    max_total_usd: float,
    api_key: str | None = None,
    options: ReplayOptions,
    environment: Mapping[str, str],
) -> WrittenHints:
    """Ask one model for a hint on every kept site, using the client, the spending cap and the cache of teacher replays.

    A request that may contain a secret is not sent. Raises InputError if the spending cap allows no request at all.
    """
    # The hint writer is configured, queried and paid like a replay teacher.
    (writer,) = teachers_of([teacher], api_key, replace(options, environment=environment))
    texts, held_back, counts = dict[str, str](), dict[str, str](), Counter[str]()
    costs_nano: list[int] = []
    cap_errors: list[str] = []
    gate = options.last_gate or LastGate(environment)
    builder = RequestBuilder(writer, options.settings._replace(fence=False))  # the prompt delimits its data itself
    client = TeacherClient(max_concurrency=options.max_concurrency, timeout_s=options.timeout_s)
    with TeacherStore(options.cache) as store:
        asker = BudgetedClient(client, store, cap_nano=check_cap(max_total_usd), gate=gate, patience=options.patience)

        async def write_one(pair: tuple[ErrorSite, Conversation]) -> None:
            site, conversation = pair
            answer = await _ask_teacher(asker, builder, gate, site, conversation)
            text = _reply_text(answer)
            costs_nano.append((answer.reply or {}).get("cost_nano") or 0)
            if answer.refusal == "secret":
                held_back[site.id] = answer.error or ""
            if answer.refusal == "cap":
                cap_errors.append(answer.error or "")
                counts[KEPT_BACK] += 1
                return
            reason = (answer.error and "no answer") or _reason_to_reject(text, site, conversation)
            counts[f"refused: {reason}" if reason else "written"] += 1
            if not reason:
                texts[site.id] = text

        async with client:
            await run_jobs((pair for pair in sites if pair[0].is_kept), write_one, num_workers=options.max_concurrency)
    if cap_errors and len(cap_errors) == len(costs_nano):
        fix = "Raise the cap (--max-usd, sites.max_usd), or use templates only."
        got = f"${max_total_usd:g}; {cap_errors[0].removeprefix('budget: ')}"
        raise InputError(explain("spending cap for hints", got=got, expected="enough for one request", fix=fix))
    return WrittenHints(texts, counts, held_back, to_dollars(sum(costs_nano)))


async def _ask_teacher(
    asker: BudgetedClient, builder: RequestBuilder, gate: LastGate, site: ErrorSite, conversation: Conversation
) -> TeacherAnswer:
    """Return the model's answer, or an error if the request may contain a secret."""
    label = f"site {site.id}"
    if (find := _find_secret_in_full_text(site, conversation, gate, label)) is not None:
        return TeacherAnswer(None, f"{NOT_SENT}: {find}", False, 0.0, 0, "secret")
    return await asker.ask(builder.build(_build_prompt(site, conversation), None, site.conversation_id, label=label))


def _reply_text(answer: TeacherAnswer) -> str:
    """Return the answer as a single line of text."""
    message = (answer.reply or {}).get("message") or {}
    return " ".join(str(message.get("content") or "").split())


def _find_secret_in_full_text(site: ErrorSite, conversation: Conversation, gate: LastGate, label: str) -> Find | None:
    """Return the first suspected secret in the untruncated prompt, if any.

    A truncated secret would not be recognized.
    """
    *_, message = _build_prompt(site, conversation, max_shown=None)
    return gate.look(message, f"{label}, message 2 (user)")


def _build_prompt(site: ErrorSite, conversation: Conversation, *, max_shown: int | None = _MAX_SHOWN) -> list[Message]:
    """Return the prompt for a site: the failing call, its result and the facts, each cut to `max_shown` characters.

    It contains nothing from later in the session.
    """
    call, error_text = find_call(site, conversation), failing_result_text(site, conversation)
    arguments = arguments_text(call)[:max_shown] if call else ""
    right = ", ".join(dict.fromkeys(correct_texts(collect_facts(site, conversation))))[:max_shown]
    facts_text = f"\n\nKnown to be right: {right}" if right else ""
    rule, data = fence_text(f"Arguments: {arguments}\n\nError: {error_text[:max_shown]}{facts_text}")
    return [
        {"role": "system", "content": f"{_SYSTEM}\n\n{rule}"},
        {"role": "user", "content": f"Tool: {site.tool}\nKind of error: {site.kind}\n{data}"},
    ]


def _reason_to_reject(text: str, site: ErrorSite, conversation: Conversation) -> str | None:
    """Return the reason to reject a written hint, or None if it may be used."""
    if not text:
        return "empty"
    if len(text.split()) > _MAX_WORDS or count_sentences(text) > MAX_SENTENCES:
        return "too long"
    # A fresh scrubber redacts only text that looks like a secret without context.
    if Scrubber().scope().text(text) != text:
        return "holds a secret"
    if quoted_call_parts(text, find_call(site, conversation), correct_texts(collect_facts(site, conversation))):
        return QUOTES
    before, after = _texts_before_and_after(site, conversation)
    # "conftest.py" in the hint leaks the future if the session mentions the file only after the error.
    earlier, later = _identifier_parts(before, _WORDS), _identifier_parts(after, _NAMES)
    if any(part in later and part not in earlier for part in _identifier_parts(text, _WORDS)):
        return "knows what comes later"
    return None


def _identifier_parts(text: str, words: re.Pattern[str]) -> set[str]:
    """Return the components of names and paths in lower case, if they have at least four letters or three digits."""
    parts = (part for word in words.findall(text) for part in _PART.findall(word))
    return {part.casefold() for part in parts if len(part) >= 4 or (part.isdigit() and len(part) >= 3)}


def _texts_before_and_after(site: ErrorSite, conversation: Conversation) -> tuple[str, str]:
    """Return all text up to and including the failing result, and all text after it."""
    last = site.result_turn_id or site.turn_id
    index = next((number for number, turn in enumerate(conversation.turns) if turn.id == last), None)
    if index is None:
        got = f"turn {last}, which conversation {conversation.id} does not contain"
        raise InputError(explain(f"site {site.id}", got=got, expected="a site from this conversation"))
    before, after = conversation.turns[: index + 1], conversation.turns[index + 1 :]
    return "\n".join(map(_turn_text, before)), "\n".join(map(_turn_text, after))


def _turn_text(turn: Turn) -> str:
    """Return the text, thinking, calls and results of a turn."""
    calls = [arguments_text(call) for call in turn.calls]
    return "\n".join([turn.text, turn.thinking, *calls, *(result.text for result in turn.results)])
