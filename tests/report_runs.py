"""Run directories for the tests of the report: sessions of a flawed agent, and figures as a training leaves them.

Conversations, split, sites and pairs are made by the steps themselves. What needs a model (metrics, proofs, the
evaluation) is drawn from a seed, in the records that those steps write.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from composer_replication.atomic import atomic_write_json
from composer_replication.cli.pairs import write_pairs
from composer_replication.cli.sites import write_sites
from composer_replication.cli.split import write_split
from composer_replication.config import PairsConfig, SitesConfig, SplitConfig
from composer_replication.runs import RunDir
from composer_replication.runs.files import CONVERSATIONS_SCHEMA, CONVERSATIONS_VERSION, conversation_to_row, read_sites
from report_evaluation import SCRIPT, evaluate
from session_pieces import Session

PROJECTS = ("/projects/ledger", "/projects/parser", "/projects/site")
TASKS = (
    "Round the totals to cents in the invoice",
    "The parser stops at an empty line, please look into it",
    "Add a flag that prints the version",
    "Tests of the importer fail since yesterday, find out why",
    "Rename the config key `path` to `folder` everywhere",
)
_CODE = 'def total(lines):\n    """The sum of all lines, in cents."""\n    return sum(line.amount for line in lines)\n'


def make_run(
    folder: Path, num_sessions: int = 12, *, upto: str = "evaluate", hostile: bool = False, seed: int = 1
) -> RunDir:
    """A run with everything up to this step: ingest, sites, pairs, train, evaluate."""
    run = RunDir.create(folder)
    drawn = random.Random(seed)
    sessions = [_session(number, drawn, hostile) for number in range(num_sessions)]
    run.write_jsonl(
        "conversations",
        (conversation_to_row(each) for each in sessions),
        schema=CONVERSATIONS_SCHEMA,
        version=CONVERSATIONS_VERSION,
    )
    tools = [
        {"format": "claude_code", "name": name, "num_calls": 1, "parameters": {"type": "object"}, "source": "inferred"}
        for name in ("Bash", "Edit", "Read")
    ]
    run.write_jsonl("tools", tools, schema="tool", version=3, sources=["conversations"])
    stages = {"split": _split, "sites": _sites, "pairs": _pairs, "train": _train, "evaluate": evaluate}
    for name, stage in stages.items() if upto != "ingest" else ():
        stage(run, random.Random(f"{seed} {name}"), hostile)
        if name == upto:
            break
    return run


def _session(number: int, drawn: random.Random, hostile: bool):
    mean = SCRIPT if hostile else ""
    session = Session(f"{number:08d}-0000-4000-8000-000000000000{mean and SCRIPT}")
    session.user(f"{drawn.choice(TASKS)} (part {number + 1}).{mean}")
    session.says(f"I will look at the code first.{mean}")
    session.call("Bash", f"src\ntests\nREADME.md{mean}", command="ls", description=f"list{mean}")
    session.call("Read", f"     1→{_CODE}{mean}", file_path="src/invoice.py")
    for _ in range(drawn.randrange(1, 4)):
        _fail(session, drawn.randrange(4), mean)
        session.call("Bash", f"3 passed in 0.21s{mean}", command="pytest -q tests/test_invoice.py")
    session.says(f"Done: totals are rounded, and the tests pass.{mean}")
    turns = [
        replace(turn, timestamp=f"2026-10-{1 + number % 27:02d}T09:{at % 60:02d}:00Z")
        for at, turn in enumerate(session.conversation().turns)
    ]
    return replace(
        session.conversation(),
        turns=tuple(turns),
        cwd=PROJECTS[number % 3] + mean.replace("/", "_"),
        title=mean or None,
    )


def _fail(session: Session, kind: int, mean: str) -> None:
    """A call that fails, and what put it right."""
    if kind == 0:
        session.call(
            "Bash", f"/bin/bash: line 1: pyhton: command not found{mean}", is_error=True, command="pyhton -m pytest -q"
        )
        session.call("Bash", "3 passed in 0.20s", command="python3 -m pytest -q")
    elif kind == 1:
        session.call("Read", f"File does not exist.{mean}", is_error=True, file_path="src/invoices.py")
        session.call("Read", f"     1→{_CODE}", file_path="src/invoice.py")
    elif kind == 2:
        wrong = {
            "file_path": "src/invoice.py",
            "old_string": f"return sum(amounts){mean}",
            "new_string": "return round(sum(amounts), 2)",
        }
        session.call(
            "Edit", f"String to replace not found in file.\nString: return sum(amounts){mean}", is_error=True, **wrong
        )
        right = {**wrong, "old_string": "return sum(line.amount for line in lines)"}
        session.call("Edit", "The file src/invoice.py has been updated.", **right)
    else:
        session.call(
            "Bash", f"cat: docs/USAGE.md: No such file or directory{mean}", is_error=True, command="cat docs/USAGE.md"
        )
        session.call("Bash", "# Usage", command="cat README.md")


def _split(run: RunDir, drawn: random.Random, hostile: bool) -> None:
    write_split(SplitConfig(validation=0.1, test=0.25), run)


def _sites(run: RunDir, drawn: random.Random, hostile: bool) -> None:
    write_sites(SitesConfig(), run)
    if hostile:
        run.path("conventions").write_text(f"# Conventions\n\n## {SCRIPT}\n\n- [x] {SCRIPT}\n", encoding="utf-8")


def _pairs(run: RunDir, drawn: random.Random, hostile: bool) -> None:
    write_pairs(PairsConfig(filters="none"), run)


def _train(run: RunDir, drawn: random.Random, hostile: bool) -> None:
    mean = SCRIPT if hostile else ""
    _journal(run, drawn, "metrics.jsonl", 1.0)
    _journal(run, drawn, "control/metrics.jsonl", 0.35)
    run.path("config").write_text(f'[train]\nmodel = "tiny{mean.replace(chr(34), "")}"\n', encoding="utf-8")
    proofs = [_proof(site, drawn, mean) for site, hint in read_sites(run) if hint is not None]
    run.write_jsonl("hint_proof", proofs, schema="hint_proof", version=3, sources=["conversations", "sites"])
    channels = (("lm_ce", 1.0, 2.31, 1.42), ("sdpo_kl", 0.1, 0.252, 0.061), ("trace_replay_dpo", 0.05, 0.693, 0.41))
    record = {
        "schema": "composer_replication.training",
        "version": 2,
        "tool_version": "0.1.0",
        "created": "2026-11-01T10:00:00+00:00",
        "config_hash": "6809131a374ca0cd371a2ecbb10acfad285fd1eabab9afa21044faa7d04347bd",
        "start_weights": f"tiny{mean}",
        "start_digest": "bf4ee2d84634d28f5b3085a43019af301111f7670ca4bb28cc2441d920440bca",
        "mode": "offline",
        "sources": [],
        "warmup_steps": 20,
        "steps": 60,
        "channels": [
            {"name": name, "weight": weight, "steps": 60, "first_loss": first, "last_loss": last}
            for name, weight, first, last in channels
        ],
        "diagnosis": [f"Every channel ran on every step.{mean}"],
        "alarms": [mean] if mean else [],
        "counts": {"sites": 9},
        "drops": {"lm_ce: failed_call": 14, "sdpo_kl: longer_than_window": 2},
    }
    run.path("adapter").mkdir()
    atomic_write_json(run.path("adapter") / "training.json", record)


def _journal(run: RunDir, drawn: random.Random, name: str, share: float) -> None:
    from composer_replication.runs.journal import Journal

    path = run.root / name
    path.parent.mkdir(exist_ok=True)
    falls = {"lm_ce": (2.3, 1.4), "sdpo_kl": (0.25, 0.06), "trace_replay_dpo": (0.693, 0.40)}
    with Journal(path) as journal:
        for step in range(1, 61):
            done = 1 - 0.95**step
            losses = {
                f"loss/{each}": first - share * (first - last) * done + drawn.gauss(0, 0.02 * first)
                for each, (first, last) in falls.items()
            }
            held_out = {"eval_loss": 2.3 - 0.7 * share * done} if step % 10 == 0 else {}
            journal.append({"step": step, **losses, **held_out})
        journal.append({"step": 60, "train_runtime": 94.2})


def _proof(site, drawn: random.Random, mean: str) -> dict[str, object]:
    without, own, good = -0.9 + drawn.gauss(0, 0.3), -1.1 + drawn.gauss(0, 0.7), drawn.gauss(-0.05, 0.35)
    is_kept = own < -0.3 and own < good - 0.2
    return {
        "site_id": site.id,
        "basis": "tool_name",
        "num_tokens": 6,
        "without_hint": without,
        "with_hint": without + own,
        "with_other_hint": without + drawn.gauss(-0.15, 0.3),
        "other_kind": mean or "file_not_found",
        "num_good_calls": 2,
        "num_good_elsewhere": 0,
        "good_without_hint": -0.7,
        "good_with_hint": -0.7 + good,
        "is_kept": is_kept,
        "reason": "kept" if is_kept else mean or "hint_does_nothing",
        "advantage": 0.1,
        "conversation_id": site.conversation_id,
        "turn_id": site.turn_id,
        "kind": site.kind,
    }
