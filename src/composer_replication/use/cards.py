"""Cards: what weights were made of and are known to do, and what a data set holds. No text of a log is in them.

Figures come from `evaluation.json` alone, with their intervals; where nobody evaluated, the card says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from composer_replication.errors import ComposerError
from composer_replication.runs import RunDir
from composer_replication.runs.evaluation import read_evaluation, weight_files_digest
from composer_replication.runs.lineage import channel_in_words
from composer_replication.use.trained import UNKNOWN_LICENCE, Trained, is_folder, licence_of
from composer_replication.version import __version__

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
        "\n".join(f"- {fact}" for fact in data_facts(trained.run)) or "Nothing is known here about the data.",
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
        "\n".join(f"- {fact}" for fact in data_facts(run)),
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


def data_facts(run: RunDir | None) -> Iterator[str]:
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
