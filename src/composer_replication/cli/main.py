"""`crf`: finds the verb, runs it, and turns what went wrong into a sentence and an exit status (`EXIT_CODES`).

What nobody foresaw is a sentence, too; with CRF_DEBUG=1 it is a traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

# The verbs, in the order of the pipeline. Each is a module of this package with add_arguments(parser) and
# run(args) -> exit status; only the one that was typed is imported.
VERBS = {
    "ingest": "read session logs (Claude Code, Codex, ATIF, ...) into a run directory, secrets out",
    "split": "choose the sessions to learn from and those that judge it, once and for all later steps",
    "sites": "find the turns that erred, whose fault it was, and what to say about it",
    "hints": "list the hint of every mistake that may be taught, strike hints out, or let a model write them",
    "judge": "predict from what was known before each call whether it would fail, and count how often that was right",
    "inspect": "show which tokens of a site are trained, the hint, and the rows that predict the same token",
    "teachers": "look up what teachers cost, and write them with their prices",
    "replay": "ask teachers what they would have done at each state, within a hard cap",
    "pairs": "make preference pairs of what teachers agree on, and of what sessions put right themselves",
    "train": "train on a run's sessions, or on rollouts, and write an adapter",
    "evaluate": "compare two models on a run's held-out sessions, and say whether the second is better",
    "report": "write report.html and report.md: did it help, what was learnt from, and every decision to look at",
    "run": "run all steps from logs to an adapter, its evaluation and a report; run it again to continue",
    "demo": "run everything on generated sessions and a tiny model: training, control, evaluation, report",
    "ablate": "train several arms with several seeds at equal budgets, and say with intervals which of them helps",
    "diloco": "train one model with several replicas that share a bucket: launch, watch, cancel, collect",
    "export": "hand out a run's weights (merged, GGUF, Ollama, vLLM) with their card, or its sessions as a data set",
    "chat": "chat with a model, or with both versions side by side, at a held-out state or in your own words",
    "forget": "remove sessions, and everything derived from them, from a run; they do not come back",
    "world": "play scripted agents in a small world: show a session, write many as logs, or answer as advisers",
    "doctor": "look at Python, packages, GPU, memory, disk and, where they are named, a model and an endpoint",
    "completion": "print a script that makes bash, zsh or fish complete crf's verbs and options",
}

DONE, FAILED, NOT_UNDERSTOOD, NOT_YET, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = {
    DONE: "done",
    FAILED: "it could not be done, or a check failed (`crf doctor`); stderr says why and what to do",
    NOT_UNDERSTOOD: "the command was not understood: an unknown verb, option or choice",
    NOT_YET: "not yet: replicas still run (`crf diloco collect --timeout`), and what they end with is not there",
    INTERRUPTED: "stopped by Ctrl-C, or a training by SIGTERM; nothing is half written, and the same command goes on",
}
_WHEN_INTERRUPTED = "nothing was half written, and the same command can be run again"
_WHAT_TO_DO = {
    errno.ENOSPC: "Make room on that disk",
    errno.EDQUOT: "Make room there: a quota is used up",
    errno.EFBIG: "That file may not grow any more: look at the limits of the file system and of `ulimit -f`",
    errno.EROFS: "That place is read-only: name another one",
    errno.EACCES: "Look at whose the file or folder is",
    errno.EPERM: "Look at whose the file or folder is",
    errno.EMFILE: "Too many files are open: raise `ulimit -n`",
    errno.EIO: "The disk or the network drive fails",
}
_AGAIN = "No artefact was left half written, and the same command can be run again."
_OTHER_FILE = "Take another tokenizer or file."
_UNFORESEEN = (
    "This was not foreseen: please report it, with what CRF_DEBUG=1 in front of the same command prints. "
    "No artefact was left half written."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `crf` with these arguments; the exit status is returned, not raised."""
    from composer_replication.cli.console import rank_of_process, say, say_error
    from composer_replication.errors import ComposerError, is_rust_panic

    try:
        args = _understood(argv)
    except SystemExit:  # help was asked for, or the command was not understood
        _drop_output()
        raise
    verb = _module_of(args.verb)
    try:
        status = verb.run(args)
        _flush()  # here, where a reader that is gone or a disk that is full can be noticed
        return status
    except KeyboardInterrupt:
        if rank_of_process() == 0:
            say(f"crf {args.verb}: interrupted; {getattr(verb, 'WHEN_INTERRUPTED', _WHEN_INTERRUPTED)}")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our stdout has seen enough
        _drop_output()
        return DONE
    except ComposerError as error:
        say_error(args.verb, str(error), is_own=True)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        if os.environ.get("CRF_DEBUG") and not isinstance(error, OSError):
            raise
        say_error(args.verb, in_words(error), is_own=False)
    _drop_output()
    return FAILED


