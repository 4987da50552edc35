"""`crf export`: sessions of a run as ATIF documents, one file per session; and weights for other programs to run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.atomic import atomic_write_json, atomic_write_text
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.cache.session_sources import read_accounts
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.ingestion.last_gate import Find, LastGate, gate_of, refusal
from composer_replication.runs import RunDir
from composer_replication.runs import conversations as rows
from composer_replication.runs.elsewhere import note_elsewhere
from composer_replication.types import Conversation

if TYPE_CHECKING:
    from composer_replication.use.merge import MergeCheck, Precision
    from composer_replication.use.serving import Made
    from composer_replication.use.trained import Trained

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 120
_LISTS = ("steps", "subagent_trajectories")


def export_atif(
    run: RunDir, folder: Path, *, gate: LastGate | None = None, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> list[Path]:
    """Write a document per session, sub-agents inside it, and one per part after a compaction.

    Files that are there already are an error, so that no export is mixed with another. So is a document in which the
    gate finds something, before any is written; the default gate refuses a run that was made with `--no-scrub`.
    """
    refuse_used(folder)
    if gate is None:
        gate = gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    _refuse_secrets(run, gate)
    folder.mkdir(parents=True, exist_ok=True)
    note_elsewhere(run, "ATIF documents", folder)  # before the first: a process that dies here leaves no unknown copy
    written: dict[str, Path] = {}
    for identity, document in _documents(run):
        path = folder / f"{_file_name(identity, written)}.json"
        atomic_write_json(path, document)
        written[path.stem.lower()] = path
    return list(written.values())


def refuse_used(folder: Path) -> None:
    """No export is mixed with another, or with anything else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = "Name a folder that is not there yet, or an empty one."
        got = "a file or a folder with files in it"
        raise InputError(explain(str(folder), got=got, expected="a new folder", fix=fix))


def _documents(run: RunDir) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every document of a run, with the id of its conversation."""
    for family in _families(run):
        ids = {conversation.id for conversation in family}
        embedded = [conversation for conversation in family if _is_embedded(conversation, ids)]
        for conversation in family:
            if not _is_embedded(conversation, ids):
                yield conversation.id, to_atif(conversation, subagents=embedded)


def _refuse_secrets(run: RunDir, gate: LastGate) -> None:
    """Look at all documents as they will be written; a part that stands in several is named once."""
    finds: dict[bytes, Find] = {}
    for identity, document in [] if gate.is_open else _documents(run):
        for location, part in _parts(document, f"document {identity}"):
            if (find := gate.look(part, location)) is not None:
                finds.setdefault(find.digest, find)
    if finds:
        raise refusal("ATIF documents", list(finds.values()))


def _parts(document: dict[str, Any], location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"{location}, head", {key: value for key, value in document.items() if key not in _LISTS}
    for step in document["steps"]:
        yield f"{location}, step {step['step_id']}", step
    for inner in document.get("subagent_trajectories", ()):
        yield from _parts(inner, f"document {inner['trajectory_id']}")


def _families(run: RunDir) -> Iterator[list[Conversation]]:
    stored = run.read_jsonl("conversations", schema=rows.SCHEMA, version=rows.VERSION)
    for account in read_accounts(run):
        yield [rows.from_row(row) for row in islice(stored, len(account.conversations))]


def _is_embedded(conversation: Conversation, family: set[str]) -> bool:
    """Whether it is shown inside the document of another: the parts of one thread stand side by side."""
    link = conversation.parent
    return link is not None and link.kind != "compaction" and link.conversation_id in family


def _file_name(identity: str, taken_names: dict[str, Path]) -> str:
    """A name for any file system: ids are text from logs, and may hold slashes, dots or anything else."""
    plain = _NOT_IN_A_NAME.sub("_", identity).strip(".")[:_MAX_NAME] or "session"
    name, number = plain, 2
    while name.lower() in taken_names:
        name, number = f"{plain}-{number}", number + 1
    return name


# ---- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Where the folder is, how near the merged weights are to the adapter, what was made for others, what was sent."""

    folder: Path
    check: MergeCheck
    made: tuple[Made, ...]
    pushed: str | None = None


