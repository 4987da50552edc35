"""Parts of a training, each made from the config alone: tokenizer, renderer, adapter, teacher, switches, prompts."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.batch.model_folder import load_config, load_tokenizer, resolve_model
from composer_replication.batch.render.dialect import ThinkingRules
from composer_replication.batch.render.renderer import Renderer, Tools
from composer_replication.config import CrfConfig
from composer_replication.config.sections import RenderConfig
from composer_replication.config.train import AdapterConfig, GRPOSection
from composer_replication.errors import ConfigError, explain
from composer_replication.optional import require
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_tools
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.replica import Replica
from composer_replication.trainer.rollouts.worlds.verifiers import is_verifiers, verifiers_world
from composer_replication.trainer.sessions.phases import Say
from composer_replication.trainer.start_model import ids_of_tokens, untrained_rows

_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_EVALUATED_OF, _MOST_POSITIONS = 10, 10**9
"""One prompt of so many is held out where there are evaluations; no context is longer."""


class Inputs(NamedTuple):
    """What both modes need."""

    config: CrfConfig
    run: RunDir | None
    tokenizer: Any
    renderer: Renderer
    replica: Replica | None = None


def read_inputs(config: CrfConfig, replica: Replica | None = None) -> Inputs:
    """The run directory and the tokenizer; whatever the config says that nothing here would listen to is refused."""
    name = resolve_model(config.train.required_model())
    config = replace(config, train=replace(config.train, model=name))
    _refuse_what_is_not_read(config)
    run = None if config.train.run is None else RunDir.open(config.train.run)
    tokenizer = load_tokenizer(name)
    renderer = make_renderer(config.render, tokenizer, tools_of(run))
    return Inputs(fitted(config, tokenizer), run, tokenizer, renderer, replica)


def fitted(config: CrfConfig, tokenizer: Any = None) -> CrfConfig:
    """The config with windows, and contexts of an evaluation, no longer than the model has learnt unless it says so."""
    learnt = None if config.train.model is None else learnt_context(config.train.model, tokenizer)
    batch, evaluation = config.train.batch.fitted(learnt), config.evaluation
    context = min(evaluation.context, learnt or evaluation.context)
    train = replace(config.train, batch=batch)
    return replace(config, train=train, evaluation=replace(evaluation, context=context))


def learnt_context(name: str, tokenizer: Any = None) -> int | None:
    """The longest context that a model can be asked about: its positions, or what its tokenizer says if that is less.

    None where neither says anything; a tokenizer that was told nothing names a number that no model reaches.
    """
    is_bare = Path(name).is_dir() and not (Path(name) / "config.json").is_file()  # a tokenizer alone
    positions = None if is_bare else getattr(model_config(name).get_text_config(), "max_position_embeddings", None)
    max_length = (load_tokenizer(name) if tokenizer is None else tokenizer).model_max_length
    return min((length for length in (positions, max_length) if length and length <= _MOST_POSITIONS), default=None)


def beyond_context(config: CrfConfig, learnt: int | None) -> str:
    """A sentence where windows are longer than what the model has learnt; empty where they are not."""
    budget, _ = config.train.batch.window
    if not learnt or budget <= learnt or config.train.mode != "offline":
        return ""
    return (
        f"train.batch.budget is {budget:,} tokens, and this model has learnt contexts of up to {learnt:,}: what it "
        f"says behind them is noise. Leave train.batch.budget and train.batch.overlap unset, and they fit"
    )


def model_config(name: str) -> Any:
    """The config of the start weights, without the weights."""
    return load_config(name, what=f"train.model {name!r}")


def lora_config(adapter: AdapterConfig) -> Any | None:
    """The adapter as PEFT takes it; None where all weights are trained."""
    if adapter.kind == "none":
        return None
    peft = require("peft", extra="train")
    targets = list(adapter.targets)
    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )


def token_rows(inputs: Inputs, model: Any, said: Iterable[int], say: Say, *, why_not: str = "") -> list[int]:
    """Ids whose rows the adapter trains, as `train.adapter.token_rows` has it: none where a reason is given `why_not`.

    What these weights never learnt of the tokens that are to be `said` is told in any case.
    """
    names = inputs.config.train.adapter.token_rows
    is_auto = names == ("auto",)
    if why_not and names and not is_auto:
        expected = "auto, or an empty list"
        raise ConfigError(explain(f"train.adapter.token_rows {why_not}", got=list(names), expected=expected))
    chosen = [] if is_auto else ids_of_tokens(inputs.tokenizer, names)
    untrained = untrained_rows(model, inputs.tokenizer, said)
    if untrained is None or untrained.tokens.keys() <= set(chosen):
        return chosen
    is_trained = is_auto and not why_not
    learnt = (
        "their rows are trained with the adapter" if is_trained else f"the adapter leaves them so {why_not}".strip()
    )
    say(f"{untrained.in_words()}; {learnt} (train.adapter.token_rows)")
    return [*untrained.tokens] if is_trained else chosen


def weighting_of(config: CrfConfig) -> RowWeighting | None:
    """The switches of channel 2, or None where all of them are off."""
    weighting = RowWeighting(**vars(config.train.switches))
    return weighting if weighting.changes_weights or weighting.contrast is not None else None


def held_out_rows(number: int) -> tuple[list[int], list[int]]:
    """Numbers of rows to train on, and of those to evaluate on."""
    held_out = list(range(_EVALUATED_OF - 1, number, _EVALUATED_OF)) or [number - 1]
    return sorted(set(range(number)) - set(held_out)), held_out


def is_dotted(name: str) -> bool:
    return _DOTTED.fullmatch(name) is not None


def named_object(path: str, option: str) -> Any:
    """What `module:name` names."""
    if not is_dotted(path):
        raise ConfigError(explain(option, got=repr(path), expected="module:name"))
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        fix = "A module is looked for in the folder the command runs in, and among what is installed."
        raise ConfigError(explain(f"{option} {path}", got=str(error), expected="a name to import", fix=fix)) from error


def load_prompts(name: str) -> Any:
    """A `datasets.Dataset` with prompts: of a function (`module:name`), a file, a folder, or the hub."""
    datasets = require("datasets", extra="train")
    path = Path(name)
    if is_dotted(name) and not path.exists():
        dataset = named_object(name, "train.grpo.dataset")()
    elif path.is_file():
        kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(path.suffix)
        if kind is None:
            expected = "a file that ends in .jsonl, .json, .csv or .parquet"
            raise ConfigError(explain("train.grpo.dataset", got=name, expected=expected))
        dataset = datasets.load_dataset(kind, data_files=str(path), split="train")
    elif (path / "state.json").exists():
        dataset = datasets.load_from_disk(str(path))
    else:
        dataset = datasets.load_dataset(name, split="train")
    if "prompt" not in dataset.column_names:
        fix = "Name a function that makes prompts of them instead: module:function."
        got = f"the columns {', '.join(dataset.column_names)}"
        raise ConfigError(explain(f"train.grpo.dataset {name}", got=got, expected="a column prompt", fix=fix))
    return dataset


def prompts_of(inputs: Inputs) -> tuple[Any, Any]:
    """Prompts to train on and, where there are evaluations, those that are held out."""
    train = inputs.config.train
    prompts = _named_prompts(train.grpo)
    if not len(prompts):
        raise ConfigError(explain(f"train.grpo.dataset {train.grpo.dataset}", got="no prompts", expected="some"))
    held_out = None
    if train.eval_every and len(prompts) > 1:
        train_rows, eval_rows = held_out_rows(len(prompts))
        prompts, held_out = prompts.select(train_rows), prompts.select(eval_rows)
    if inputs.replica is not None:
        prompts = prompts.select(inputs.replica.rows_of(len(prompts)))
        inputs.replica.weigh(len(prompts))
    return prompts, held_out


def _named_prompts(grpo: GRPOSection) -> Any:
    """Those of the data set, or the tasks of an environment that has its own."""
    if grpo.environment is not None and is_verifiers(grpo.environment):
        if grpo.dataset is not None:
            expected = "none: the environment's own tasks are the prompts"
            raise ConfigError(explain("train.grpo.dataset", got=grpo.dataset, expected=expected))
        return require("datasets", extra="train").Dataset.from_list(verifiers_world(grpo.environment).rows())
    if grpo.dataset is None:
        expected = "a file, a folder, a name on the hub or module:function"
        raise ConfigError(explain("train.grpo.dataset", got="none", expected=expected))
    return load_prompts(grpo.dataset)


def _refuse_what_is_not_read(config: CrfConfig) -> None:
    """An option that a trainer has no use for must not look as if it had been followed."""
    if config.loss.lm_ce_label_smoothing:
        got = config.loss.lm_ce_label_smoothing
        raise ConfigError(explain("loss.lm_ce_label_smoothing", got=got, expected="0: trainers do not smooth labels"))
    if config.train.mode == "grpo" and config.train.control != "none":
        expected = "none: a control is made of logged sessions alone"
        raise ConfigError(explain("train.control", got=config.train.control, expected=expected))
    if config.train.mode == "grpo" and config.train.fsdp.on:
        fix = "Train an adapter on every process (DDP): the weights below it have no gradients and no optimiser states."
        expected = "false: rollouts are drawn from whole weights"
        raise ConfigError(explain("train.fsdp.on with train.mode grpo", got="true", expected=expected, fix=fix))
    if config.train.mode == "grpo" and config.train.warmup.mode in ("steps", "until"):
        expected = "auto or off: a training with rollouts has no warm-up"
        raise ConfigError(explain("train.warmup.mode", got=config.train.warmup.mode, expected=expected))


# The one reader of [render]: `crf train` and `crf inspect` make the same renderer of it.

OUTCOMES = {
    "thinking_target": "learned",
    "thinking_context": "shown as context",
    "thinking_left_out": "left out",
    "thinking_not_shown": "with no place in the template",
    "empty_thought_as_header": "behind an empty block that is header",
}
"""What was done with turns' thinking, by the names of the counts, in words."""


