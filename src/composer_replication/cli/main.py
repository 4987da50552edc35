"""`crf`: find the verb, run it, and turn exceptions into one line on stderr and an exit status (`EXIT_CODES`).

Unexpected exceptions are printed as one line, too. With CRF_DEBUG=1, their traceback is printed instead.
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

from composer_replication.cli.console import log, rank_of_process

# The verbs, in the order of the pipeline. Each is a module of this package with add_arguments(parser) and
# run(args) -> exit status; only the one that was typed is imported, because some of them load torch.
VERBS = {
    "ingest": "read session logs (Claude Code, Codex, ATIF, ...) into a run directory and redact secrets",
    "split": "split the sessions into train, validation and test, before anything is learned from them",
    "sites": "find failed tool calls, decide whose fault each was, and write hints for the model's own errors",
    "hints": "list the hints, reject some of them, or let a model write them",
    "judge": "predict before each call whether it will fail, and count how often that was right",
    "inspect": "show a site token by token: what is trained on, the hint, and which rows predict the same token",
    "teachers": "look up what teachers cost, and write a teachers file with prices",
    "replay": "ask teachers what they would have done at each state, up to a spending cap",
    "pairs": "make preference pairs from what teachers agree on and from errors that sessions corrected themselves",
    "train": "train on a run's sessions, or on rollouts, and write an adapter",
    "evaluate": "compare two models on a run's held-out sessions, and say whether the second is better",
    "report": "write report.html and report.md: whether it helped, what it was trained on, what to review",
    "run": "run all steps from logs to an adapter, its evaluation and a report; run it again to resume",
    "demo": "run everything on generated sessions and a tiny model: training, control, evaluation, report",
    "ablate": "train several arms with several seeds at equal budgets, and report with intervals which ones help",
    "diloco": "train one model with several replicas that share a bucket: launch, watch, cancel, collect",
    "export": "export a run's weights (merged, GGUF, Ollama, vLLM) with a model card, or its sessions as a data set",
    "chat": "chat with a model, or with the models before and after training, freely or at a state of a session",
    "forget": "remove sessions, and everything derived from them, from a run for good",
    "world": "run scripted agents in a toy environment: show a session, write many as logs, or serve as advisers",
    "doctor": "check Python, packages, GPU, memory, disk, and optionally a model and an endpoint",
    "completion": "print a script that completes crf's verbs and options in bash, zsh or fish",
}

DONE, FAILED, USAGE_ERROR, NOT_YET, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = {
    DONE: "done",
    FAILED: "failed, or a check failed (`crf doctor`); stderr says why and what to do",
    USAGE_ERROR: "usage error: unknown verb or option, or a bad value",
    NOT_YET: "replicas are still running (`crf diloco collect --timeout`), no result yet",
    INTERRUPTED: "interrupted by Ctrl-C, or a training by SIGTERM; all files are complete, rerun to resume",
}
# A verb may have a more precise message of its own, also called `WHEN_INTERRUPTED`.
_WHEN_INTERRUPTED = "all files are complete; run the same command again"
_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "Free some space on that disk",
    errno.EDQUOT: "Free some space: the disk quota is used up",
    errno.EFBIG: "The file is too large: check the limits of the file system and `ulimit -f`",
    errno.EROFS: "That file system is read-only: choose another folder",
    errno.EACCES: "Check the owner and permissions of the file or folder",
    errno.EPERM: "Check the owner and permissions of the file or folder",
    errno.EMFILE: "Too many files are open: raise `ulimit -n`",
    errno.EIO: "The disk or the network drive is failing",
}
_RUN_AGAIN = "All files are complete; run the same command again."
_BUG = "This is a bug. Please report it with the traceback that `CRF_DEBUG=1 crf ...` prints. All files are complete."


def main(argv: Sequence[str] | None = None) -> int:
    """Run `crf` with these arguments and return its exit status. Raises SystemExit only for usage errors and --help."""
    from composer_replication.errors import ComposerError, is_rust_panic

    try:
        args = _parse_arguments(argv)
    except SystemExit:  # --help, or a usage error
        _discard_output()
        raise
    verb = _import_verb(args.verb)
    try:
        status = verb.run(args)
        # Flush here: at exit, Python would report a closed pipe or a full disk as an ignored exception.
        _flush()
        return status
    except KeyboardInterrupt:
        if rank_of_process() == 0:
            log(f"crf {args.verb}: interrupted; {getattr(verb, 'WHEN_INTERRUPTED', _WHEN_INTERRUPTED)}")
        return INTERRUPTED
    except BrokenPipeError:  # `crf sites RUN --list | head` closes stdout early
        _discard_output()
        return DONE
    except ComposerError as error:
        _log_error(args.verb, str(error), is_expected=True)
    except BaseException as error:
        # A panic in a Rust extension (tokenizers) derives from BaseException.
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        if os.environ.get("CRF_DEBUG") and not isinstance(error, OSError):
            raise
        _log_error(args.verb, _describe_error(error), is_expected=False)
    _discard_output()
    return FAILED


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. For an unknown option, exit with the usage of the verb and the closest known option."""
    words = sys.argv[1:] if argv is None else argv
    # Only the verb that was typed gets its options: importing all of them takes seconds.
    parser, verbs = _make_parsers([word for word in words if word in VERBS][:1])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        is_before_verb = unknown[0] in parser.words[: parser.words.index(args.verb)]  # crf --verison train
        blamed = parser if is_before_verb else _innermost_parser(verbs[args.verb], args)
        blamed.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


