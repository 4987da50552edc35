"""Read and write the files of a run: conversations, tools, error sites, pairs and evaluations."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from composer_replication.atomic import atomic_write_json
from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ArtefactCorruptError, InputError, explain
from composer_replication.messages import ToolSchemas, tool_rows
from composer_replication.runs.artefacts import find_artefact, sha256_of_file
from composer_replication.runs.directory import RunDir
from composer_replication.runs.shared_reads import MAX_SHARED_BYTES, is_sharing_reads, shared_read
from composer_replication.runs.split import read_test_ids
from composer_replication.types import (
    Action,
    Conversation,
    ErrorSite,
    Hint,
    Link,
    Provenance,
    ToolCall,
    ToolResult,
    Turn,
    Usage,
)

CONVERSATIONS_SCHEMA, CONVERSATIONS_VERSION = "conversation", 2
KEYS = frozenset(field.name for field in fields(Conversation))
_CONVERSATION, _TURN, _LINK, _CALL, _RESULT, _USAGE = (
    tuple(field.name for field in fields(kind)) for kind in (Conversation, Turn, Link, ToolCall, ToolResult, Usage)
)


def conversation_to_row(conversation: Conversation) -> dict[str, object]:
    """Return a conversation as a row of `conversations.jsonl`, with every field, so that all rows have the same keys.

    Arguments and extras are not copied: `dataclasses.asdict` would take longer than reading the log did.
    """
    row = _fields_of(conversation, _CONVERSATION)
    row["turns"] = [_turn_row(turn) for turn in conversation.turns]
    row["parent"] = None if conversation.parent is None else _fields_of(conversation.parent, _LINK)
    row["extra"] = dict(conversation.extra)
    return row


def conversation_from_row(row: Mapping[str, Any]) -> Conversation:
    """Return the conversation in a row. Raises ArtefactCorruptError if the row lacks fields."""
    try:
        link = row["parent"]
        return Conversation(
            **_known(Conversation, row, skip=("turns", "parent")),
            turns=tuple(_turn(turn) for turn in row["turns"]),
            parent=None if link is None else Link(**link),
        )
    except (KeyError, TypeError) as error:
        raise ArtefactCorruptError(
            explain(
                f"conversation row {row.get('id')!r}",
                got=error,
                expected=f"the fields of {CONVERSATIONS_SCHEMA} {CONVERSATIONS_VERSION}",
            )
        ) from error


def read_conversations(run: RunDir, *, verify: bool = True) -> Iterator[Conversation]:
    """Return an iterator over the conversations of a run; for `verify` see `RunDir.read_jsonl`."""

    def decode() -> Iterator[Conversation]:
        rows = run.read_jsonl(
            "conversations", schema=CONVERSATIONS_SCHEMA, version=CONVERSATIONS_VERSION, verify=verify
        )
        return (conversation_from_row(row) for row in rows)

    path = run.path("conversations")
    if not is_sharing_reads() or not path.exists() or path.stat().st_size > MAX_SHARED_BYTES:
        return decode()
    return iter(shared_read("conversations", _files_of(run, "conversations"), lambda: tuple(decode())))


def _files_of(run: RunDir, *names: str) -> list[Path]:
    """Return the paths of these artefacts and of their sidecars."""
    artefacts = [find_artefact(name) for name in names]
    return [run.root / name for artefact in artefacts for name in (artefact.file_name, artefact.sidecar_name)]


def _turn(row: Mapping[str, Any]) -> Turn:
    usage, token_ids, logprobs = row["usage"], row["token_ids"], row["logprobs"]
    provenance = row["provenance"]
    return Turn(
        **_known(Turn, row, skip=("calls", "results", "usage", "provenance", "token_ids", "logprobs")),
        calls=tuple(ToolCall(**call) for call in row["calls"]),
        results=tuple(ToolResult(**result) for result in row["results"]),
        usage=None if usage is None else Usage(**usage),
        provenance=Provenance(file=provenance["file"], lines=tuple(provenance["lines"])),
        token_ids=None if token_ids is None else tuple(token_ids),
        logprobs=None if logprobs is None else tuple(logprobs),
    )


def _known(kind: type, row: Mapping[str, Any], *, skip: tuple[str, ...]) -> dict[str, Any]:
    return {field.name: row[field.name] for field in fields(kind) if field.name not in skip}


def _turn_row(turn: Turn) -> dict[str, object]:
    row = _fields_of(turn, _TURN)
    row["calls"] = [_fields_of(call, _CALL) for call in turn.calls]
    row["results"] = [_fields_of(result, _RESULT) for result in turn.results]
    row["usage"] = None if turn.usage is None else _fields_of(turn.usage, _USAGE)
    row["provenance"] = {"file": turn.provenance.file, "lines": list(turn.provenance.lines)}
    row["token_ids"] = None if turn.token_ids is None else list(turn.token_ids)
    row["logprobs"] = None if turn.logprobs is None else list(turn.logprobs)
    return row


def _fields_of(value: object, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(value, name) for name in names}


# Tools.

TOOLS_SCHEMA, TOOLS_VERSION = "tool", 3
Schema = Mapping[str, Any]
Tool = dict[str, Any]


class ToolTable:
    """The tools of each agent in a run. Agents are distinguished by the format of their logs.

    `declared` has the schemas from the user's file, by name. They apply to every agent and override inferred schemas.
    `by_format` has the tools of each format in the form of OpenAI's API; the entry under None applies to all other
    formats.
    """

    def __init__(self, declared: Mapping[str, Schema], inferred: Mapping[str, Mapping[str, Schema]]) -> None:
        self.declared = dict(declared)
        self.by_format: dict[str | None, list[Tool]] = {None: _as_requests_take_them(self.declared)}
        for format_name, schemas in sorted(inferred.items()):
            self.by_format[format_name] = _as_requests_take_them({**schemas, **self.declared})

    def of(self, format_name: str) -> list[Tool]:
        """Return the tools of sessions in this format; every call returns the same list.

        These are all tools of the agent: listing only those that a session calls later would reveal what comes next.
        """
        return self.by_format.get(format_name, self.by_format[None])

    def schemas(self, format_name: str) -> dict[str, Schema]:
        """Return the parameter schemas of a format's tools, by name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.of(format_name)}


