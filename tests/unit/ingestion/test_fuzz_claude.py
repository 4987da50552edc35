"""Damaged and random Claude Code logs: reading never raises, and damage never costs a record beside it."""

from __future__ import annotations

import json
import os
import random
import traceback
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from claude_mutations import DEEP, HUGE, KINDS, WRONG, damaged, field_paths, with_field, with_line
from claude_pieces import lost, pieces
from claude_records import Log, call, text
from claude_sessions import session, sub_agent
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.action_text import action_text
from composer_replication.ingestion.formats import claude_code
from composer_replication.ingestion.source_files import IngestReport, SourceFile
from composer_replication.ingestion.states import states

NUM_MUTATIONS = 20_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 1_000
FIXTURES = Path(__file__).parents[4] / "shared" / "fixtures" / "sessions" / "claude_code"
WINDOW = 24
MAX_SHOWN = 8


def fixture_windows():
    """Stretches of the real logs: whole objects, each uuid once."""
    for path in sorted(FIXTURES.rglob("*.jsonl")) if FIXTURES.is_dir() else ():
        known, lines = set(), []
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            if isinstance(record, dict) and len(line) < 20_000 and record.get("uuid", object()) not in known:
                known.add(record.get("uuid", object()))
                lines.append(line)
        rng = random.Random(path.name)
        for start in sorted(rng.sample(range(len(lines)), min(6, len(lines)))):
            yield path.name, lines[start : start + WINDOW]


LOGS = [("s-1.jsonl", session()), ("agent-abc.jsonl", sub_agent()), *fixture_windows()]


def read(path, data, **options):
    path.write_bytes(data)
    return list(claude_code.read(SourceFile(path, path.name), IngestReport(), **options))


def problem(path, log, damage):
    """None, or what went wrong: an exception with its place, or the pieces of intact lines that are gone."""
    data = damage.file()
    try:
        assert isinstance(claude_code.sniff(data, path), bool)
        conversations = read(path, data, with_branches=True)
        for conversation in conversations:
            for _, turn in states(conversation):
                action_text(turn)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "composer_replication" in frame.filename] or frames
        return f"{damage.what}: {type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
    return f"{damage.what}: lost a piece" if lost_everywhere(conversations, log, damage.intact()) else None


def lost_everywhere(conversations, log, intact):
    """The pieces that came from none of the places of their line: of two equal lines either may be the one read."""
    gone = Counter()
    for number, was in intact.items():
        missing = lost(conversations, {number: pieces(log[was - 1])})
        gone.update({(was, kind, content) for _, kind, content in missing})
    places = Counter(intact.values())
    return [piece for piece, count in gone.items() if count >= places[piece[0]]]


def assert_none(problems, examples):
    shown = [f"{count} x {what}\n{examples[what][:600]!r}" for what, count in problems.most_common(MAX_SHOWN)]
    assert not problems, "\n".join(shown)


@pytest.mark.parametrize(("name", "log"), LOGS[:2])
def test_the_logs_are_whole_before_any_damage(tmp_path, name, log):
    conversations = read(tmp_path / name, b"\n".join(log), with_branches=True)
    assert lost(conversations, {number: pieces(line) for number, line in enumerate(log, start=1)}) == []


def test_the_check_sees_a_lost_record(tmp_path):
    log = session()
    conversations = read(tmp_path / "s-1.jsonl", b"\n".join(log[:-1]), with_branches=True)
    assert lost(conversations, {len(log): pieces(log[-1])}) == [(len(log), "text", "going on")]
    twice = {len(log): len(log), len(log) + 1: len(log)}  # of two copies one has to be read
    assert lost_everywhere(conversations, log, twice) == [(len(log), "text", "going on")]


def test_random_damage_never_raises_and_never_costs_a_neighbour(tmp_path, note):
    rng, problems, examples = random.Random(0), Counter(), {}
    for number in range(NUM_MUTATIONS):
        name, log = rng.choice(LOGS if number % 2 else LOGS[:2])
        damage = damaged(rng, KINDS[number % len(KINDS)], log)
        what = problem(tmp_path / name, log, damage)
        if what is not None:
            problems[what] += 1
            examples.setdefault(what, b"\n".join(line for line, was in damage.lines if was is None))
    note(f"fuzz claude_code: {NUM_MUTATIONS} mutations of {len(LOGS)} logs, {problems.total()} problems (full: 20000)")
    assert_none(problems, examples)


def test_null_and_wrong_types_in_every_field_never_raise_and_never_cost_a_neighbour(tmp_path, note):
    name, log = LOGS[0]
    seen, problems, examples, count = set(), Counter(), {}, 0
    for at, line in enumerate(log):
        record = json.loads(line)
        for path in field_paths(record):
            shape = (record["type"], *(each for each in path if isinstance(each, str)))
            if shape in seen:
                continue
            seen.add(shape)
            for raw in (None, *WRONG, *HUGE, *DEEP[::5]):
                count += 1
                broken = with_field(line, path, raw)
                what = problem(tmp_path / name, log, with_line(log, at, broken, f"wrong {path}"))
                if what is not None:
                    problems[what] += 1
                    examples.setdefault(what, broken)
    note(f"fuzz claude_code: {len(seen)} fields, {count} wrong values, {problems.total()} problems")
    assert_none(problems, examples)


