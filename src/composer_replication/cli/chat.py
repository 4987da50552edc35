"""`crf chat RUN|MODEL`: ask a model in the terminal, or the models before and after training side by side.

The user types the question, or the question is the state before a turn of a logged session. For a logged state, the
prompt has the same tokens as in training, because template and tools are the same.

Torch and modules that load it are imported late, so that an invalid argument is reported at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.action_text import action_text
from composer_replication.batch.model_folder import catch_tokenizer_panics, load_adapter, load_model, load_tokenizer
from composer_replication.batch.render.templates import ChatTemplate, template_source
from composer_replication.cli.console import is_terminal, log, plain, print_json, quiet_libraries, show, terminal_width
from composer_replication.config import CrfConfig, load
from composer_replication.config.sections import RenderConfig
from composer_replication.config.values import RESOLVED_NAME
from composer_replication.errors import InputError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_site
from composer_replication.runs.split import read_split
from composer_replication.trainer.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor


WHEN_INTERRUPTED = "the chat is over; nothing was written"
_MIN_WIDTH_SIDE_BY_SIDE = 90


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a run with trained weights, a model's folder, or a hub name")
    parser.add_argument("--adapter", metavar="DIR", help="an adapter for it, instead of the run's own")
    parser.add_argument("--compare", action="store_true", help="ask the initial model as well, and show both answers")
    parser.add_argument("--state", metavar="ID", help="ask at the state of this site (`crf sites RUN --list`) and exit")
    parser.add_argument("--once", metavar="TEXT", help="ask this, print the answer and exit")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--no-tools", action="store_true", help="do not offer the run's tools to the model")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="maximum tokens of an answer; default 256"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="sampling temperature; default 0: greedy"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="seed of sampled answers; default 0")
    parser.add_argument("--json", action="store_true", help="print answers as JSON, one line per question")


def run(args: argparse.Namespace) -> int:
    from composer_replication.batch.model_folder import check_model_name
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
    with quiet_libraries():
        arms = _ChatModels(trained)
    sampling = _Sampling(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    model_names: tuple[str, ...] = arms.names if args.compare else arms.names[-1:]
    if args.compare and len(arms.names) == 1:
        log("crf chat: no trained weights here, so there is only one model to ask")
    if args.state is not None and trained.run is not None:
        _answer_at_state(args, arms, model_names, arms.prompt_at_site(trained.run, args.state), sampling)
        return 0
    tools = None if args.no_tools else _run_tools(trained.run)
    histories: dict[str, list[dict[str, Any]]] = {arm: _new_history(args.system) for arm in model_names}
    for text in [args.once] if args.once is not None else _read_lines():
        _ask_each_model(args, arms, histories, text, tools, sampling)
    return 0


def _check_state(args: argparse.Namespace, trained: Trained) -> None:
    if args.state is not None and trained.run is None:
        fix = "Name the run of the site: `crf chat RUN --state ID`, with --adapter if the run has no weights."
        raise InputError(explain("--state", got=f"{args.model}, which is not a run", expected="a run", fix=fix))


def _new_history(system: str | None) -> list[dict[str, Any]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _read_lines() -> Iterator[str]:
    """Yield the lines that the user types. The prompt is written to stderr, so that stdout contains only answers."""
    if is_terminal(sys.stdin):
        log("Type a question; /new starts a new conversation, Ctrl-D exits")
    while True:
        if is_terminal(sys.stdin):
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _ask_each_model(
    args: argparse.Namespace,
    arms: _ChatModels,
    histories: dict[str, list[dict[str, Any]]],
    text: str,
    tools: Any,
    sampling: _Sampling,
) -> None:
    """Ask each model one question. Every model has its own history, which contains its own earlier answers."""
    if text == "/new":
        histories.update({arm: _new_history(args.system) for arm in histories})
        return
    answers: dict[str, _ChatReply] = {}
    for arm, history in histories.items():
        history.append({"role": "user", "content": text})
        answers[arm] = arms.answer(arm, arms.prompt_for(history, tools=tools), sampling)
        history.append({"role": "assistant", "content": answers[arm].text})
    _print_answers(args, answers, None)


def _answer_at_state(
    args: argparse.Namespace, arms: _ChatModels, model_names: tuple[str, ...], prompt: _Prompt, sampling: _Sampling
) -> None:

    left_out = f"; {prompt.num_left_out:,} before them do not fit the model" if prompt.num_left_out else ""
    log(f"{prompt.about}: {len(prompt.ids):,} tokens of the session{left_out}")
    _print_answers(args, {arm: arms.answer(arm, prompt, sampling) for arm in model_names}, prompt)


def _print_answers(args: argparse.Namespace, answers: dict[str, _ChatReply], prompt: _Prompt | None) -> None:
    """Print the answers, side by side if the terminal is wide enough."""

    if args.json:
        answer_records = {arm: answer._asdict() for arm, answer in answers.items()}
        logged = {} if prompt is None else {"logged": prompt.logged, "about": prompt.about}
        print_json({**logged, "answers": answer_records})
        return
    columns = {"the session": prompt.logged or ""} if prompt is not None else {}
    columns |= {arm: answer.text + (" […]" if answer.is_cut else "") for arm, answer in answers.items()}
    if len(columns) == 1:
        print(plain(next(iter(columns.values()))))
    elif terminal_width() < _MIN_WIDTH_SIDE_BY_SIDE:
        print("\n\n".join(plain(f"--- {name}\n{text}") for name, text in columns.items()))
    else:
        _show_side_by_side(columns)


def _show_side_by_side(columns: dict[str, str]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False)
    for name in columns:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(Text(plain(text)) for text in columns.values()))
    show(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampling:
    """Settings for sampling an answer. Temperature 0 means greedy decoding."""

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


class _ChatReply(NamedTuple):
    """An answer without its end token.

    `is_cut` is true if `max_tokens` was reached before the model ended the answer.
    """

    text: str
    num_tokens: int
    is_cut: bool


class _Prompt(NamedTuple):
    """The tokens of a prompt, and a description of where it comes from."""

    ids: Sequence[int]
    logged: str | None = None  # for a logged state: what the model did in the session
    about: str = ""  # for a logged state: its site, kind and split
    num_left_out: int = 0  # tokens at the start that do not fit the model's context


class _ChatModels:
    """The models before and after training, and the tokenizer that they share.

    With an adapter, only one model is in memory; for "before", the adapter is switched off.
    """

    def __init__(self, trained: Trained, *, device: str | None = None) -> None:
        from composer_replication.evaluation.arms import Arm, device_and_dtype, resolve_arms

        self.trained = trained
        default, dtype = device_and_dtype("auto")
        self.device = device or default.type
        folder = trained.folder
        untrained = Arm("before", trained.base, trained.base, None)
        arms = [untrained] if folder is None else resolve_arms(trained.base, str(folder))
        has_tokenizer = folder is not None and (folder / "tokenizer_config.json").is_file()
        self.tokenizer: Any = load_tokenizer(str(folder) if has_tokenizer else trained.base)
        models_by_base = {
            base: load_model(base, what=f"model {base!r}", dtype=dtype).to(self.device).eval()
            for base in dict.fromkeys(arm.base for arm in arms)
        }
        self._is_shared = len(models_by_base) < len(arms)
        self._models: dict[str, Any] = {
            arm.name: models_by_base[arm.base]
            if arm.adapter is None
            else load_adapter(models_by_base[arm.base], arm.adapter, what="adapter")
            for arm in arms
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models: "before" and "after", or only "before" if nothing was trained."""
        return tuple(self._models)

    def answer(self, arm: str, prompt: _Prompt, sampling: _Sampling) -> _ChatReply:
        """Return a model's answer. With the same seed, all models sample with the same random numbers."""
        import torch

        from composer_replication.trainer.objective.distributed import merged_token_rows

        ids: Tensor = torch.tensor([list(prompt.ids)], device=self.device)
        torch.manual_seed(sampling.seed)
        options: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, "do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode(), self._loaded_model(arm) as model, merged_token_rows(model):
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        new = output[0, ids.shape[1] :].tolist()
        ends = self._end_token_ids
        is_cut = not any(token in ends for token in new)
        answer_ids = new if is_cut else new[: next(at for at, token in enumerate(new) if token in ends)]
        return _ChatReply(self.tokenizer.decode(answer_ids, skip_special_tokens=False).strip(), len(answer_ids), is_cut)

    def prompt_for(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None
    ) -> _Prompt:
        """Return the prompt that asks the model to answer these messages."""
        if not getattr(self.tokenizer, "chat_template", None):
            fix = "Use a chat model, or put a chat_template.jinja into its folder."
            raise InputError(explain(f"chat template of {self.trained.base}", got="none", expected="one", fix=fix))
        template = ChatTemplate(self.tokenizer, template_source(self.tokenizer, None, tools))
        text = template.render([dict(message) for message in messages], prompt=True, tools=tools)
        with catch_tokenizer_panics(self.tokenizer):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._fit_to_context(_Prompt(ids))

    def prompt_at_site(self, run: RunDir, site_id: str) -> _Prompt:
        """Return the prompt for the erring turn of an error site, rendered as in training."""
        from composer_replication.trainer.from_config.inputs import make_renderer, tools_of

        site, _, conversation = read_site(run, site_id)
        renderer = make_renderer(_render_settings(self.trained), self.tokenizer, tools_of(run))
        turn = next(candidate for candidate in conversation.turns if candidate.id == site.turn_id)
        for sequence in renderer.render(conversation):
            for span in sequence.spans:
                if span.turn_id == site.turn_id:
                    about = f"site {site.id}, {site.kind}{_describe_split_side(run, conversation.id)}"
                    return self._fit_to_context(_Prompt(sequence.ids[: span.start], action_text(turn), about))
        got = f"turn {site.turn_id}, which the template leaves out"
        raise InputError(explain(f"state of site {site.id}", got=got, expected="a turn that the template renders"))

    def _fit_to_context(self, prompt: _Prompt) -> _Prompt:
        """Shorten the prompt if it does not fit into the model's context.

        Only its end is kept, half as long as the context, so that there is room for the answer.
        """
        from composer_replication.trainer.from_config.inputs import max_context

        # Half, so that the answer has room as well.
        limit = max_context(self.trained.base, self.tokenizer)
        if not limit or len(prompt.ids) < limit:
            return prompt
        return prompt._replace(ids=prompt.ids[-(limit // 2) :], num_left_out=len(prompt.ids) - limit // 2)

    @property
    def _end_token_ids(self) -> set[int]:
        config = self._models["before"].generation_config
        ends = config.eos_token_id if config.eos_token_id is not None else self.tokenizer.eos_token_id
        return set(ends) if isinstance(ends, list | tuple) else {ends}

    @contextlib.contextmanager
    def _loaded_model(self, arm: str) -> Iterator[Any]:
        # PEFT wraps the base model in place, so "before" is "after" with the adapter disabled.
        is_off = arm == "before" and self._is_shared
        model = self._models["after" if is_off else arm]
        with model.disable_adapter() if is_off else contextlib.nullcontext():
            yield model


def _describe_split_side(run: RunDir, conversation_id: str) -> str:
    """Describe whether a session was held out, because a better answer at a state used for training proves nothing."""
    split = read_split(run)
    if split is None:
        return ", in a run that was never split"
    side = next((name for name in split._fields if conversation_id in getattr(split, name)), "no side")
    return f", of a session that was {'held out' if side == 'test' else f'not held out ({side})'}"


def _run_tools(run: RunDir | None) -> list[dict[str, Any]] | None:
    """Return the longest of the tool lists of the run's agents, for questions that belong to no session."""
    from composer_replication.trainer.from_config.inputs import tools_of

    tools_by_format = tools_of(run)
    return max(tools_by_format.values(), key=len) if tools_by_format else None


def _render_settings(trained: Trained) -> RenderConfig:
    """Return the [render] settings of the training, except the chat template, which is saved with the weights."""
    folder = trained.folder
    path = None if folder is None else folder.parent / RESOLVED_NAME
    render = load(CrfConfig, path).render if path is not None and Path(path).is_file() else RenderConfig()
    return replace(render, chat_template=None)