def make_renderer(
    render: RenderConfig, tokenizer: Any, tools: Tools | None, *, template: str | None = None
) -> Renderer:
    """A renderer as the section says, or with another template; either is also the tokenizer's from then on."""
    template = chat_template(render) if template is None else template
    if template is not None:
        tokenizer.chat_template = template
    renderer = Renderer(
        tokenizer,
        tools=tools,
        chat_template=template,
        template_options=render.template_variables,
        thinking=_thinking_rules(render),
    )
    _refuse_unread_variables(render, renderer)
    return renderer


def _refuse_unread_variables(render: RenderConfig, renderer: Renderer) -> None:
    """A variable that the template has no use for must not look as if it had been followed."""
    known_names = renderer.template.names if render.template_variables else set[str]()
    for name in render.template_variables:
        if name not in known_names:
            near = get_close_matches(name, known_names, n=1)
            got = f"{name!r}, which {renderer.template.name} does not read"
            fix = f"Did you mean {near[0]!r}?" if near else "Take it out, or name the template: render.chat_template."
            expected = "names of variables that the template reads"
            raise ConfigError(explain("render.template_variables", got=got, expected=expected, fix=fix))


def unmatched_models(render: RenderConfig, models: Collection[str]) -> list[str]:
    """A sentence for each of `student_models` that is none of the models in the run.

    It is no error: the config may be meant for other runs too.
    """
    model_names = ", ".join(sorted(filter(None, models))) or "none: no turn says which model wrote it"
    return [
        explain(
            "render.student_models",
            got=f"{pattern!r}, which matches no turn's model",
            expected=f"a name or a pattern of those in the run ({model_names})",
        )
        for pattern in render.student_models
        if not any(fnmatchcase(model, pattern) for model in models)
    ]