def export_weights(
    name: str,
    folder: Path,
    *,
    adapter: str | None = None,
    precision: Precision = "auto",
    push: str | None = None,
    is_public: bool = False,
    api: Any = None,
    environment: Mapping[str, str] = os.environ,
) -> ExportedWeights:
    """Merged weights, the adapter, folders for vLLM and Ollama, and cards; the folder appears whole or not at all.

    `push` names a repository on the hub, to which the merged weights and their card go; `api` as for `push_folder`.
    """
    from composer_replication.use.hub import check_repository, push_folder

    refuse_used(folder)
    if push is not None:
        check_repository(push)
    trained = trained_weights(name, adapter)
    from composer_replication.use.merge import merge_adapter  # here: it loads torch, and what is above may refuse

    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    if trained.run is not None:
        note_elsewhere(trained.run, "exported weights", folder)
    try:
        check = merge_adapter(trained, making / "merged", precision=precision)
        exports = _for_others(trained, making, precision=check.precision, environment=environment)
        _write_cards(trained, making, folder, public_name=push)
        if folder.exists():  # empty, or it had been refused
            folder.rmdir()
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    exports = tuple(
        export._replace(path=export.path and folder / export.path.relative_to(making)) for export in exports
    )
    address = None if push is None else push_folder(folder / "merged", push, is_public=is_public, api=api)
    return ExportedWeights(folder=folder, check=check, made=exports, pushed=address)


def trained_weights(name: str, adapter: str | None = None) -> Trained:
    """What is to be handed out; a name that stands for nothing trained is refused."""
    from composer_replication.use.trained import find_trained

    trained = find_trained(name, adapter)
    if trained.folder is None:
        got = f"the model {trained.base} alone" if Path(name).is_dir() else f"{name!r}, no folder here"
        expected = "a run with trained weights, or an adapter's folder"
        raise InputError(explain("weights to export", got=got, expected=expected))
    return trained


def _for_others(trained: Trained, making: Path, *, precision: str, environment: Mapping[str, str]) -> tuple[Made, ...]:
    from composer_replication.batch.model_folder import load_config, load_tokenizer
    from composer_replication.use.serving import write_gguf, write_ollama, write_vllm
    from composer_replication.use.trained import settle_base

    merged = making / "merged"
    tokenizer, config = load_tokenizer(str(merged)), load_config(str(merged), what=f"merged weights {merged}")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name in ("ollama", "vllm"):
        (making / name).mkdir()
    if trained.adapter is not None:
        shutil.copytree(
            trained.adapter, making / "adapter", ignore=shutil.ignore_patterns("README.md", "*.bin", "*.pt")
        )
        settle_base(making / "adapter")
    gguf = write_gguf(merged, making / "ollama" / "model.gguf", precision=precision, environment=environment)
    weights = "./model.gguf" if gguf.path is not None else "../merged"
    ollama = write_ollama(making / "ollama", tokenizer, weights=weights, max_length=longest)
    return gguf, ollama, write_vllm(making / "vllm", max_length=longest)


def _write_cards(trained: Trained, making: Path, folder: Path, *, public_name: str | None) -> None:
    """One beside each set of weights; that of what leaves the machine names no path of it."""
    from composer_replication.use.cards import evaluation_of, model_card, run_card

    run, evaluation = trained.run, evaluation_of(trained)
    is_public, merged_name = public_name is not None, public_name or str(folder.absolute() / "merged")
    card = model_card(trained, form="merged", name=merged_name, evaluation=evaluation, is_public=is_public)
    atomic_write_text(making / "merged" / "README.md", card)
    if trained.adapter is not None:
        name = str(folder.absolute() / "adapter")
        card = model_card(trained, form="adapter", name=name, evaluation=evaluation)
        atomic_write_text(making / "adapter" / "README.md", card)
    if run is not None:
        atomic_write_text(making / "DATA.md", run_card(run))
