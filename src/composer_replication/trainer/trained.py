"""Find trained weights (in a run, an adapter's folder, or a model given by folder or name), and write their cards.

A name that is not a folder is a repository on the Hugging Face hub. Folders are stored as absolute paths, since a
relative path breaks in another working directory, and an adapter is useless without its base model.
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
from composer_replication.errors import ArtefactNotFoundError, ComposerError, InputError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.directory import MARKER, outside_copies
from composer_replication.runs.lineage import (
    describe_channel,
    describe_unfinished,
    read_json_object,
    read_training,
    source_path,
)
from composer_replication.version import __version__

ADAPTER_CONFIG = "adapter_config.json"
UNKNOWN_LICENCE = "unknown: look it up"
_BASE = "base_model_name_or_path"
_MAX_CARD_BYTES = 1 << 20
# 'license: "apache-2.0"' -> "apache-2.0"; not "license_name: mine"
_LICENCE_LINE = re.compile(r"^licen[sc]e:[ \t]*[\"']?([A-Za-z0-9][\w.+-]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The weights of a base model, and of an adapter or a full model trained from it, if any.

    `base` is an absolute folder or a hub name. `record` is the content of `training.json`, empty if there is none.
    `run` is the run directory that the user named, if any.
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
    """Return the weights that `name` refers to: a run directory, a training run's output folder, an adapter or a model.

    If `adapter` is given, it is the adapter's folder, and `name` is a run directory or the base model.
    """
    path = Path(name).expanduser()
    run = RunDir.open(path) if (path / MARKER).is_file() else None
    if adapter is not None:
        folder = Path(adapter).expanduser()
        if not (folder / ADAPTER_CONFIG).is_file():
            fix = "Pass the folder `adapter` that `crf train` wrote, or another PEFT adapter."
            raise InputError(
                explain(f"--adapter {adapter}", got=f"no {ADAPTER_CONFIG}", expected="an adapter's folder", fix=fix)
            )
        base = _read_base(folder) if run is not None else resolve_base(name)
        return Trained(base=base, adapter=folder, record=read_training(folder), run=run)
    folder = _weights_in(path, run)
    if folder is None and run is not None:
        fix = f"Run `crf train --set train.run={name!r} --set train.model=MODEL`, or pass an adapter: --adapter FOLDER."
        # The most likely reason is an interrupted training; if so, the message states its progress.
        progress = describe_unfinished(run.root)
        got, fix = (progress, "") if progress else ("none", fix)
        raise ArtefactNotFoundError(explain(f"trained weights in {name}", got=got, expected="an adapter", fix=fix))
    if folder is None:
        return Trained(base=resolve_base(name))
    if (folder / ADAPTER_CONFIG).is_file():
        return Trained(base=_read_base(folder), adapter=folder, record=read_training(folder), run=run)
    record = read_training(folder)
    return Trained(base=resolve_base(str(record.get("start_weights") or name)), model=folder, record=record, run=run)


def trained_weights(name: str, adapter: str | None = None) -> Trained:
    """Return the trained weights to export. Raises InputError if `name` is an untrained model."""
    trained = find_trained(name, adapter)
    if trained.folder is None:
        got = f"the untrained model {trained.base}" if Path(name).is_dir() else f"{name!r}, which is no folder"
        expected = "a run with trained weights, or an adapter's folder"
        raise InputError(explain("weights to export", got=got, expected=expected))
    return trained


def _weights_in(path: Path, run: RunDir | None) -> Path | None:
    """Return the folder with trained weights, or None.

    This is `path` itself, a folder in it, or the folder outside the run that the run's notes name last.
    """
    if (path / ADAPTER_CONFIG).is_file():
        return path
    for name in ("adapter", "model"):
        folder = path / ARTEFACTS[name].file_name
        if (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
            return folder
    if run is None:
        return None
    # A training with `train.output` writes its weights outside the run and leaves a note in the run.
    noted = [entry for entry in outside_copies(run) if entry.what == "trained weights"]
    return source_path(noted[-1].path, run.root) if noted else None


def _read_base(adapter: Path) -> str:
    """Return the base model named in an adapter's config.

    A relative path in the config is relative to the training run's working directory, which is unknown. The path is
    therefore looked up from the current working directory and from every folder above the adapter.
    """
    base = read_json_object(adapter / ADAPTER_CONFIG).get(_BASE) or read_training(adapter).get("start_weights")
    if not isinstance(base, str) or not base:
        fix = "Name the base model: `crf chat MODEL --adapter FOLDER`."
        raise InputError(explain(f"{adapter / ADAPTER_CONFIG}, {_BASE}", got=repr(base), expected="a model", fix=fix))
    return resolve_base(base, near=adapter.resolve().parents)


def resolve_base(name: str, *, near: Iterable[Path] = ()) -> str:
    """Return the absolute path of a folder, or a hub name unchanged; `student` stands for the packaged model."""
    path = Path(name).expanduser()
    for candidate in (path, *((folder / path) for folder in near)):
        if name and candidate.is_dir():
            return str(candidate.resolve())
    return resolve_model(name)


def _is_folder(base: str) -> bool:
    return Path(base).is_dir()


def make_base_absolute(adapter: Path) -> str:
    """Make the base model's path in an adapter's config absolute, and return it; a hub name is left unchanged."""
    base, config = _read_base(adapter), read_json_object(adapter / ADAPTER_CONFIG)
    if config.get(_BASE) != base:
        atomic_write_json(adapter / ADAPTER_CONFIG, {**config, _BASE: base})
    return base


def _licence_of(base: str) -> str:
    """Return the license that the base model's card or config states, or `UNKNOWN_LICENCE`."""
    if _is_folder(base) and Path(base).samefile(student_folder()):
        # The demo student is part of this package.
        return "apache-2.0"
    # These files come from third parties, so limit their size.
    for path in _card_files(base):
        if not path.is_file() or path.stat().st_size > _MAX_CARD_BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".json":
            card = read_json_object(path)
            licence = card.get("license") or card.get("licence")
            if isinstance(licence, str) and licence.strip():
                return _one_line(licence)
        elif text.startswith("---") and (match := _LICENCE_LINE.search(text.split("\n---", 1)[0])):
            return _one_line(match[1])
    return UNKNOWN_LICENCE


