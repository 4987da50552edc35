"""What `crf run` is told: checked before anything that takes seconds to load, and remembered beside what it makes.

`options.toml` of a run holds every option that is not a default. A later call for the same run begins with it, so that
`crf run RUN` goes on as the run began; what is typed then, or stands in a `--config`, comes before it.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.atomic import atomic_write_text
from composer_replication.batch.model_folder import check_model_name
from composer_replication.canonical_json import nested_items
from composer_replication.config import CrfConfig, to_toml
from composer_replication.config.presets import load_with_preset
from composer_replication.config.values import RESOLVED_NAME, value_text
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.session_sources import read_accounts
from composer_replication.runs import RunDir
from composer_replication.runs.directory import MARKER
from composer_replication.runs.files import read_pairs, read_sites
from composer_replication.runs.lineage import find_source, read_object
from composer_replication.runs.split import PlacedConversation, read_split, required_split
from composer_replication.trainer.trained import absolute_base

if TYPE_CHECKING:
    from composer_replication.evaluation.evaluate import Measurable


OPTIONS = "options.toml"
_SHOWN = 3
_HEAD = "# What `crf run` was told for this run. `crf run RUN` goes on with it; what is typed then comes first.\n"
_FILES = {
    "ingest": ("tools",),
    "sites": ("writer",),
    "replay": ("teachers",),
    "pairs": ("recipe",),
    "render": ("chat_template",),
    "train": ("output",),
    "evaluation": ("gsm8k", "code"),
}
_A_MODEL = "a folder with weights, a name on the hub, or `student`, the tiny model that comes with the package"


def settled(config: CrfConfig) -> CrfConfig:
    """The config with every path that is there made absolute: it means the same from the next folder on."""
    paths = tuple(_absolute(log) for log in config.ingest.paths)
    sections: dict[str, Any] = {"ingest": replace(config.ingest, paths=paths)}
    for name, keys in _FILES.items():
        section = sections.get(name, getattr(config, name))
        files = {key: path for key in keys if (path := getattr(section, key)) is not None}
        sections[name] = replace(section, **{key: _absolute(path) for key, path in files.items()})
    if config.train.model is not None:
        sections["train"] = replace(sections["train"], model=absolute_base(config.train.model))
    return replace(config, **sections)


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def told_before(output: Path) -> Path | None:
    """The file with what a run was told; None where there is no run, or one that `crf run` did not make."""
    path = output / OPTIONS
    return path if (output / MARKER).is_file() and path.is_file() else None


def remembered_options(root: Path) -> Path | None:
    """Return the file with a run's options: those of `crf run`, else those of the last training in it; None without."""
    return next((path for name in (OPTIONS, RESOLVED_NAME) if (path := root / name).is_file()), None)


def remember(config: CrfConfig, run: RunDir) -> None:
    """Write down what a config says beside its preset, for the next call."""
    plain = _items(load_with_preset(overrides=[f"train.preset={config.train.preset}"]))
    options = {key: value for key, value in _items(config).items() if value != plain.get(key)}
    preset = {"train.preset": config.train.preset} if config.train.preset != CrfConfig().train.preset else {}
    lines = [f"{key} = {value_text(value)}\n" for key, value in {**preset, **options}.items()]
    atomic_write_text(run.root / OPTIONS, _HEAD + "".join(lines))


def _items(config: CrfConfig) -> dict[str, Any]:
    return dict(nested_items(tomllib.loads(to_toml(config))))


def reused(path: Path, given: Sequence[str]) -> list[str]:
    """What a call takes over from the file, as it stands there: all that `given`, keys of this call, do not say."""
    return [
        f"{key} = {value_text(value)}"
        for key, value in nested_items(tomllib.loads(path.read_text(encoding="utf-8")))
        if key not in given
    ]