def read_tools(run: RunDir, *, with_test: bool = False) -> ToolTable:
    """Return the tools of a run, without those that only sessions in the test split use.

    With `with_test`, return the tools of all sessions. The judge of calls needs them, because it must know which tools
    the agents had.
    """

    def read() -> ToolTable:
        rows = list(run.read_jsonl("tools", schema=TOOLS_SCHEMA, version=TOOLS_VERSION))
        held_out = frozenset[str]() if with_test else read_test_ids(run)
        if not held_out:
            return tool_table(rows)
        inferred = ToolSchemas()
        for row in run.read_jsonl("conversations", schema=CONVERSATIONS_SCHEMA, version=CONVERSATIONS_VERSION):
            if row["id"] not in held_out:
                inferred.add_row(row)
        return tool_table(tool_rows(inferred, tool_table(rows).declared))

    return shared_read(f"tools, with_test={with_test}", _files_of(run, "tools", "split", "conversations"), read)


def tool_table(rows: Iterable[Mapping[str, Any]]) -> ToolTable:
    """Convert rows of `tools.jsonl` to a ToolTable."""
    declared: dict[str, Schema] = {}
    inferred: dict[str, dict[str, Schema]] = defaultdict(dict)
    for row in rows:
        try:
            of_one = declared if row["format"] is None else inferred[row["format"]]
            of_one[row["name"]] = row["parameters"]
        except KeyError as error:
            expected = f"the fields of {TOOLS_SCHEMA} {TOOLS_VERSION}"
            raise ArtefactCorruptError(explain("row of tools.jsonl", got=error, expected=expected)) from error
    return ToolTable(declared, inferred)


