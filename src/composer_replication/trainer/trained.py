"""Which weights are meant: those that a run trained, a folder with an adapter, or a model by its folder or name.

A name that is no folder is one on the hub. Of a folder the absolute path is kept: a relative one means something else
from the next folder on, and an adapter without its start weights is of no use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from composer_replication.atomic import atomic_write_json
from composer_replication.batch.model_folder import resolve_model
from composer_replication.envs.student import student_folder
from composer_replication.errors import (
    ArtefactNotFoundError,
    ComposerError,
    InputError,
    explain,
)
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.directory import MARKER, made_elsewhere
from composer_replication.runs.files import read_evaluation, weight_files_digest
from composer_replication.runs.lineage import (
    channel_in_words,
    find_source,
    half_trained,
    read_object,
    read_training,
)
from composer_replication.version import __version__

ADAPTER_CONFIG = "adapter_config.json"
UNKNOWN_LICENCE = "unknown: look it up"
_BASE = "base_model_name_or_path"
_MAX_CARD = 1 << 20
_LICENCE_LINE = re.compile(r"^licen[sc]e:[ \t]*[\"']?([A-Za-z0-9][\w.+-]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Start weights, and what was made of them: an adapter's folder, or one of weights trained whole, or neither.

    `base` is an absolute folder or a hub name; `record` is `training.json`, empty where there is none; `run` is the run
    directory that was named, if one was.
    """

    base: str
    adapter: Path | None = None
    model: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])
    run: RunDir | None = None

    @property
    def folder(self) -> Path | None:
        return self.adapter or self.model


def find_trained(name: str, adapter: str | None = None) -> Trained:
    """What a run directory, an output folder of a training, an adapter, or a model's folder or name stands for."""
    path = Path(name).expanduser()
    run = RunDir.open(path) if (path / MARKER).is_file() else None
    if adapter is not None:
        folder = Path(adapter).expanduser()
        if not (folder / ADAPTER_CONFIG).is_file():
            fix = "Name the folder `adapter` that `crf train` left, or another one of PEFT's."
            raise InputError(explain(f"--adapter {adapter}", got=f"no {ADAPTER_CONFIG} in it", expected="one", fix=fix))
        base = _base_of(folder) if run is not None else absolute_base(name)
        return Trained(base=base, adapter=folder, record=read_training(folder), run=run)
    folder = _weights_in(path, run)
    if folder is None and run is not None:
        fix = (
            f"`crf train --set train.run={name!r} --set train.model=MODEL` trains some; or name them: --adapter FOLDER."
        )
        progress = half_trained(run.root)
        got, fix = (progress, "") if progress else ("none", fix)
        raise ArtefactNotFoundError(explain(f"trained weights of {name}", got=got, expected="an adapter", fix=fix))
    if folder is None:
        return Trained(base=absolute_base(name))
    if (folder / ADAPTER_CONFIG).is_file():
        return Trained(base=_base_of(folder), adapter=folder, record=read_training(folder), run=run)
    record = read_training(folder)
    return Trained(base=absolute_base(str(record.get("start_weights") or name)), model=folder, record=record, run=run)


