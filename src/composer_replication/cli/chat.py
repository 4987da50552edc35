"""`crf chat RUN|MODEL`: talk to a model in the terminal, before and after its training side by side."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from composer_replication.action_text import action_text
from composer_replication.batch.model_folder import (
    catch_tokenizer_panics,
    load_adapter,
    load_model,
    load_tokenizer,
)
from composer_replication.batch.render.templates import ChatTemplate, template_source
from composer_replication.cli.console import is_terminal, log, plain, print_json, show, terminal_width
from composer_replication.config import CrfConfig, load
from composer_replication.config.sections import RenderConfig
from composer_replication.config.values import RESOLVED_NAME
from composer_replication.errors import InputError, explain
from composer_replication.evaluation.arms import Arm, arms_of, device_and_dtype
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_site
from composer_replication.runs.split import sides_of
from composer_replication.trainer.from_config.inputs import make_renderer, max_context, tools_of
from composer_replication.trainer.objective.distributed import rows_in_place
from composer_replication.trainer.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor


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
    from composer_replication.cli.run import quiet
    from composer_replication.trainer.trained import find_trained

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
        arms = Arms(trained)
    sampling = Sampling(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    arm_names: tuple[str, ...] = arms.names if args.compare else arms.names[-1:]
    if args.compare and len(arms.names) == 1:
        log("crf chat: nothing was trained here, so there is one model to ask")
    if args.state is not None and trained.run is not None:
        _answer(args, arms, arm_names, arms.at_site(trained.run, args.state), sampling)
        return 0
    tools = None if args.no_tools else _run_tools(trained.run)
    histories: dict[str, list[dict[str, Any]]] = {arm: _beginning(args.system) for arm in arm_names}
    for text in [args.once] if args.once is not None else _typed():
        _turn(args, arms, histories, text, tools, sampling)
    return 0


def _check_state(args: argparse.Namespace, trained: Trained) -> None:
    if args.state is not None and trained.run is None:
        fix = "Name the run that the site is in: `crf chat RUN --state ID`, with --adapter where it has no weights."
        raise InputError(explain("--state", got=f"{args.model}, which is no run", expected="a run", fix=fix))


def _beginning(system: str | None) -> list[dict[str, Any]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _typed() -> Iterator[str]:
    """Lines from the keyboard until it ends; a question mark goes to stderr, so that stdout holds answers alone."""

    if is_terminal(sys.stdin):
        log("type, and end with Ctrl-D; /new begins anew")
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
    answers: dict[str, ChatReply] = {}
    for arm, history in histories.items():
        history.append({"role": "user", "content": text})
        answers[arm] = arms.answer(arm, arms.says(history, tools=tools), sampling)
        history.append({"role": "assistant", "content": answers[arm].text})
    _show(args, answers, None)


def _answer(
    args: argparse.Namespace, arms: Arms, arm_names: tuple[str, ...], prompt: Prompt, sampling: Sampling
) -> None:

    left_out = f"; {prompt.num_left_out:,} before them do not fit the model" if prompt.num_left_out else ""
    log(f"{prompt.about}: {len(prompt.ids):,} tokens of the session{left_out}")
    _show(args, {arm: arms.answer(arm, prompt, sampling) for arm in arm_names}, prompt)


def _show(args: argparse.Namespace, answers: dict[str, ChatReply], prompt: Prompt | None) -> None:
    """Answers beside each other where there is room; a model's text is shown, and nothing in it is obeyed."""

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

    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False)
    for name in columns:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(Text(plain(text)) for text in columns.values()))
    show(table)


# Ask a model before and after training the same thing: at a state of a session, or with words of one's own.
#
# An adapter is switched off for "before", so that its start weights are loaded once. At a state the prompt is, token
# for token, what a training renders up to the turn: the same template, the same tools.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer is drawn; at temperature 0 the likeliest token is taken each time."""

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


class ChatReply(NamedTuple):
    """What an arm said, without the token that ends it, and how many tokens that took."""

    text: str
    num_tokens: int
    is_cut: bool


class Prompt(NamedTuple):
    """Token ids that an answer follows; at a state, what the session did there, and how much of it was too long."""

    ids: Sequence[int]
    logged: str | None = None
    about: str = ""
    num_left_out: int = 0