def _understood(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; an option that its verb does not have ends with the verb's own usage and the nearest it has."""
    words = sys.argv[1:] if argv is None else argv
    parser, verbs = _parsers([word for word in words if word in VERBS][:1])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        is_before_verb = unknown[0] in parser.words[: parser.words.index(args.verb)]  # crf --verison train
        blamed = parser if is_before_verb else _innermost(verbs[args.verb], args)
        blamed.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


class _SuggestingParser(argparse.ArgumentParser):
    """A parser whose errors name the nearest verb, choice or option to a word that it does not know."""

    words: Sequence[str] = ()

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] (its overloads name the same two)
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        self.words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with the usage and the message. An unknown option may be why something else seems to be missing."""
        options = list(self._option_string_actions)
        typed = [word.partition("=")[0] for word in self.words if word.startswith("-") and word != "--"]
        near = [match for word in typed if word not in options for match in get_close_matches(word, options, n=1)]
        if near and "did you mean" not in message:  # the nearest verb or choice is named already
            message += f" (did you mean {' and '.join(near)}?)"
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = get_close_matches(str(value), [str(choice) for choice in action.choices or ()], n=1)
            if not near:
                raise
            raise argparse.ArgumentError(action, f"{error.message} (did you mean {near[0]}?)") from None


def _innermost(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of a verb, or of the verb behind it (`crf world logs`)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[getattr(args, action.dest)]
    return parser


def _flush() -> None:
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
        sys.stdout.flush()


def _drop_output() -> None:
    """What is left to write goes nowhere: Python would try once more when it ends, and complain on its own."""
    try:
        _flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs. No abbreviations: `--no-scrub` has to be meant."""
    return _parsers(VERBS)[0]


def _parsers(imported: Iterable[str]) -> tuple[_SuggestingParser, dict[str, _SuggestingParser]]:
    """Return the parser of `crf`, and that of each verb; verbs that are not `imported` have no options yet."""
    from composer_replication.version import __version__

    parser = _SuggestingParser(
        prog="crf",
        description="From the session logs of coding agents to a better model.",
        epilog="exit status: " + "; ".join(f"{code} {what.partition(',')[0]}" for code, what in EXIT_CODES.items()),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"crf {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, summary in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=summary, allow_abbrev=False)
        if verb in imported:
            _module_of(verb).add_arguments(sub)
    return parser, verbs.choices


def _module_of(verb: str) -> ModuleType:
    return import_module(f"composer_replication.cli.{verb}")


# ---- what went wrong outside of this program, in a sentence that says what to do


def in_words(error: BaseException) -> str:
    """One line about an error that is nobody's on purpose."""
    from composer_replication.errors import is_rust_panic

    lines = str(error).strip().splitlines()
    first = lines[0].rstrip(".") if lines else ""
    if isinstance(error, OSError):
        advice = _WHAT_TO_DO.get(error.errno or 0)
        return f"{first or type(error).__name__}. {advice}. {_AGAIN}" if advice else str(error)
    if isinstance(error, MemoryError):
        return f"there is not enough memory{': ' + first if first else ''}. {_AGAIN}"
    if _is_of(error, "sqlite3", "Error"):
        return f"teacher_cache.sqlite: {first}. {_about_store(first)}"
    if _is_of(error, "safetensors", "SafetensorError"):
        return f"a safetensors file that cannot be read: {first}. Get it again, or take another checkpoint. {_AGAIN}"
    if is_rust_panic(error):
        return f"a library stopped over what it was given, such as a model's tokenizer: {first}. {_OTHER_FILE} {_AGAIN}"
    return f"{type(error).__name__}{': ' + first if first else ''}. {_UNFORESEEN}"


def _about_store(message: str) -> str:
    if "full" in message or "readonly" in message or "unable to open" in message or "disk I/O" in message:
        return f"The store of paid answers cannot be written: make room, or look at whose the file is. {_AGAIN}"
    if "locked" in message or "busy" in message:
        return "Another process has held the store of paid answers for too long: wait until it is done."
    return (
        "The store of paid answers is damaged: move the file away, together with its -wal and -shm, if they lie beside "
        "it; a copy from before may take its place. Without one what was answered is asked again, and the cap begins "
        "anew."
    )


def _is_of(error: BaseException, module: str, name: str) -> bool:
    """Whether an error is of a library's class; one that was never loaded has raised nothing."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(error, kind)