def _as_requests_take_them(schemas: Mapping[str, Schema]) -> list[Tool]:
    # The keys of paid answers are computed from this, so nothing may be added to it.
    return [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in sorted(schemas.items())
    ]


# Error sites with their hints.

SITES_SCHEMA, SITES_VERSION = "error_site", 1
_MIN_PREFIX, _MAX_NEAR = 4, 3
_STRUCK = "struck_hints"
_SITE = tuple(field.name for field in fields(ErrorSite))


class _SiteOfRun(NamedTuple):
    """An error site with its hint and its conversation."""

    site: ErrorSite
    hint: Hint | None
    conversation: Conversation


def read_sites(run: RunDir) -> Iterator[tuple[ErrorSite, Hint | None]]:
    """Return an iterator over the sites of a run, each with its hint."""
    return (_site_from_row(row) for row in run.read_jsonl("sites", schema=SITES_SCHEMA, version=SITES_VERSION))


def _find_site(run: RunDir, identity: str, *, what: str = "site") -> tuple[ErrorSite, Hint | None]:
    """Return the only site whose id starts with `identity`. Raises InputError, which lists the nearest ids, if there
    is not exactly one.
    """
    every = list(read_sites(run))
    matches = [row for row in every if row[0].id.startswith(identity)]
    if len(matches) == 1 and len(identity) >= _MIN_PREFIX:
        return matches[0]
    got = f"{identity!r}, which is the beginning of {len(matches) or 'no'} site ids"
    expected = f"the id of a site, or at least its first {_MIN_PREFIX} characters"
    ids = list(dict.fromkeys(site.id for site, _ in every))
    begin = [site_id for site_id in ids if identity and site_id.startswith(identity)]
    near = begin[:_MAX_NEAR] or get_close_matches(identity, ids, n=_MAX_NEAR)
    fix = f"`crf sites {run.root} --list` lists all ids" + (f". Similar ids: {', '.join(near)}" if near else ".")
    raise InputError(explain(what, got=got, expected=expected, fix=fix))


def read_site(run: RunDir, identity: str) -> _SiteOfRun:
    """Return the only site whose id starts with `identity`, with its hint and its conversation."""
    site, hint = _find_site(run, identity)
    conversation = next(
        (candidate for candidate in read_conversations(run) if candidate.id == site.conversation_id), None
    )
    if conversation is None:
        fix = "The conversations have changed: run `crf sites RUN` again."
        what = f"conversation of site {site.id}"
        raise InputError(explain(what, got=repr(site.conversation_id), expected="a conversation of this run", fix=fix))
    return _SiteOfRun(site, hint, conversation)


def read_rejected_ids(run: RunDir) -> frozenset[str]:
    """Return the ids of the sites whose hints the user rejected. Later runs of `crf sites` leave them out."""
    if not run.path(_STRUCK).exists():
        return frozenset()
    is_rejected = {str(row["site"]): row["is_struck"] for row in run.read_journal(_STRUCK).rows}
    return frozenset(identity for identity in is_rejected if is_rejected[identity])


def as_rejected(site: ErrorSite) -> ErrorSite:
    """Return a copy of the site, marked as rejected by the user."""
    return replace(site, is_kept=False, reason="struck out: `crf hints RUN --keep ID` takes it back")


def mark_rejected(
    run: RunDir, identities: Iterable[str], *, is_rejected: bool = True, what: str = "site"
) -> list[ErrorSite]:
    """Reject the hints of these sites, or restore them, and return the sites. Ids may be shortened.

    Rejected hints are removed from `sites.jsonl` immediately; restored hints return with the next `crf sites`. `what`
    names the option with the ids in error messages.
    """
    with run.exclusive("hints", against=("training",)):
        chosen = [_find_site(run, identity, what=what)[0] for identity in identities]
        with run.append_jsonl(_STRUCK) as journal:
            for site in chosen:
                journal.append({"site": site.id, "is_struck": is_rejected})
        if is_rejected:
            _rewrite(run, frozenset(site.id for site in chosen))
    return chosen