def check_given(config: CrfConfig, output: Path) -> None:
    """Raise for what can be seen to be wrong without a model: no logs, other logs, no model, a folder in the way."""
    run = RunDir.open(output) if output.is_dir() and any(output.iterdir()) else None
    has_sessions = run is not None and run.path("conversations").exists()
    if not config.ingest.paths and not has_sessions:
        expected = "a log or a folder with logs: `crf run PATH... --model MODEL`"
        raise InputError(explain("PATH", got="none, and no run to go on with", expected=expected))
    for path in map(Path, config.ingest.paths):
        if not path.expanduser().exists():
            fix = "Claude Code keeps its logs in ~/.claude/projects, Codex in ~/.codex/sessions."
            raise InputError(explain(str(path), got="no such file or folder", expected="session logs", fix=fix))
    if run is not None and has_sessions and config.ingest.paths:
        _refuse_other_logs(run, [Path(log).expanduser().resolve() for log in config.ingest.paths])
    if config.train.model is None:
        fix = "Type `--model Qwen/Qwen2.5-Coder-0.5B-Instruct`, say, or set train.model in the file of --config."
        raise InputError(explain("--model", got="none", expected=_A_MODEL, fix=fix))
    what = f"--model {config.train.model}"
    check_model_name(config.train.model, what=what, expected=_A_MODEL)
    if config.render.chat_template is None and not _may_have_template(Path(config.train.model)):
        fix = "Take a model that was made to chat, or set render.chat_template to a file with one that shows tools."
        raise InputError(explain(what, got="no chat template", expected="one, to show sessions with", fix=fix))


def _may_have_template(folder: Path) -> bool:
    """Whether a folder has a template where transformers looks for one; of what is no folder nobody knows yet."""
    if not folder.is_dir() or any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and "chat_template" in read_object(settings)


def without_lost_logs(config: CrfConfig) -> tuple[CrfConfig, list[str]]:
    """Without the logs that are not there any more, and which those are."""
    lost = [path for path in config.ingest.paths if not Path(path).expanduser().exists()]
    remaining_paths = tuple(path for path in config.ingest.paths if path not in lost)
    return replace(config, ingest=replace(config.ingest, paths=remaining_paths)), lost


def _refuse_other_logs(run: RunDir, paths: Sequence[Path]) -> None:
    """Sessions of other logs would join those of the run, and nobody would see it."""
    before = told_before(run.root)
    known_logs = _logs_of(run) if before is None else map(Path, load_with_preset(before).ingest.paths)
    missing_logs = list(dict.fromkeys(str(log) for log in known_logs if not any(map(log.is_relative_to, paths))))
    if missing_logs:
        names = ", ".join(missing_logs[:_SHOWN]) + (
            f" and {len(missing_logs) - _SHOWN} more" if len(missing_logs) > _SHOWN else ""
        )
        fix = "For these alone name another run: `-o RUN2`. To add them to this one, name all logs, those of it, too."
        got = f"logs without {names}, of which {run.root} was made"
        raise InputError(explain("PATH", got=got, expected="the logs of the run", fix=fix))


def _logs_of(run: RunDir) -> Iterator[Path]:
    """Main logs of the run's sessions that are still there; names that were scrubbed lead nowhere."""
    for account in read_accounts(run):
        path = find_source(account.path, run.root)
        if account.conversations and path.exists():
            yield path.resolve()


# Whether there is enough to learn from, and enough errors to judge by: both are checked before any training.

_SEEN_FROM = 1.96 + 0.84
"""Standard errors that an effect must have to be seen, at 5%, four times of five."""
_WHY_LEFT_OUT = {
    "near_duplicate": "also in a training session",
    "no_good_call_in_the_session": "in a session without a good call",
    "no_correction": "without a right call in its session",
    "without_hint": "without a hint",
}
"""Reasons of the evaluation in words; those of a template or of a window are shown by their names."""


class Side(NamedTuple):
    """The sessions that are learnt from, those of them with a mistake that may be taught, and these mistakes."""

    sessions: int = 0
    erring: int = 0
    mistakes: int = 0


class Learnable(NamedTuple):
    """What there is to learn from. `failures` are all of the run's, by who caused them.

    A mistake is a failure of the model that is kept with a hint.
    """

    learnt: Side
    pairs: int
    failures: Counter[str]

    def in_words(self) -> str:
        blamed = ", ".join(f"{number} {blame}" for blame, number in self.failures.most_common())
        failed = f"{_many(self.failures.total(), 'failure')} (whose doing: {blamed})" if blamed else "no call failed"
        return (
            f"{_many(self.learnt.mistakes, 'mistake')} to teach in {self.learnt.erring} of {self.learnt.sessions}"
            f" sessions, and {_many(self.pairs, 'pair')}; in the whole run {failed}"
        )