class _SuggestingParser(argparse.ArgumentParser):
    """An argument parser that suggests the closest verb, choice or option for an unknown word."""

    words: Sequence[str] = ()

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] (its overloads name the same two)
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        self.words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with the usage, the message, and suggestions for unknown options.

        Suggestions are added to every message, because argparse may report a mistyped option as a missing argument.
        """
        options = list(self._option_string_actions)
        typed = [word.partition("=")[0] for word in self.words if word.startswith("-") and word != "--"]
        near = [match for word in typed if word not in options for match in get_close_matches(word, options, n=1)]
        if near and "did you mean" not in message:  # `_check_value` may have added one
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


def _innermost_parser(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """Return the parser of a verb or, if there is one, of its subcommand (`crf world logs`)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[getattr(args, action.dest)]
    return parser


def _flush() -> None:
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
        sys.stdout.flush()


def _discard_output() -> None:
    """Discard buffered output that cannot be written.

    Otherwise Python would try to write it at exit, fail again and print an error.
    """
    try:
        _flush()
    except (OSError, ValueError):  # ValueError: stdout is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs. Abbreviations are disabled, so that `--no` does not select `--no-scrub`."""
    return _make_parsers(VERBS)[0]


def _make_parsers(imported: Iterable[str]) -> tuple[_SuggestingParser, dict[str, _SuggestingParser]]:
    """Return the parser of `crf` and the parsers of all verbs. Options are added only for the verbs in `imported`."""
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
            _import_verb(verb).add_arguments(sub)
    return parser, verbs.choices


def _import_verb(verb: str) -> ModuleType:
    return import_module(f"composer_replication.cli.{verb}")


def _describe_error(error: BaseException) -> str:
    """Return one line that describes an exception from outside this package and says what to do."""
    from composer_replication.errors import is_rust_panic

    lines = str(error).strip().splitlines()
    first = lines[0].rstrip(".") if lines else ""
    if isinstance(error, OSError):
        advice = _ADVICE_BY_ERRNO.get(error.errno or 0)
        return f"{first or type(error).__name__}. {advice}. {_RUN_AGAIN}" if advice else str(error)
    if isinstance(error, MemoryError):
        return f"not enough memory{': ' + first if first else ''}. {_RUN_AGAIN}"
    if _is_instance(error, "sqlite3", "Error"):
        return f"teacher_cache.sqlite: {first}. {_describe_cache_error(first)}"
    if _is_instance(error, "safetensors", "SafetensorError"):
        return f"cannot read a safetensors file: {first}. Download it again, or use another checkpoint. {_RUN_AGAIN}"
    if is_rust_panic(error):
        advice = "Use another tokenizer or file."
        return f"a library crashed on its input, such as a model's tokenizer: {first}. {advice} {_RUN_AGAIN}"
    return f"{type(error).__name__}{': ' + first if first else ''}. {_BUG}"


def _describe_cache_error(message: str) -> str:
    # These are words of SQLite's own messages, such as "database or disk is full".
    if "full" in message or "readonly" in message or "unable to open" in message or "disk I/O" in message:
        return f"The teacher cache cannot be written: free some space, or check the owner of the file. {_RUN_AGAIN}"
    if "locked" in message or "busy" in message:
        return "Another process is using the teacher cache: wait until it is done."
    return (
        "The teacher cache is corrupt. Move it away with its -wal and -shm files, and restore a backup if you have "
        "one. Without a backup, answers are requested and paid for again, and the spending cap starts from zero."
    )


def _is_instance(error: BaseException, module: str, name: str) -> bool:
    """Return whether an error is an instance of a library's class, without importing the library."""
    # A module that was never imported cannot have raised anything.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(error, kind)


def _log_error(verb: str, text: str, *, is_expected: bool) -> None:
    """Print why a command failed: once if all ranks fail with the same error, otherwise with the rank's number.

    `is_expected` is False for an exception that this package did not raise. Such an exception may be a mere consequence
    of another rank's failure, for example a broken connection. In this case, only the rank with the original error
    prints.
    """
    if not {"LOCAL_RANK", "RANK", "WORLD_SIZE"} <= os.environ.keys() or os.environ.get("CRF_DEBUG"):
        log(f"crf {verb}: {text}")
        return
    from composer_replication.trainer.same_start import errors_of_ranks

    rank, errors = rank_of_process(), errors_of_ranks(text, is_own=is_expected)
    if rank == 0 and (is_expected or not errors):
        log(f"crf {verb}: {text}")
    elif rank and errors.get(0) != text and (is_expected or 0 not in errors):
        log(f"crf {verb}: rank {rank}: {text}")
