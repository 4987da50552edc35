"""Thousands of damaged Claude Code logs: every record that was not damaged stays in its conversation and in order."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from claude_doubts import cannot_be_told, looks_like_a_rewind
from claude_mutations import LINKS, damaged, with_line
from claude_pieces import lines_of, lost, pieces
from claude_sessions import long_session, session, sub_agent, sub_agents

from composer_replication.ingestion.formats import claude_code
from composer_replication.ingestion.source_files import IngestReport, SourceFile

NUM_MUTATIONS = 3_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 150
FIXTURES = Path(__file__).parents[4] / "shared" / "fixtures" / "sessions" / "claude_code"
KINDS = (*LINKS, "swap lines", "truncate", "flip bits", "drop a line", "duplicate a line", "steal a uuid", "null")


def fixtures():
    for path in sorted(FIXTURES.rglob("*.jsonl")) if FIXTURES.is_dir() else ():
        lines = [line for line in path.read_bytes().splitlines() if isinstance(json.loads(line), dict)]
        yield path.name, lines


AGENTS = [("s-3.jsonl", sub_agents()), ("s-4.jsonl", sub_agents(with_names=True))]
LOGS = [("s-1.jsonl", session()), ("s-2.jsonl", long_session()), ("agent-abc.jsonl", sub_agent()), *AGENTS, *fixtures()]


def read(path, data):
    path.write_bytes(data)
    return list(claude_code.read(SourceFile(path, path.name), IngestReport()))


class Undamaged:
    """A log as it is: its lines that hold messages, by conversation and in order."""

    def __init__(self, path, log):
        self._path, self.log = path, log
        read_whole = lines_of(read(path, b"\n".join(log) + b"\n"))
        self._told = [(kind, [line for line in lines if pieces(log[line - 1])]) for kind, lines in read_whole]
        self._kept = {line: pieces(log[line - 1]) for _, lines in self._told for line in lines}

    def problems(self, damage):
        """What became of lines that were not damaged: "lost", "in another conversation", "in another order"."""
        conversations = read(self._path, damage.file())
        intact = {at: was for at, was in damage.intact().items() if was in self._kept}
        gone = {line for line, _, _ in lost(conversations, {at: self._kept[was] for at, was in intact.items()})}
        if set(intact.values()) - {was for at, was in intact.items() if at not in gone}:
            return "lost"
        apart = damage.moved() | damage.without_any_link(self.log)
        if damage.what == "swap lines" and any(b'"isSidechain": true' in line for line in self.log):
            return None  # where several agents' records interleave, nothing says which line stood between which
        placed = {at: was for at, was in intact.items() if was not in apart}
        for what, left_out in (
            ("in another conversation", set()),
            ("in another order", damage.of_one_message(self.log)),
        ):
            known = {at: was for at, was in placed.items() if was not in left_out}
            wanted = [(kind, [line for line in lines if line in set(known.values())]) for kind, lines in self._told]
            found = lines_of(conversations, known)
            if what == "in another conversation":
                wanted, found = ([(kind, sorted(lines)) for kind, lines in each] for each in (wanted, found))
            if sorted(each for each in wanted if each[1]) != sorted(found):
                return what
        return None


@pytest.mark.parametrize("log", [session(), long_session(4, 2)], ids=["everything", "long"])
def test_any_record_may_name_any_other_as_its_parent(tmp_path, log):
    whole, records = Undamaged(tmp_path / "s-1.jsonl", log), [json.loads(line) for line in log]
    step = 1 if len(log) < 40 else 11
    for at, record in enumerate(records):
        for named in records[at % step :: step]:
            line = json.dumps({**record, "parentUuid": named["uuid"]}).encode()
            damage = with_line(log, at, line, "wrong parent")
            if not looks_like_a_rewind(log, damage):
                assert whole.problems(damage) is None, (at + 1, named["uuid"])


@pytest.mark.parametrize("with_names", [False, True], ids=["nameless", "named"])
def test_any_record_of_two_agents_at_once_may_name_any_other_or_none(tmp_path, with_names):
    log = sub_agents(with_names, num_steps=2)
    whole, records = Undamaged(tmp_path / "s-1.jsonl", log), [json.loads(line) for line in log]
    for at, record in enumerate(records):
        for named in (None, "nobody", *(each["uuid"] for each in records[at % 3 :: 3])):
            damage = with_line(log, at, json.dumps({**record, "parentUuid": named}).encode(), "wrong parent")
            if not cannot_be_told(log, damage):
                assert whole.problems(damage) is None, (at + 1, named)


def test_damaged_links_lines_and_bytes_cost_no_other_record(tmp_path, note):
    rng, problems, unclear = random.Random(1), Counter(), Counter()
    logs = {name: Undamaged(tmp_path / name, log) for name, log in LOGS}
    number = 0
    while number < NUM_MUTATIONS:
        kind = KINDS[number % len(KINDS)]
        name, log = rng.choice(LOGS)
        damage = damaged(rng, kind, log)
        problem = logs[name].problems(damage)
        if cannot_be_told(log, damage):  # but for token counts, which not every log has
            unclear[problem is not None] += 1
            continue
        number += 1
        if problem is not None:
            problems[kind, name, problem] += 1
    note(
        f"damaged claude_code logs: {NUM_MUTATIONS} mutations of {len(LOGS)} sessions, {problems.total()} of which "
        f"cost records that were not damaged, or moved them; {unclear.total()} more say what a rewind, one message or "
        f"another agent says, and {unclear[True]} of them are read as that (full: 3000)"
    )
    assert not problems