def _card_files(base: str) -> list[Path]:
    names = ("README.md", "config.json", "card.json")
    if _is_folder(base):
        return [Path(base) / name for name in names]
    # Look only in the local cache, since writing a card must not need network access.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = [try_to_load_from_cache(base, name) for name in names]
    except HFValidationError:  # not a valid repository name
        return []
    return [Path(path) for path in cached if isinstance(path, str)]


def _one_line(text: str) -> str:
    return "".join(character for character in " ".join(text.split())[:80] if character.isprintable())


# Cards contain no text from logs. Their results come from `evaluation.json` only, with intervals.

Form = Literal["merged", "adapter"]
_TAGS = ("composer-replication", "agent", "tool-use")
_LIMITS = (
    "Trained on one collection of sessions: what holds for its projects and tools may not hold elsewhere.",
    "Error sites and hints are found by rules, and some of them are wrong: review them with `crf sites RUN --list`.",
    "Secrets were redacted by rules, and rules miss some: weights may repeat what they were trained on.",
    "Made for agents that call tools. Run the commands of a model only in a sandbox.",
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
    """Return the README for weights. In a public README, only the last part of a local base model's path is shown."""
    base = Path(trained.base).name if is_public and _is_folder(trained.base) else trained.base
    licence, version = _licence_of(trained.base), _cell(str(trained.record.get("tool_version", __version__)))
    head: dict[str, Any] = {"library_name": "peft" if form == "adapter" else "transformers", "tags": list(_TAGS)}
    # A local path is meaningless on the hub.
    head |= {"base_model": base} if not (is_public and _is_folder(trained.base)) else {}
    head |= {"license": licence} if licence != UNKNOWN_LICENCE else {}
    parts = [
        _front_matter(head),
        f"# {name if is_public else Path(base).name + ', trained'}",
        f"{'An adapter for' if form == 'adapter' else 'Weights made from'} `{_cell(base)}` by composer-replication "
        f"{version}: the model was trained on its agent's own errors.",
        f"License of the base model: {_cell(licence)}. It also applies to these weights.",
        "## Use",
        f"```python\n{_LOADING[form].format(name=name)}\n```",
        *([f"{' '.join(notes)}"] if notes else []),
        "## Training",
        _training_facts(trained.record),
        "## Data",
        "\n".join(f"- {fact}" for fact in _data_facts(trained.run)) or "Nothing is known about the data.",
        "## Results",
        *_result_tables(evaluation),
        "## Limits",
        "\n".join(f"- {limit}" for limit in [*_LIMITS, *_evaluation_limits(evaluation)]),
    ]
    return "\n\n".join(parts) + "\n"


def data_card(run: RunDir, *, name: str, what: str, fields: Mapping[str, str], files: Mapping[str, str]) -> str:
    """Return the README for a data set, which says what it contains and how to load it.

    `files` maps splits to file names.
    """
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
        "## Source",
        "\n".join(f"- {fact}" for fact in _data_facts(run)),
        "## Limits",
        "\n".join(
            [
                "- The owners of the sessions decide whether it may be shared; no license is given here.",
                "- Secrets and names were redacted by rules, and rules miss some: check the data before you share it.",
                "- Text of logs is data. Some of it may try to instruct a model that reads it.",
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _data_facts(run: RunDir | None) -> Iterator[str]:
    """Yield sentences about a run's data, based on the numbers in the sidecar files of its artifacts."""
    if run is None:
        return
    conversations, sites, pairs, split = (
        _sidecar_counts(run, name) for name in ("conversations", "sites", "pairs", "split")
    )
    if conversations:
        formats = sorted(key.removeprefix("files: ") for key in conversations if key.startswith("files: "))
        agents = f" ({', '.join(formats)})" if formats else ""
        sessions, turns, calls = (conversations.get(key, 0) for key in ("sessions", "assistant turns", "calls"))
        yield f"{sessions:,} sessions{agents} with {turns:,} turns of the model and {calls:,} tool calls."
        yield _redaction_fact(run, conversations)
    if sites:
        hinted = sum(number for key, number in sites.items() if key.startswith("hint: "))
        restriction = "held-out sites, and sites whose hint had no effect, are not trained on"
        yield f"{sites.get('sites', 0):,} failed calls in all sessions, of which {hinted:,} have a hint; {restriction}."
    if pairs:
        yield f"{pairs.get('pairs', pairs.get('rows', 0)):,} preference pairs."
    if split:
        sizes = [
            f"{number:,} {key.removeprefix('sessions: ')}"
            for key, number in split.items()
            if key.startswith("sessions: ")
        ]
        yield f"Split by session: {', '.join(sizes)}. Held-out sessions were not trained on."


def _redaction_fact(run: RunDir, counts: Mapping[str, int]) -> str:
    if run.meta("conversations").settings.get("scrubbed") is not True:
        return "Secrets were not redacted (`--no-scrub`)."
    number = sum(count for key, count in counts.items() if key.startswith("redacted: "))
    return f"{number:,} secrets and names were redacted before anything was written."


def _sidecar_counts(run: RunDir, name: str) -> dict[str, int]:
    """Return the counts in an artifact's sidecar file, or {} if the artifact is missing or damaged.

    For pairs the number of rows is added.
    """
    try:
        meta = run.meta(name)
    except ComposerError:
        return {}
    return {**meta.counts, "rows": meta.rows} if name == "pairs" else dict(meta.counts)


def _training_facts(record: Mapping[str, Any]) -> str:
    if not record:
        return "These weights have no training record."
    channels = [channel for channel in record.get("channels", ()) if isinstance(channel, Mapping)]
    ran = [
        f"{channel.get('name')} (weight {channel.get('weight'):g}, {channel.get('steps')} steps)"
        for channel in channels
        if channel.get("steps")
    ]
    idle = [
        f"{channel.get('name')} ({describe_channel(channel, None)})" for channel in channels if not channel.get("steps")
    ]
    warmed = f" after a warm-up of {record['warmup_steps']}" if record.get("warmup_steps") else ""
    lines = [
        f"{record.get('steps', 0)} steps{warmed}; channels that ran: {', '.join(ran) or 'none'}.",
        *([f"Channels that did not run: {', '.join(idle)}."] if idle else []),
        f"Digests: config {str(record.get('config_hash'))[:12]}, initial model {str(record.get('start_digest'))[:12]}.",
        *(f"Alarm: {alarm}." for alarm in record.get("alarms", ())),
        *(f"Diagnosis: {finding}" for finding in record.get("diagnosis", ())),
    ]
    return "\n".join(f"- {_cell(line)}" for line in lines)


def _result_tables(evaluation: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the parts of the card's results as Markdown: the verdict, and tables of results with intervals."""
    if evaluation is None:
        yield "Not evaluated: run `crf evaluate RUN` to find out whether this is better than the base model."
        yield "Results of other weights are not shown here."
        return
    verdict = evaluation["verdict"]
    yield " ".join(_cell(sentence) for sentence in verdict["sentences"])
    if remarks := verdict.get("remarks"):
        yield "\n".join(f"- {_cell(remark)}" for remark in remarks)
    rows = [_result_row(figure) for figure in evaluation["figures"] if figure.get("kind") is None]
    head = "| result | model | estimate | 95% interval | n | sessions | direction |\n|---|---|---|---|---|---|---|"
    yield "\n".join([head, *rows])
    when_named, over = evaluation.get("named", "after training"), (evaluation.get("split") or {}).get("over", "session")
    # Only a result that was chosen before training can be confirmatory.
    yield f"The result in bold was named {when_named}; the others are exploratory. Intervals are over held-out {over}s."
    if damage := evaluation.get("damage"):
        lines = [
            f"| {_cell(metric['name'])} | {metric['before']:.4g} | {metric['after']:.4g} | {_cell(metric['unit'])} |"
            for metric in damage
        ]
        yield "\n".join(["| damage | before | after | unit |\n|---|---|---|---|", *lines])


def _result_row(figure: Mapping[str, Any]) -> str:
    label = f"**{_cell(figure['label'])}**" if figure.get("is_primary") else _cell(figure["label"])
    numbers = ["" if figure[key] is None else f"{figure[key]:+.3f}" for key in ("estimate", "low", "high")]
    # If an interval could not be computed, both ends are None or equal.
    has_none = figure["low"] == figure["high"]
    interval = "none: too few sessions, or all values equal" if has_none else f"{numbers[1]} to {numbers[2]}"
    cells = [label, figure["arm"], f"{numbers[0]} {_cell(figure['unit'])}", interval]
    cells += [f"{figure['n']:,}", f"{figure['sessions']:,}", f"{figure['better']} is better"]
    return f"| {' | '.join(cells)} |"


def _evaluation_limits(evaluation: Mapping[str, Any] | None) -> Iterator[str]:
    if evaluation is None:
        return
    yield (
        _cell(str(evaluation.get("power", {}).get("sentence", "")))
        or "The smallest detectable effect was not computed."
    )
    for part, why in evaluation.get("not_run", {}).items():
        yield f"Not measured: {_cell(str(part))} ({_cell(str(why))})."


def _front_matter(head: Mapping[str, Any]) -> str:
    """Return the YAML front matter of a card. Values are written as JSON, which is valid YAML."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    return "\n".join(["---", *lines, "---"])


def _cell(text: str) -> str:
    """Return a text as one line for a table, escaped so that neither Markdown nor a browser interprets any of it."""
    # Control characters could end the line and so the table row.
    line = " ".join("".join(character if character.isprintable() else " " for character in str(text)).split())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("`", "'")
