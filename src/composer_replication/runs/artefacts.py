"""The one table of what a run directory may hold, and which command writes it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from composer_replication.errors import InputError, explain

NOT_THERE = "is not there yet"  # why a step runs: it has not run before

Kind = Literal["records", "journal", "file", "folder"]


@dataclass(frozen=True, slots=True)
class Artefact:
    """One kind of thing in a run directory.

    `records` are JSONL with a sidecar, written whole; a `journal` is JSONL with a checksum in each line, appended to
    while a run goes on; the format of a `file` or `folder` belongs to the stage that writes it.
    """

    name: str
    file_name: str
    command: str
    kind: Kind

    @property
    def sidecar_name(self) -> str:
        return f"{self.name}.meta.json"


_TABLE: tuple[tuple[str, str, str, Kind], ...] = (
    ("config", "config.resolved.toml", "crf run", "file"),
    ("conversations", "conversations.jsonl", "crf ingest", "records"),
    ("session_sources", "session_sources.jsonl", "crf ingest", "records"),
    ("forgotten", "forgotten.jsonl", "crf forget", "records"),
    ("tools", "tools.jsonl", "crf ingest", "records"),
    ("elsewhere", "elsewhere.jsonl", "crf export", "journal"),
    ("split", "split.jsonl", "crf split", "records"),
    ("sites", "sites.jsonl", "crf sites", "records"),
    ("conventions", "conventions.md", "crf sites", "file"),
    ("struck_hints", "struck_hints.jsonl", "crf hints", "journal"),
    ("teacher_calls", "teacher_calls.jsonl", "crf replay", "records"),
    ("teacher_cache", "teacher_cache.sqlite", "crf replay", "file"),
    ("asked_tools", "asked_tools.jsonl", "crf replay", "journal"),
    ("pairs", "pairs.jsonl", "crf pairs", "records"),
    ("ref_logprobs", "ref_logprobs.safetensors", "crf train", "file"),
    ("hint_proof", "hint_proof.jsonl", "crf train", "records"),
    ("metrics", "metrics.jsonl", "crf train", "journal"),
    ("checkpoints", "checkpoints", "crf train", "folder"),
    ("adapter", "adapter", "crf train", "folder"),
    ("model", "model", "crf train", "folder"),
    ("control", "control", "crf train", "folder"),
    ("earlier", "earlier", "crf run", "folder"),
    ("evaluation", "evaluation.json", "crf evaluate", "file"),
    ("evaluated", "evaluated.jsonl", "crf evaluate", "records"),
    ("sampled", "sampled.jsonl", "crf evaluate", "records"),
    ("token_gaps", "token_gaps.jsonl", "crf evaluate", "records"),
    ("report_html", "report.html", "crf report", "file"),
    ("report_md", "report.md", "crf report", "file"),
    ("report_sessions", "report_sessions", "crf report", "folder"),
)

# Schemas whose older versions are refused: version 1 held calls and tools with sorted keys, in an order nobody wrote.
OLDEST_READ: Mapping[str, int] = MappingProxyType({"conversation": 2, "tool": 3, "teacher_call": 2, "dpo_pair": 2})
WHY_REFUSED: Mapping[str, str] = MappingProxyType({"tool": "older rows do not say whose tool it is"})
"""What older rows lack, where that is not the order in which arguments were written."""

ARTEFACTS: Mapping[str, Artefact] = MappingProxyType({row[0]: Artefact(*row) for row in _TABLE})


def control_folder(root: Path, shuffle: int = 1) -> Path:
    """Where a training at `root` has its control of this shuffle: the first in `control`, others in folders of it."""
    first = root / ARTEFACTS["control"].file_name
    return first if shuffle == 1 else first / str(shuffle)


def control_folders(root: Path) -> list[Path]:
    """Those that are there, in the order of their shuffles."""
    first = control_folder(root)
    numbers = sorted(int(folder.name) for folder in first.glob("[2-9]*") if folder.name.isdecimal())
    return [first, *(control_folder(root, number) for number in numbers)] if first.is_dir() else []


def command_for(artefact: Artefact, run: Path) -> str:
    """The command that makes an artefact anew in a run directory."""
    return f"{artefact.command} PATH... -o {run}" if artefact.command == "crf ingest" else f"{artefact.command} {run}"


def find_artefact(name: str, *, kind: Kind | None = None) -> Artefact:
    """The artefact called `name`, or an InputError that suggests the one that was meant."""
    artefact = ARTEFACTS.get(name)
    if artefact is None:
        near = difflib.get_close_matches(name, ARTEFACTS, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else ""
        raise InputError(explain("artefact name", got=repr(name), expected=f"one of {', '.join(ARTEFACTS)}", fix=fix))
    if kind is not None and artefact.kind != kind:
        names = ", ".join(candidate.name for candidate in ARTEFACTS.values() if candidate.kind == kind)
        raise InputError(
            explain(f"artefact {name!r}", got=f"an artefact of kind {artefact.kind!r}", expected=f"one of {names}")
        )
    return artefact