def _rewrite(run: RunDir, struck: frozenset[str]) -> None:
    meta, rows = run.meta("sites"), list(read_sites(run))
    struck_hints = Counter(f"hint: {hint.source}" for site, hint in rows if site.id in struck and hint is not None)
    run.write_jsonl(
        "sites",
        [site_to_row(as_rejected(site), None) if site.id in struck else site_to_row(site, hint) for site, hint in rows],
        schema=SITES_SCHEMA,
        version=SITES_VERSION,
        sources=meta.sources,
        counts=dict(Counter(meta.counts) - struck_hints),
        drops=meta.drops,
        settings={**meta.settings, "struck": sorted(read_rejected_ids(run))},
    )


def site_to_row(site: ErrorSite, hint: Hint | None) -> dict[str, object]:
    """Return a site and its hint as a row of `sites.jsonl`."""
    return {**{name: getattr(site, name) for name in _SITE}, "hint": None if hint is None else asdict(hint)}


def _site_from_row(row: Mapping[str, Any]) -> tuple[ErrorSite, Hint | None]:
    """Return the site and the hint in a row. Raises ArtefactCorruptError if the row lacks fields."""
    try:
        site = ErrorSite(**{name: row[name] for name in _SITE if name != "evidence"}, evidence=tuple(row["evidence"]))
        return site, None if row["hint"] is None else Hint(**row["hint"])
    except (KeyError, TypeError) as error:
        expected = f"the fields of {SITES_SCHEMA} {SITES_VERSION}"
        raise ArtefactCorruptError(explain(f"site {row.get('id')!r}", got=error, expected=expected)) from error


# Preference pairs.

PAIRS_SCHEMA, PAIRS_VERSION = "dpo_pair", 4
TEACHERS, ACTED = "teachers", "acted_at_once"
"""Sources of pairs; others are `correction` and `user`. In pairs from `ACTED` the logged turn is the chosen side."""


class LoggedPair(NamedTuple):
    """A preference pair at assistant turn `turn_number` of a conversation, counted from 0.

    Without an `action`, the chosen side is parsed from the text `chosen`, where the end of thinking may be ambiguous.
    Without a `rejected` action, the rejected side is the whole logged turn.
    """

    state_id: str
    turn_number: int
    chosen: str
    action: Action | None = None
    rejected: Action | None = None
    source: str = TEACHERS

    @property
    def rejects_turn(self) -> bool:
        """Whether the logged turn is the rejected side."""
        return self.source != ACTED


def read_pairs(run: RunDir) -> Iterator[tuple[str, LoggedPair]]:
    """Yield each preference pair of a run as (id of its conversation, pair)."""
    rows = cast("Iterator[dict[str, Any]]", run.read_jsonl("pairs", schema=PAIRS_SCHEMA, version=PAIRS_VERSION))
    for row in rows:
        chosen, rejected = (_action(row.get(f"{side}_action")) for side in ("chosen", "rejected"))
        source = row.get("source", TEACHERS)
        pair = LoggedPair(row["state_id"], row["turn_number"], row["chosen"], chosen, rejected, source)
        yield row["conversation_id"], pair


def _action(row: dict[str, Any] | None) -> Action | None:
    """Return the action in a row; None if the row is from an earlier version, or if the action's text contains
    thinking.
    """
    return None if row is None else Action(text=row["text"], calls=tuple(ToolCall(**call) for call in row["calls"]))


# Evaluations: evaluation.json, and the rows of scored decisions, sampled actions and token gaps.

# In two parts, since the layer test takes a dotted name in a string for an import.
EVALUATION_SCHEMA, EVALUATION_VERSION = ".".join(("composer_replication", "evaluation")), 1
ROWS_VERSION = 1
"""Version of the three files of rows. Each has the name of its artefact as its schema."""
Rows = Literal["evaluated", "sampled", "token_gaps"]
WORSE_BESIDES = "Worse besides"
"""Prefix of the verdict's remark about metrics that got worse. Reports that show these metrics omit the remark."""
ADAPTER_SETTINGS = "adapter_config.json"
_OF_A_PLACE = ("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version")
_CONTROL = "control"
_KEYS = ("models", "split", "primary", "verdict", "power", "figures", "sampled", "damage", "drops", "not_run")