def tools_of(run: RunDir | None) -> dict[str | None, list[dict[str, Any]]] | None:
    """The tools of each agent in the run, by the format of its logs, in the form that chat templates take."""
    if run is None or not run.path("tools").exists():
        return None
    return {
        format_name: [_described(tool) for tool in agent_tools]
        for format_name, agent_tools in read_tools(run).by_format.items()
    }


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """With an empty description: templates may ask for one, and logs have none."""
    name, parameters = tool["function"]["name"], tool["function"]["parameters"]
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _thinking_rules(render: RenderConfig) -> ThinkingRules:
    return ThinkingRules(
        own=render.own_thinking, others=render.other_thinking, student_models=tuple(render.student_models)
    )


def chat_template(render: RenderConfig) -> str | None:
    """The text of the file that the section names."""
    if render.chat_template is None:
        return None
    try:
        return Path(render.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = "a text file with a Jinja template"
        raise ConfigError(
            explain(f"render.chat_template {render.chat_template}", got=error, expected=expected)
        ) from error


def thinking_in_words(counts: Mapping[str, int]) -> str:
    """Turns by what was done with their thinking; empty where there was none, and no block."""
    phrases = [f"{counts[name]} {words}" for name, words in OUTCOMES.items() if counts.get(name)]
    return f"thinking of turns: {', '.join(phrases)}" if phrases else ""
