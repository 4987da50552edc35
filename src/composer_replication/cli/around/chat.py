"""`crf chat RUN|MODEL`: talk to a model in the terminal, before and after its training side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.use.chat import Answer, Arms, Prompt, Sampling
    from composer_replication.use.trained import Trained

HELP = "talk to a model, or to it before and after training side by side, at a held-out state or with your own words"
WHEN_INTERRUPTED = "the chat is over; nothing was written"
_NARROW = 90


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a run with trained weights, a model's folder, or a hub name")
    parser.add_argument("--adapter", metavar="DIR", help="an adapter for it, instead of the run's own")
    parser.add_argument("--compare", action="store_true", help="ask the start weights as well, and show both")
    parser.add_argument("--state", metavar="ID", help="ask at the state of this site (`crf sites RUN --list`), and end")
    parser.add_argument("--once", metavar="TEXT", help="ask this, print the answer, and end")
    parser.add_argument("--system", metavar="TEXT", help="a system message before your words")
    parser.add_argument("--no-tools", action="store_true", help="do not show the run's tools beside your words")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens of an answer; default 256"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default 0: the likeliest token each time"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="of answers that are drawn; default 0")
    parser.add_argument("--json", action="store_true", help="print answers as JSON, one line a question")


def run(args: argparse.Namespace) -> int:
    from composer_replication.batch.model_folder import check_model_name
    from composer_replication.cli.console import say
    from composer_replication.cli.pipeline.run import quiet
    from composer_replication.errors import InputError, explain
    from composer_replication.use.trained import find_trained

    if args.state is not None and args.once is not None:
        raise InputError(explain("--state and --once", got="both", expected="one of them"))
    if args.max_tokens < 1 or args.temperature < 0:
        got = f"--max-tokens {args.max_tokens}, --temperature {args.temperature:g}"
        raise InputError(explain("crf chat", got=got, expected="1 or more tokens, and a temperature of 0 or more"))
    trained = find_trained(args.model, args.adapter)
    _check_state(args, trained)
    expected = "a run with trained weights, a model's folder, a name on the hub, or student"
    check_model_name(trained.base, what=args.model, expected=expected)
    with quiet():
        from composer_replication.use.chat import Arms, Sampling, run_tools

        arms = Arms(trained)
    sampling = Sampling(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    arm_names: tuple[str, ...] = arms.names if args.compare else arms.names[-1:]
    if args.compare and len(arms.names) == 1:
        say("crf chat: nothing was trained here, so there is one model to ask")
    if args.state is not None and trained.run is not None:
        _answer(args, arms, arm_names, arms.at_site(trained.run, args.state), sampling)
        return 0
    tools = None if args.no_tools else run_tools(trained.run)
    histories: dict[str, list[dict[str, Any]]] = {arm: _beginning(args.system) for arm in arm_names}
    for text in [args.once] if args.once is not None else _typed():
        _turn(args, arms, histories, text, tools, sampling)
    return 0


def _check_state(args: argparse.Namespace, trained: Trained) -> None:
    from composer_replication.errors import InputError, explain

    if args.state is not None and trained.run is None:
        fix = "Name the run that the site is in: `crf chat RUN --state ID`, with --adapter where it has no weights."
        raise InputError(explain("--state", got=f"{args.model}, which is no run", expected="a run", fix=fix))


def _beginning(system: str | None) -> list[dict[str, Any]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _typed() -> Iterator[str]:
    """Lines from the keyboard until it ends; a question mark goes to stderr, so that stdout holds answers alone."""
    from composer_replication.cli.console import is_terminal, say

    if is_terminal(sys.stdin):
        say("type, and end with Ctrl-D; /new begins anew")
    while True:
        if is_terminal(sys.stdin):
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _turn(
    args: argparse.Namespace,
    arms: Arms,
    histories: dict[str, list[dict[str, Any]]],
    text: str,
    tools: Any,
    sampling: Sampling,
) -> None:
    """One question to each arm, which remembers its own answers alone."""
    if text == "/new":
        histories.update({arm: _beginning(args.system) for arm in histories})
        return
    answers: dict[str, Answer] = {}
    for arm, history in histories.items():
        history.append({"role": "user", "content": text})
        answers[arm] = arms.answer(arm, arms.says(history, tools=tools), sampling)
        history.append({"role": "assistant", "content": answers[arm].text})
    _show(args, answers, None)


def _answer(
    args: argparse.Namespace, arms: Arms, arm_names: tuple[str, ...], prompt: Prompt, sampling: Sampling
) -> None:
    from composer_replication.cli.console import say

    left_out = f"; {prompt.num_left_out:,} before them do not fit the model" if prompt.num_left_out else ""
    say(f"{prompt.about}: {len(prompt.ids):,} tokens of the session{left_out}")
    _show(args, {arm: arms.answer(arm, prompt, sampling) for arm in arm_names}, prompt)


def _show(args: argparse.Namespace, answers: dict[str, Answer], prompt: Prompt | None) -> None:
    """Answers beside each other where there is room; a model's text is shown, and nothing in it is obeyed."""
    from composer_replication.cli.console import plain, print_json, terminal_width

    if args.json:
        answer_records = {arm: answer._asdict() for arm, answer in answers.items()}
        logged = {} if prompt is None else {"logged": prompt.logged, "about": prompt.about}
        print_json({**logged, "answers": answer_records})
        return
    columns = {"the session": prompt.logged or ""} if prompt is not None else {}
    columns |= {arm: answer.text + (" […]" if answer.is_cut else "") for arm, answer in answers.items()}
    if len(columns) == 1:
        print(plain(next(iter(columns.values()))))
    elif terminal_width() < _NARROW:
        print("\n\n".join(plain(f"--- {name}\n{text}") for name, text in columns.items()))
    else:
        _show_beside(columns)


def _show_beside(columns: dict[str, str]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from composer_replication.cli.console import plain, show

    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False)
    for name in columns:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(Text(plain(text)) for text in columns.values()))
    show(table)