def test_a_web_export_with_wrong_values_never_raises(tmp_path):
    path, log = tmp_path / "export.json", LOGS[0][1]
    for at, line in enumerate(log):
        for field in field_paths(json.loads(line)):
            for raw in (b"null", b"[]", b"{}"):
                lines = [*log[:at], with_field(line, field, raw), *log[at + 1 :]]
                read(path, b'{"loglines":[' + b",".join(lines) + b"]}")
    for document in (b"null", b"[]", b'{"loglines":null}', b'{"loglines":{}}', b'{"loglines":[[],1,null]}', b"\x00"):
        assert read(path, document) == []


# Random logs as graphs of parent pointers.
PARENTS = st.one_of(st.none(), st.integers(0, 14), st.just("previous"), st.just("self"), st.just("nowhere"))
USAGE = st.dictionaries(st.sampled_from(["input_tokens", "output_tokens"]), st.integers(0, 50))
ENTRY = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["user", "assistant", "assistant", "result", "result", "progress", "boundary"]),
        "parent": PARENTS,
        "message": st.integers(0, 5),
        "usage": USAGE,
        "call": st.integers(0, 7),
        "is_sidechain": st.booleans(),
    }
)


def build(entries):
    """A log; the records of one message lie on one side (main thread or sidechain), as they do in real logs."""
    log = Log()
    side = {entry["message"]: entry["is_sidechain"] for entry in entries if entry["kind"] == "assistant"}
    for number, entry in enumerate(entries):
        parent = {"self": f"n{number}", "previous": f"n{number - 1}"}.get(entry["parent"], entry["parent"])
        parent = f"n{parent}" if isinstance(parent, int) else parent
        fields = {"uuid": f"n{number}", "parent": parent, "isSidechain": entry["is_sidechain"]}
        if entry["kind"] == "user":
            log.user(f"text {number}", **fields)
        elif entry["kind"] == "assistant":
            fields["isSidechain"] = side[entry["message"]]
            parts = [text(f"text {number}"), call(f"c{number}")]
            log.assistant(f"m{entry['message']}", *parts, usage=entry["usage"], **fields)
        elif entry["kind"] == "result":
            log.result(f"c{entry['call']}", f"result {number}", **fields)
        elif entry["kind"] == "boundary":
            log.add("system", **fields, subtype="compact_boundary", logicalParentUuid=f"n{entry['call']}")
        else:
            log.add("progress", **fields)
    return log


def largest_usage(records):
    largest = defaultdict(Counter)
    for record in records:
        if record["type"] == "assistant":
            largest[record["message"]["id"]] |= Counter(record["message"].get("usage", {}))
    return largest


@pytest.fixture(scope="module")
def log_file(tmp_path_factory):
    return tmp_path_factory.mktemp("random") / "s-1.jsonl"


LOGS_OF_ANY_SHAPE = st.lists(ENTRY, max_size=15).map(build)


@given(log=LOGS_OF_ANY_SHAPE)
def test_any_graph_of_records_gives_every_line_once_and_always_the_same(log_file, log):
    conversations = read(log_file, log.lines(), with_branches=True)
    assert conversations == read(log_file, log.lines(), with_branches=True)
    assert len({conversation.id for conversation in conversations}) == len(conversations)
    turns = [turn for conversation in conversations for turn in conversation.turns]
    lines = [line for turn in turns for line in turn.provenance.lines]
    messages = [n for n, record in enumerate(log.records, 1) if record["type"] in ("user", "assistant")]
    assert sorted(lines) == messages
    wanted = {number: pieces(line) for number, line in enumerate(log.lines().splitlines(), start=1)}
    assert lost(conversations, wanted) == []


@given(log=LOGS_OF_ANY_SHAPE)
def test_any_graph_of_records_gives_every_message_once_with_its_largest_usage(log_file, log):
    conversations = read(log_file, log.lines(), with_branches=True)
    turns = [turn for conversation in conversations for turn in conversation.turns if turn.role == "assistant"]
    wanted = largest_usage(log.records)
    assert len({turn.id for turn in turns}) == len(turns)
    found = defaultdict(Counter)
    for turn in turns:  # records of one id on two sides of a prompt are two messages: one of them has a wrong id
        usage = turn.usage
        counts = {} if usage is None else {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
        found[turn.id.partition(" of line ")[0]] |= Counter(counts)
    assert {name: +counts for name, counts in found.items()} == {name: +counts for name, counts in wanted.items()}


@given(log=LOGS_OF_ANY_SHAPE)
def test_without_branches_what_is_left_out_is_counted(log_file, log):
    report = IngestReport()
    log_file.write_bytes(log.lines())
    kept = list(claude_code.read(SourceFile(log_file, log_file.name), report))
    lines = {line for conversation in kept for turn in conversation.turns for line in turn.provenance.lines}
    rewound = {skip.line for skip in report.skips if skip.reason == "rewound branch"}
    messages = {n for n, record in enumerate(log.records, 1) if record["type"] in ("user", "assistant")}
    assert lines | rewound == messages
    assert not lines & rewound