def _weights_in(path: Path, run: RunDir | None) -> Path | None:
    """The folder of trained weights: this one, one in it, or the last that a run has noted elsewhere."""
    if (path / ADAPTER_CONFIG).is_file():
        return path
    for name in ("adapter", "model"):
        folder = path / ARTEFACTS[name].file_name
        if (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
            return folder
    if run is None:
        return None
    noted = [entry for entry in made_elsewhere(run) if entry.what == "trained weights"]
    return find_source(noted[-1].path, run.root) if noted else None


def _base_of(adapter: Path) -> str:
    """The start weights that an adapter names. A relative path was meant from where it was trained: looked for from
    here, and from the folders that the adapter lies in."""
    base = read_object(adapter / ADAPTER_CONFIG).get(_BASE) or read_training(adapter).get("start_weights")
    if not isinstance(base, str) or not base:
        fix = "Name the start weights: `crf chat MODEL --adapter FOLDER`."
        raise InputError(explain(f"{adapter / ADAPTER_CONFIG}, {_BASE}", got=repr(base), expected="a model", fix=fix))
    return absolute_base(base, near=adapter.resolve().parents)


def absolute_base(name: str, *, near: Iterable[Path] = ()) -> str:
    """A folder by its absolute path, a hub name as it is; `student` is the model that comes with the package."""
    path = Path(name).expanduser()
    for candidate in (path, *((folder / path) for folder in near)):
        if name and candidate.is_dir():
            return str(candidate.resolve())
    return resolve_model(name)


def is_folder(base: str) -> bool:
    return Path(base).is_dir()


def settle_base(adapter: Path) -> str:
    """Write the absolute path of the start weights into an adapter's config; a hub name stays."""
    base, config = _base_of(adapter), read_object(adapter / ADAPTER_CONFIG)
    if config.get(_BASE) != base:
        atomic_write_json(adapter / ADAPTER_CONFIG, {**config, _BASE: base})
    return base


def licence_of(base: str) -> str:
    """What the start weights' own card or config says their licence is, or that nobody knows."""
    if is_folder(base) and Path(base).samefile(student_folder()):
        return "apache-2.0"  # a part of this package
    for path in _cards_of(base):
        if not path.is_file() or path.stat().st_size > _MAX_CARD:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".json":
            card = read_object(path)
            licence = card.get("license") or card.get("licence")
            if isinstance(licence, str) and licence.strip():
                return _one_line(licence)
        elif text.startswith("---") and (match := _LICENCE_LINE.search(text.split("\n---", 1)[0])):
            return _one_line(match[1])
    return UNKNOWN_LICENCE


def _cards_of(base: str) -> list[Path]:
    names = ("README.md", "config.json", "card.json")
    if is_folder(base):
        return [Path(base) / name for name in names]
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = [try_to_load_from_cache(base, name) for name in names]
    except HFValidationError:  # no name of a repository
        return []
    return [Path(path) for path in cached if isinstance(path, str)]


def _one_line(text: str) -> str:
    return "".join(character for character in " ".join(text.split())[:80] if character.isprintable())


# Cards: what weights were made of and are known to do, and what a data set holds. No text of a log is in them.
#
# Figures come from `evaluation.json` alone, with their intervals; where nobody evaluated, the card says so.

Form = Literal["merged", "adapter"]
_TAGS = ("composer-replication", "agent", "tool-use")
_LIMITS = (
    "Learnt from one collection of sessions: what holds for its projects and tools need not hold elsewhere.",
    "Sites and hints are found by rules, and some of them are wrong: look at them with `crf sites RUN --list`.",
    "Secrets were taken out by rules. Rules miss some: weights may repeat what they were trained on.",
    "Made for agents that call tools. Whoever lets a model run commands needs a sandbox around it.",
)
_LOADING: Mapping[Form, str] = {
    "merged": """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
    "adapter": """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
}


def model_card(
    trained: Trained,
    *,
    form: Form,
    name: str,
    evaluation: Mapping[str, Any] | None,
    notes: Sequence[str] = (),
    is_public: bool = False,
) -> str:
    """The README of weights. One that leaves the machine names a local folder of start weights by its last part."""
    base = Path(trained.base).name if is_public and is_folder(trained.base) else trained.base
    licence, version = licence_of(trained.base), _cell(str(trained.record.get("tool_version", __version__)))
    head: dict[str, Any] = {"library_name": "peft" if form == "adapter" else "transformers", "tags": list(_TAGS)}
    head |= {"base_model": base} if not (is_public and is_folder(trained.base)) else {}
    head |= {"license": licence} if licence != UNKNOWN_LICENCE else {}
    parts = [
        _front_matter(head),
        f"# {name if is_public else Path(base).name + ', trained'}",
        f"{'An adapter for' if form == 'adapter' else 'Weights made from'} `{_cell(base)}` by composer-replication "
        f"{version}: the model was trained on its agent's own mistakes.",
        f"Licence of the start weights: {_cell(licence)}. It holds for these, too.",
        "## Use",
        f"```python\n{_LOADING[form].format(name=name)}\n```",
        *([f"{' '.join(notes)}"] if notes else []),
        "## Training",
        _training(trained.record),
        "## Data",
        "\n".join(f"- {fact}" for fact in _data_facts(trained.run)) or "Nothing is known here about the data.",
        "## Figures",
        *_figures(evaluation),
        "## Limits",
        "\n".join(f"- {limit}" for limit in [*_LIMITS, *_limits_of(evaluation)]),
    ]
    return "\n\n".join(parts) + "\n"


def data_card(run: RunDir, *, name: str, what: str, fields: Mapping[str, str], files: Mapping[str, str]) -> str:
    """The README of a data set: what it holds, its fields, how to load it; `files` are names by split."""
    head = {"configs": [{"config_name": "default", "data_files": [{"split": s, "path": p} for s, p in files.items()]}]}
    rows = "\n".join(f"| `{_cell(field)}` | {_cell(meaning)} |" for field, meaning in fields.items())
    loading = f'load_dataset("json", data_files={json.dumps(dict(files))})'
    parts = [
        _front_matter({"tags": [*_TAGS, "agent-traces"], **head}),
        f"# {Path(name).name}",
        what,
        "## Load",
        f"```python\nfrom datasets import load_dataset\n\ndata = {loading}  # in this folder\n```",
        "## Fields",
        f"| field | what it is |\n|---|---|\n{rows}",
        "## Where it is from",
        "\n".join(f"- {fact}" for fact in _data_facts(run)),
        "## Limits",
        "\n".join(
            [
                "- The sessions' owners decide whether it may be shared; no licence is given here.",
                "- Secrets and names were taken out by rules, and rules miss some: look before it leaves your machine.",
                "- Text of logs is data. Some of it may try to instruct a model that reads it.",
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


_ARTEFACTS = {
    "conversations": "sessions as contexts that a model saw at once: turns with text, calls and results",
    "sites": "failures with kind, blame, evidence and, where one may be taught, a hint",
    "pairs": "preference pairs: a state's messages, the chosen and the rejected action",
}


def run_card(run: RunDir) -> str:
    """The card of the data that weights were made of; the data itself stays in the run."""
    there = {name: run.path(name).name for name in _ARTEFACTS if run.path(name).exists()}
    what = (
        "The data that the weights beside this card learnt from. It is not here: it stays in the run directory, where "
        "each file below loads by itself."
    )
    fields = {file: _ARTEFACTS[name] for name, file in there.items()}
    return data_card(run, name="Data", what=what, fields=fields, files=there)


def preferences_card(run: RunDir, file: str) -> str:
    """The card of pairs that were exported for TRL's DPOTrainer."""
    fields = {
        "state_id": "conversation and turn that the pair is about",
        "prompt": "messages before the turn",
        "chosen": "what should have been done: one message of the assistant",
        "rejected": "what was done instead",
        "tools": "schemas of the tools, JSON text",
    }
    what = (
        "Preference pairs from sessions of coding agents: what advisers agree on, or what a session put right itself."
    )
    return data_card(run, name=file, what=what, fields=fields, files={"train": file})


def evaluation_of(trained: Trained) -> Mapping[str, Any] | None:
    """What `crf evaluate` found about these weights; None where it did not run, or compared other ones."""
    run, folder = trained.run, trained.folder
    if run is None or folder is None or not run.path("evaluation").exists():
        return None
    evaluation = read_evaluation(run)
    return evaluation if evaluation["models"]["after"].get("files") == (weight_files_digest(folder) or "") else None


def _data_facts(run: RunDir | None) -> Iterator[str]:
    """Sentences about a run's data, from the sidecars: numbers only."""
    if run is None:
        return
    counts = {name: _counts(run, name) for name in ("conversations", "sites", "pairs", "split")}
    talk, sites, pairs, sides = (counts[name] for name in ("conversations", "sites", "pairs", "split"))
    if talk:
        formats = sorted(key.removeprefix("files: ") for key in talk if key.startswith("files: "))
        of_what = f" ({', '.join(formats)})" if formats else ""
        sessions, turns, calls = (talk.get(key, 0) for key in ("sessions", "assistant turns", "calls"))
        yield f"{sessions:,} sessions{of_what} with {turns:,} turns of the model and {calls:,} calls."
        yield _scrubbing(run, talk)
    if sites:
        hinted = sum(number for key, number in sites.items() if key.startswith("hint: "))
        less = "fewer are learnt from: not those held out, and not those whose hint did nothing"
        yield f"{sites.get('sites', 0):,} failures in all sessions, of which {hinted:,} have a hint; {less}."
    if pairs:
        yield f"{pairs.get('pairs', pairs.get('rows', 0)):,} preference pairs."
    if sides:
        held = [
            f"{number:,} {key.removeprefix('sessions: ')}"
            for key, number in sides.items()
            if key.startswith("sessions: ")
        ]
        yield f"Split by session: {', '.join(held)}. What is held out was not learnt from."


def _scrubbing(run: RunDir, talk: Mapping[str, int]) -> str:
    if run.meta("conversations").settings.get("scrubbed") is not True:
        return "Secrets were left in on purpose (`--no-scrub`)."
    number = sum(count for key, count in talk.items() if key.startswith("redacted: "))
    return f"Secrets and names were taken out before anything was written: {number:,} places."


def _counts(run: RunDir, name: str) -> dict[str, int]:
    """A sidecar's counts with its number of rows; nothing where there is no such artefact, or one that is damaged."""
    try:
        meta = run.meta(name)
    except ComposerError:
        return {}
    return {**meta.counts, "rows": meta.rows} if name == "pairs" else dict(meta.counts)


def _training(record: Mapping[str, Any]) -> str:
    if not record:
        return "No record of a training lies beside these weights."
    channels = [channel for channel in record.get("channels", ()) if isinstance(channel, Mapping)]
    by_state: dict[bool, list[Mapping[str, Any]]] = {True: [], False: []}
    for channel in channels:
        by_state[bool(channel.get("steps"))].append(channel)
    ran = [
        f"{channel.get('name')} (weight {channel.get('weight'):g}, {channel.get('steps')} steps)"
        for channel in by_state[True]
    ]
    untaught = [f"{channel.get('name')} ({channel_in_words(channel, None)})" for channel in by_state[False]]
    warmed = f" after a warm-up of {record['warmup_steps']}" if record.get("warmup_steps") else ""
    lines = [
        f"{record.get('steps', 0)} steps{warmed}; channels that ran: {', '.join(ran) or 'none'}.",
        *([f"Channels that were not taught: {', '.join(untaught)}."] if untaught else []),
        f"Digests: config {str(record.get('config_hash'))[:12]}, start weights {str(record.get('start_digest'))[:12]}.",
        *(f"Alarm: {alarm}." for alarm in record.get("alarms", ())),
        *(f"Diagnosis: {finding}" for finding in record.get("diagnosis", ())),
    ]
    return "\n".join(f"- {_cell(line)}" for line in lines)


def _figures(evaluation: Mapping[str, Any] | None) -> Iterator[str]:
    """The verdict, then every figure with its interval; and when the primary one was named."""
    if evaluation is None:
        yield "Not evaluated: nobody knows whether this is better. `crf evaluate RUN` says."
        yield "Figures of other weights are not shown here."
        return
    verdict = evaluation["verdict"]
    yield " ".join(_cell(sentence) for sentence in verdict["sentences"])
    if remarks := verdict.get("remarks"):
        yield "\n".join(f"- {_cell(remark)}" for remark in remarks)
    rows = [_row(figure) for figure in evaluation["figures"] if figure.get("kind") is None]
    head = "| figure | arm | estimate | 95% interval | n | sessions | which way |\n|---|---|---|---|---|---|---|"
    yield "\n".join([head, *rows])
    when_named, over = evaluation.get("named", "after training"), (evaluation.get("split") or {}).get("over", "session")
    yield f"The figure in bold was named {when_named}, the others are exploratory. Intervals: over held-out {over}s."
    if damage := evaluation.get("damage"):
        lines = [
            f"| {_cell(metric['name'])} | {metric['before']:.4g} | {metric['after']:.4g} | {_cell(metric['unit'])} |"
            for metric in damage
        ]
        yield "\n".join(["| damage | before | after | unit |\n|---|---|---|---|", *lines])


def _row(figure: Mapping[str, Any]) -> str:
    label = f"**{_cell(figure['label'])}**" if figure.get("is_primary") else _cell(figure["label"])
    numbers = ["" if figure[key] is None else f"{figure[key]:+.3f}" for key in ("estimate", "low", "high")]
    has_none = figure["low"] == figure["high"]
    interval = "none: too few sessions, or all the same" if has_none else f"{numbers[1]} to {numbers[2]}"
    cells = [label, figure["arm"], f"{numbers[0]} {_cell(figure['unit'])}", interval]
    cells += [f"{figure['n']:,}", f"{figure['sessions']:,}", f"{figure['better']} is better"]
    return f"| {' | '.join(cells)} |"


def _limits_of(evaluation: Mapping[str, Any] | None) -> Iterator[str]:
    if evaluation is None:
        return
    yield (
        _cell(str(evaluation.get("power", {}).get("sentence", "")))
        or "Nobody computed which effect could have been seen."
    )
    for part, why in evaluation.get("not_run", {}).items():
        yield f"Not measured: {_cell(str(part))} ({_cell(str(why))})."


def _front_matter(head: Mapping[str, Any]) -> str:
    """YAML between dashes: every scalar is JSON, which YAML reads."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    return "\n".join(["---", *lines, "---"])


def _cell(text: str) -> str:
    """On one line, with nothing that markdown or a browser would act upon."""
    line = " ".join("".join(character if character.isprintable() else " " for character in str(text)).split())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("`", "'")