def learnable(run: RunDir) -> Learnable:
    """Count what the sites and pairs of a run have to teach with, outside of its test sessions."""
    rows = {row.conversation_id: row for row in read_split(run) or ()}
    test = {identity for identity, row in rows.items() if row.side == "test"}
    failures, mistakes = Counter[str](), list[str]()
    for site, hint in read_sites(run):
        failures.update([site.blame] if site.kind != "no_failure" else [])
        is_taught = site.is_kept and hint is not None and site.conversation_id not in test
        mistakes += [site.conversation_id] if is_taught else []
    return Learnable(
        learnt=_side([row for row in rows.values() if row.side != "test"], mistakes),
        pairs=sum(identity not in test for identity, _ in read_pairs(run)),
        failures=failures,
    )


def _side(rows: list[PlacedConversation], mistakes: list[str]) -> Side:
    """In a run that was never split every conversation is a session of its own."""
    session_of = {row.conversation_id: row.session for row in rows}
    erring = {session_of.get(conversation_id, conversation_id) for conversation_id in mistakes}
    return Side(len({*session_of.values(), *erring}), len(erring), len(mistakes))


def check_learnable(config: CrfConfig, there: Learnable) -> None:
    """Raise InputError, with what would change it, where there is too little to learn from."""
    to_learn, fewest = there.learnt.mistakes + there.pairs, max(config.run.fewest, 1)
    if to_learn < fewest:
        fix = (
            "More sessions would change that, of an agent whose calls fail now and then: add their folders. So would "
            "advisers who say what they would have done (--advisers), and pairs.where_it_worked = true with them; "
            "sites.min_confidence = 0.3 keeps failures that are less sure. run.fewest = 0 trains all the same."
        )
        few = "your data is too thin" if to_learn else "nothing to learn"
        raise InputError(
            explain(few, got=there.in_words(), expected=f"at least {fewest} together (run.fewest)", fix=fix)
        )


def to_judge_by(config: CrfConfig, run: RunDir) -> Measurable:
    """Return what the evaluation of this run will measure, by its own selection; loads the model's tokenizer.

    `config` is the one that the training and the evaluation get: its windows fit the model.
    """
    from composer_replication.evaluation.evaluate import measurable

    return measurable(config, run, required_split(run), config.train.required_model())


def check_judgeable(config: CrfConfig, there: Learnable, judged: Measurable, say: Callable[[str], None]) -> None:
    """Say what the evaluation will measure; raise InputError where it is too little for a verdict."""
    needed = config.evaluation.fewest_sessions
    if judged.units >= needed:
        say(f"to judge by: {_judged_in_words(config, judged)}")
    elif config.run.without_verdict:
        words = _judged_in_words(config, judged)
        say(f"no verdict will be possible: {words}, and {needed} {judged.over}s are needed")
    else:
        raise InputError(_no_verdict(config, there, judged))


def _judged_in_words(config: CrfConfig, judged: Measurable) -> str:
    """What is measured, why other errors are left out, and how large an effect must be to show."""
    noun = "state" if config.evaluation.primary == "sampled_failures" else "mistake"
    words = f"{_many(judged.values, noun)} in {judged.units} of {judged.held_out} held-out {judged.over}s"
    if judged.left_out:
        reasons = ", ".join(f"{number:,} {_why_left_out(name)}" for name, number in judged.left_out.items())
        words += f" (left out: {reasons})"
    if judged.units < 2:
        return words
    smallest = _SEEN_FROM / math.sqrt(judged.units)
    return f"{words}; smallest detectable effect: about {smallest:.1f} standard deviations between {judged.over}s"


def _why_left_out(name: str) -> str:
    reason = name.partition(": ")[2] or name  # as `sdpo_jsd: without_hint`
    return _WHY_LEFT_OUT.get(reason, reason.replace("_", " "))


def _no_verdict(config: CrfConfig, there: Learnable, judged: Measurable) -> str:
    """Training would take its time, and at its end nobody could say whether it helped."""
    needed, more = config.evaluation.fewest_sessions, "More sessions would change that"
    if judged.over == "session" and judged.units:
        sessions, measured = there.learnt.sessions + judged.held_out, judged.units / judged.held_out
        more += f", about {math.ceil(needed * sessions / judged.units):,} like these in all"
        if judged.held_out / sessions < (larger := math.ceil(20 * needed / (measured * sessions)) / 20) <= 0.5:
            more += f"; or a larger held-out share, `--set split.test={larger:g}`"
    fix = f"{more}. To train all the same, without an answer to whether it helped: `--set run.without_verdict=true`."
    expected = f"mistakes in at least {needed} held-out {judged.over}s (evaluation.fewest_sessions)"
    return explain("too little to judge by", got=_judged_in_words(config, judged), expected=expected, fix=fix)


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