def control_name(shuffle: int = 1) -> str:
    """Return the name that an evaluation gives to a control: `control`, `control-2`, and so on.

    A control is a model trained on shuffled hints and pairs; the number identifies the shuffle.
    """
    return _CONTROL if shuffle == 1 else f"{_CONTROL}-{shuffle}"


def shuffle_number(name: str) -> int:
    """Return the number at the end of a control's name, which identifies its shuffle; 1 if there is none."""
    return int(name.partition("-")[2] or 1)


def controls_among(names: Iterable[str]) -> list[str]:
    """Return the names that belong to controls (models trained on shuffled data), ordered by the number of the
    shuffle.
    """
    return sorted((name for name in names if name.partition("-")[0] == _CONTROL), key=shuffle_number)


def read_evaluation(run: RunDir) -> dict[str, Any]:
    """Return the evaluation of a run. Raises ArtefactCorruptError if it has another schema or version, or lacks
    keys.
    """
    path = run.path("evaluation")
    if not path.exists():
        raise find_artefact("evaluation").not_found(run.root)
    fix = "Run `crf evaluate` again."
    try:
        record = decode_object(path.read_bytes())
    except ValueError as error:
        raise ArtefactCorruptError(explain(str(path), got=error, expected="a JSON object", fix=fix)) from error
    got = f"schema {record.get('schema')!r} version {record.get('version')!r}"
    if record.get("schema") != EVALUATION_SCHEMA or record.get("version") != EVALUATION_VERSION:
        raise ArtefactCorruptError(
            explain(str(path), got=got, expected=f"schema {EVALUATION_SCHEMA!r} version {EVALUATION_VERSION}", fix=fix)
        )
    missing = [key for key in _KEYS if key not in record]
    if missing:
        got = f"no {', no '.join(missing)}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"{', '.join(_KEYS)}", fix=fix))
    return record


def write_evaluation(run: RunDir, record: Mapping[str, Any]) -> None:
    """Write the evaluation atomically, with its schema and version first."""
    atomic_write_json(run.path("evaluation"), {"schema": EVALUATION_SCHEMA, "version": EVALUATION_VERSION, **record})


def hash_weight_files(folder: Path) -> str | None:
    """Return a digest of the names and bytes of the weight files in a folder; None if there are none.

    An evaluation stores the digest as `files` of each model, so that its results can be matched to weights. The
    settings of an adapter are included, because the same bytes with another scale are different weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    listed = "".join(f"{path.name} {sha256_of_file(path)}\n" for path in files)
    if files and (folder / ADAPTER_SETTINGS).is_file():
        listed += f"{ADAPTER_SETTINGS} {hashlib.sha256(adapter_settings(folder)).hexdigest()}\n"
    return hashlib.sha256(listed.encode()).hexdigest() if files else None


def adapter_settings(folder: Path) -> bytes:
    """Return the settings of an adapter that affect its weights, without paths and versions."""
    raw = (folder / ADAPTER_SETTINGS).read_bytes()
    try:
        settings = decode_object(raw)
    except ValueError:  # loading the adapter reports the error
        return raw
    return encode({key: value for key, value in settings.items() if key not in _OF_A_PLACE}, where=ADAPTER_SETTINGS)


def read_rows(run: RunDir, name: Rows) -> Iterator[dict[str, Any]]:
    """Return an iterator over the rows of an evaluation file (`evaluated`, `sampled` or `token_gaps`); it is empty
    if the file does not exist.
    """
    if not run.path(name).exists():
        return iter(())
    return run.read_jsonl(name, schema=name, version=ROWS_VERSION)
