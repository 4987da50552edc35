"""Which inline sub-agent a record of a sidechain belongs to: several may work at once, and their records interleave.

Each sidechain begins with the prompt that a call of the main thread gave it. A result belongs where its call was made,
any other record where its parent stands. Where that cannot be, a chain that waits for its next record and that nobody
else goes on from is the one that misses it; without such a chain it begins one of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from composer_replication.ingestion.formats.claude_code.record import Entry, Node

# Sub-agents that work at the same time are few.
_NUM_AT_WORK = 64


@dataclass(slots=True)
class Chain:
    """One inline sub-agent: where it stands, and until when other records name its own."""

    name: str
    last_uuid: str
    agent: str | None = None
    tail: Node | None = None
    latest: set[str] = field(default_factory=set)
    """The records of its last message, and what followed: what comes next names one of these."""
    latest_key: str = ""
    named_until: int = -1

    @property
    def waits(self) -> bool:
        """Whether something is to follow: an answer, a result, or the rest of a message."""
        node = self.tail
        return node is None or node.kind != "assistant" or bool(node.called) or not _says_something(node)

    def take(self, entry: Entry, above: str | None) -> None:
        self.last_uuid = entry.uuid
        node = entry.node
        if node is None or not node.is_message:
            if above in self.latest:
                self.latest.add(entry.uuid)
            return
        self.tail = node
        is_next = node.kind == "assistant" and not node.is_harness and node.message_key != self.latest_key
        if is_next or (node.begins_turn and node.kind == "user"):
            self.latest = set()
            self.latest_key = node.message_key
        self.latest.add(entry.uuid)


class Sidechains:
    """Takes the sidechains' records in order; `of` says for each to which chain it belongs."""

    def __init__(self, entries: list[Entry]) -> None:
        self.of: dict[str, Chain] = {}
        self._by_age: dict[str, Chain] = {}
        """All of them, the one written to last at the end."""
        self._by_agent: dict[Any, Chain] = {}
        self._by_message: dict[Any, Chain] = {}
        self._by_missing: dict[Any, Chain] = {}
        self._callers: dict[str, dict[str, Chain]] = {}
        self._at = -1
        side = [entry for entry in entries if entry.is_sidechain]
        self._last_named = {entry.parent: at for at, entry in enumerate(side) if isinstance(entry.parent, str)}
        nodes = [entry.node for entry in side if entry.node is not None]
        self._num_answers = Counter(call_id for node in nodes for call_id in node.answered)
        self._prompts = _prompts_of_calls(entries) if side else set[str]()

    def parent_of(self, entry: Entry, known: Mapping[str, str | None]) -> tuple[str | None, bool]:
        """What it hangs from, and whether that is a guess, whatever it says."""
        self._at += 1
        named_parent = entry.parent if isinstance(entry.parent, str) and entry.parent in known else None
        linked = self.of.get(named_parent) if named_parent is not None else None
        names_other = named_parent is not None and linked is None
        chain = None if self._is_root(entry, names_other) else self._chain(entry, linked)
        if chain is None:
            parent = None if linked is not None else named_parent
            chain = Chain(entry.uuid, entry.uuid)
            is_guess = linked is not None
        else:
            parent = named_parent if chain is linked else chain.last_uuid
            is_guess = chain is not linked
        self._take(entry, chain, parent)
        if named_parent is None and isinstance(entry.parent, str):
            self._by_missing.setdefault(entry.parent, chain)
        return parent, is_guess

    def _is_root(self, entry: Entry, names_other: bool) -> bool:
        """Whether it begins a chain: a boundary, or a prompt that names none of a sidechain, or that a call gave."""
        node = entry.node
        if node is not None and node.is_boundary:
            return True
        if node is None or node.kind != "user" or node.answered:
            return False
        return names_other or not isinstance(entry.parent, str) or first_text(node) in self._prompts

    def _chain(self, entry: Entry, linked: Chain | None) -> Chain | None:
        node = entry.node
        fits = linked is not None and (node is None or self._fits(entry, node, linked))
        caller = None if node is None else self._caller(node, linked, fits)
        if caller is not None:
            return caller
        agent = self._by_agent.get(entry.agent)
        if agent is not None and (linked is None or linked.agent != entry.agent):
            return agent
        for chain in self._said_to_be_in(entry):
            if chain is not linked and (not fits or (chain.waits and self._is_open(chain))):
                return chain
        return linked if fits else self._next_waiting(entry) or linked

    def _said_to_be_in(self, entry: Entry) -> Iterator[Chain]:
        """By its message's other records, or by others that name the same missing parent."""
        node = entry.node
        key = node.message_key if node is not None and node.kind == "assistant" else None
        chains = (self._by_message.get(key), self._by_missing.get(entry.named_parent or ""))
        return (chain for chain in chains if chain is not None)

    def _caller(self, node: Node, linked: Chain | None, fits: bool) -> Chain | None:
        """Where its calls were made; of a call with two results the one whose link fits may bear a wrong name."""
        for call_id in node.answered:
            chains = self._callers.get(call_id)
            if chains and linked is not None and linked.name in chains:
                return linked
            if chains and not (fits and self._num_answers[call_id] > 1):
                return next(reversed(chains.values()))
        return None

    def _fits(self, entry: Entry, node: Node, linked: Chain) -> bool:
        is_same_message = node.kind == "assistant" and node.message_key == linked.latest_key
        return is_same_message or entry.named_parent in linked.latest or node.attachment is not None

    def _is_open(self, chain: Chain) -> bool:
        return chain.named_until <= self._at

    def _next_waiting(self, entry: Entry) -> Chain | None:
        """The chain written to last of those that miss a record; one that seems finished may miss the call of a result,
        or anything where nothing has a name."""
        latest = islice(reversed(self._by_age.values()), _NUM_AT_WORK)
        opened = [chain for chain in latest if self._is_open(chain)]
        waiting = next((chain for chain in opened if chain.waits), None)
        is_result = entry.node is not None and bool(entry.node.answered)
        return waiting or (opened[0] if opened and (is_result or not isinstance(entry.parent, str)) else None)

    def _take(self, entry: Entry, chain: Chain, parent: str | None) -> None:
        self.of[entry.uuid] = chain
        chain.take(entry, parent)
        chain.named_until = max(chain.named_until, self._last_named.get(entry.uuid, -1))
        self._by_age.pop(chain.name, None)
        self._by_age[chain.name] = chain
        if entry.agent is not None:
            chain.agent = chain.agent or entry.agent
            self._by_agent.setdefault(entry.agent, chain)
            if parent is None:
                self._by_agent[entry.agent] = chain
        if entry.node is not None and entry.node.kind == "assistant":
            self._by_message.setdefault(entry.node.message_key, chain)
            for call_id in entry.node.called:
                self._callers.setdefault(call_id, {})[chain.name] = chain


def first_text(node: Node) -> str:
    return "\n".join(block["text"] for block in node.blocks if isinstance(block.get("text"), str)).strip()


def prompt_of(block: dict[str, Any]) -> str | None:
    """The prompt that a call gives to a sub-agent, where it is one that does."""
    arguments = block.get("input")
    if block.get("type") != "tool_use" or not isinstance(arguments, dict):
        return None
    prompt = cast("dict[str, Any]", arguments).get("prompt")
    return prompt.strip() if isinstance(prompt, str) else None


def _prompts_of_calls(entries: list[Entry]) -> set[str]:
    nodes = (entry.node for entry in entries if entry.node is not None and entry.node.kind == "assistant")
    prompts = {prompt_of(block) for node in nodes for block in node.blocks}
    return {prompt for prompt in prompts if prompt}


def _says_something(node: Node) -> bool:
    return any(block.get("type") not in ("thinking", "redacted_thinking") for block in node.blocks)