class Arms:
    """The model of each arm, and the tokenizer that both share; start weights below an adapter are loaded once."""

    def __init__(self, trained: Trained, *, device: str | None = None) -> None:
        self.trained = trained
        default, dtype = device_and_dtype("auto")
        self.device = device or default.type
        folder = trained.folder
        alone = Arm("before", trained.base, trained.base, None)
        arms = [alone] if folder is None else arms_of(trained.base, str(folder))
        has_tokenizer = folder is not None and (folder / "tokenizer_config.json").is_file()
        self.tokenizer: Any = load_tokenizer(str(folder) if has_tokenizer else trained.base)
        whole = {
            base: load_model(base, what=f"model {base!r}", dtype=dtype).to(self.device).eval()
            for base in dict.fromkeys(arm.base for arm in arms)
        }
        self._is_shared = len(whole) < len(arms)
        self._models: dict[str, Any] = {
            arm.name: whole[arm.base]
            if arm.adapter is None
            else load_adapter(whole[arm.base], arm.adapter, what="adapter")
            for arm in arms
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Of a model without anything trained there is one arm."""
        return tuple(self._models)

    def answer(self, arm: str, prompt: Prompt, sampling: Sampling) -> ChatReply:
        """What this arm says next; the same seed draws the same numbers for each arm."""
        ids: Tensor = torch.tensor([list(prompt.ids)], device=self.device)
        torch.manual_seed(sampling.seed)
        options: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, "do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode(), self._as(arm) as model, rows_in_place(model):
            written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        new = written[0, ids.shape[1] :].tolist()
        ends = self._ends
        is_cut = not any(token in ends for token in new)
        answer_ids = new if is_cut else new[: next(at for at, token in enumerate(new) if token in ends)]
        return ChatReply(self.tokenizer.decode(answer_ids, skip_special_tokens=False).strip(), len(answer_ids), is_cut)

    def says(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None) -> Prompt:
        """The prompt for an answer to these messages."""
        if not getattr(self.tokenizer, "chat_template", None):
            fix = "Take a model that was made to chat, or put a chat_template.jinja into its folder."
            raise InputError(explain(f"chat template of {self.trained.base}", got="none", expected="one", fix=fix))
        template = ChatTemplate(self.tokenizer, template_source(self.tokenizer, None, tools))
        text = template.render([dict(message) for message in messages], prompt=True, tools=tools)
        with catch_tokenizer_panics(self.tokenizer):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._fitted(Prompt(ids))

    def at_site(self, run: RunDir, identity: str) -> Prompt:
        """The prompt of the turn that a site is about, as a training renders it."""
        site, _, conversation = read_site(run, identity)
        renderer = make_renderer(_render_of(self.trained), self.tokenizer, tools_of(run))
        turn = next(candidate for candidate in conversation.turns if candidate.id == site.turn_id)
        for sequence in renderer.render(conversation):
            for span in sequence.spans:
                if span.turn_id == site.turn_id:
                    about = f"site {site.id}, {site.kind}{_side_of(run, conversation.id)}"
                    return self._fitted(Prompt(sequence.ids[: span.start], action_text(turn), about))
        got = f"turn {site.turn_id}, which the template does not show"
        raise InputError(explain(f"state of site {site.id}", got=got, expected="a turn of the model"))

    def _fitted(self, prompt: Prompt) -> Prompt:
        """The newest part of what the model has learnt to read at once, half of that where it is longer."""
        most = max_context(self.trained.base, self.tokenizer)
        if not most or len(prompt.ids) < most:
            return prompt
        return prompt._replace(ids=prompt.ids[-(most // 2) :], num_left_out=len(prompt.ids) - most // 2)

    @property
    def _ends(self) -> set[int]:
        config = self._models["before"].generation_config
        ends = config.eos_token_id if config.eos_token_id is not None else self.tokenizer.eos_token_id
        return set(ends) if isinstance(ends, list | tuple) else {ends}

    @contextlib.contextmanager
    def _as(self, arm: str) -> Iterator[Any]:
        is_off = arm == "before" and self._is_shared  # an adapter is in the weights that it was put on
        model = self._models["after" if is_off else arm]
        with model.disable_adapter() if is_off else contextlib.nullcontext():
            yield model


def _side_of(run: RunDir, conversation_id: str) -> str:
    """At a state that was learnt from, a better answer proves nothing."""
    split = sides_of(run)
    if split is None:
        return ", in a run that was never split"
    side = next((name for name in split._fields if conversation_id in getattr(split, name)), "no side")
    return f", of a session that was {'held out' if side == 'test' else f'not held out ({side})'}"


def _run_tools(run: RunDir | None) -> list[dict[str, Any]] | None:
    """The tools of the agent with the most of them, for words that belong to no session."""
    tools_by_format = tools_of(run)
    return max(tools_by_format.values(), key=len) if tools_by_format else None


def _render_of(trained: Trained) -> RenderConfig:
    """[render] as the training had it; its template lies with the weights."""
    folder = trained.folder
    path = None if folder is None else folder.parent / RESOLVED_NAME
    render = load(CrfConfig, path).render if path is not None and Path(path).is_file() else RenderConfig()
    return replace(render, chat_template=None)
