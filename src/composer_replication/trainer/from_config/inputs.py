"""Read a training's inputs from its config: tokenizer, renderer, adapter, loss weighting, prompts."""

from __future__ import annotations

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
from composer_replication.optional import is_object_name, load_object, require
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_tools
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.replica import Replica
from composer_replication.trainer.rollouts.worlds.verifiers import is_verifiers, verifiers_world
from composer_replication.trainer.sessions.phases import Say
from composer_replication.trainer.start_model import ids_of_tokens, untrained_rows

# If there are evaluations, one prompt in this many is held out.
_HELD_OUT_INTERVAL = 10
# transformers gives tokenizers without a length limit a `model_max_length` of 10**30.
_MAX_POSITIONS = 10**9


class Inputs(NamedTuple):
    """The inputs that both modes of training need."""

    config: CrfConfig
    run: RunDir | None
    tokenizer: Any
    renderer: Renderer
    replica: Replica | None = None


def read_inputs(config: CrfConfig, replica: Replica | None = None) -> Inputs:
    """Load the run directory and the tokenizer. Raises ConfigError for options that this mode would ignore."""
    name = resolve_model(config.train.required_model())
    config = replace(config, train=replace(config.train, model=name))
    _refuse_unused_options(config)
    run = None if config.train.run is None else RunDir.open(config.train.run)
    tokenizer = load_tokenizer(name)
    renderer = make_renderer(config.render, tokenizer, tools_of(run))
    return Inputs(fitted(config, tokenizer), run, tokenizer, renderer, replica)


def fitted(config: CrfConfig, tokenizer: Any = None) -> CrfConfig:
    """Return the config with windows and evaluation contexts limited to the model's context, unless set explicitly."""
    context_limit = None if config.train.model is None else max_context(config.train.model, tokenizer)
    batch, evaluation = config.train.batch.fit_to_context(context_limit), config.evaluation
    context = min(evaluation.context, context_limit or evaluation.context)
    train = replace(config.train, batch=batch)
    return replace(config, train=train, evaluation=replace(evaluation, context=context))


def max_context(name: str, tokenizer: Any = None) -> int | None:
    """Return a model's maximum context length: the smaller of its number of positions and its tokenizer's limit.

    Returns None if neither specifies a length. An unconfigured tokenizer has a huge limit, which is ignored.
    """
    # A folder may contain only a tokenizer.
    is_bare = Path(name).is_dir() and not (Path(name) / "config.json").is_file()
    positions = None if is_bare else getattr(model_config(name).get_text_config(), "max_position_embeddings", None)
    max_length = (load_tokenizer(name) if tokenizer is None else tokenizer).model_max_length
    return min((length for length in (positions, max_length) if length and length <= _MAX_POSITIONS), default=None)


def beyond_context(config: CrfConfig, context_limit: int | None) -> str:
    """Return a warning if windows are longer than the model's context, or ""."""
    budget, _ = config.train.batch.window
    if not context_limit or budget <= context_limit or config.train.mode != "offline":
        return ""
    return (
        f"train.batch.budget is {budget:,} tokens, but this model was trained on contexts of up to {context_limit:,}: "
        "beyond "
        f"that its output is noise. Leave train.batch.budget and train.batch.overlap unset to use the model's limit"
    )


def model_config(name: str) -> Any:
    """Return the initial model's config; no weights are loaded."""
    return load_config(name, what=f"train.model {name!r}")


def lora_config(adapter: AdapterConfig) -> Any | None:
    """Return the adapter's PEFT config, or None if all weights are trained."""
    if adapter.kind == "none":
        return None
    peft = require("peft", extra="train")
    targets = list(adapter.targets)
    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        # PEFT recognizes "all-linear" only as a string, not in a list.
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )


def token_rows(inputs: Inputs, model: Any, written_ids: Iterable[int], say: Say, *, why_not: str = "") -> list[int]:
    """Return the token ids whose embedding and head rows the adapter trains, according to `train.adapter.token_rows`.

    If `why_not` has a reason, such as "with FSDP", no rows are trained. In any case, tokens with untrained rows among
    `written_ids`, the ids that the model has to write, are reported with `say`.
    """
    names = inputs.config.train.adapter.token_rows
    is_auto = names == ("auto",)
    if why_not and names and not is_auto:
        expected = "auto, or an empty list"
        raise ConfigError(explain(f"train.adapter.token_rows {why_not}", got=list(names), expected=expected))
    chosen = [] if is_auto else ids_of_tokens(inputs.tokenizer, names)
    untrained = untrained_rows(model, inputs.tokenizer, written_ids)
    if untrained is None or untrained.tokens.keys() <= set(chosen):
        return chosen
    is_trained = is_auto and not why_not
    consequence = (
        "their rows are trained with the adapter" if is_trained else f"their rows stay untrained {why_not}".strip()
    )
    say(f"{untrained.describe()}; {consequence} (train.adapter.token_rows)")
    return [*untrained.tokens] if is_trained else chosen


def weighting_of(config: CrfConfig) -> RowWeighting | None:
    """Return channel 2's switches, or None if all of them are off."""
    weighting = RowWeighting(**vars(config.train.switches))
    return weighting if weighting.changes_weights or weighting.contrast is not None else None


def held_out_rows(number: int) -> tuple[list[int], list[int]]:
    """Return the indices of the rows to train on, and the indices of the held-out rows."""
    # Every tenth row, spread evenly; at least one.
    held_out = list(range(_HELD_OUT_INTERVAL - 1, number, _HELD_OUT_INTERVAL)) or [number - 1]
    return sorted(set(range(number)) - set(held_out)), held_out


def named_object(name: str, option: str) -> Any:
    """Import and return the object that an option names as `module:name`."""
    fix = "The module must be in the working directory or in an installed package."
    return load_object(name, what=option, fix=fix, error_class=ConfigError)


def load_prompts(name: str) -> Any:
    """Return a `datasets.Dataset` with prompts from a function (`module:name`), a file, a folder, or the hub."""
    datasets = require("datasets", extra="train")
    path = Path(name)
    if is_object_name(name) and not path.exists():
        dataset = named_object(name, "train.grpo.dataset")()
    elif path.is_file():
        kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(path.suffix)
        if kind is None:
            expected = "a file that ends in .jsonl, .json, .csv or .parquet"
            raise ConfigError(explain("train.grpo.dataset", got=name, expected=expected))
        dataset = datasets.load_dataset(kind, data_files=str(path), split="train")
    # A folder written by `Dataset.save_to_disk`.
    elif (path / "state.json").exists():
        dataset = datasets.load_from_disk(str(path))
    else:
        dataset = datasets.load_dataset(name, split="train")
    if "prompt" not in dataset.column_names:
        fix = "Rename the column, or name a function that returns such a dataset: module:function."
        got = f"the columns {', '.join(dataset.column_names)}"
        raise ConfigError(explain(f"train.grpo.dataset {name}", got=got, expected="a column `prompt`", fix=fix))
    return dataset


def prompts_of(inputs: Inputs) -> tuple[Any, Any]:
    """Return the prompts to train on and, if there are evaluations, the held-out prompts."""
    train = inputs.config.train
    prompts = _named_prompts(train.grpo)
    if not len(prompts):
        raise ConfigError(
            explain(f"train.grpo.dataset {train.grpo.dataset}", got="no prompts", expected="at least one prompt")
        )
    held_out = None
    if train.eval_every and len(prompts) > 1:
        train_rows, eval_rows = held_out_rows(len(prompts))
        prompts, held_out = prompts.select(train_rows), prompts.select(eval_rows)
    if inputs.replica is not None:
        prompts = prompts.select(inputs.replica.rows_of(len(prompts)))
        inputs.replica.weigh(len(prompts))
    return prompts, held_out


def _named_prompts(grpo: GRPOSection) -> Any:
    """Return the prompts in the data set, or the tasks of an environment that brings its own."""
    if grpo.environment is not None and is_verifiers(grpo.environment):
        if grpo.dataset is not None:
            expected = "none, since the environment's own tasks are the prompts"
            raise ConfigError(explain("train.grpo.dataset", got=grpo.dataset, expected=expected))
        return require("datasets", extra="train").Dataset.from_list(verifiers_world(grpo.environment).rows())
    if grpo.dataset is None:
        expected = "a file, a folder, a name on the hub or module:function"
        raise ConfigError(explain("train.grpo.dataset", got="none", expected=expected))
    return load_prompts(grpo.dataset)


def _refuse_unused_options(config: CrfConfig) -> None:
    """Raise ConfigError for an option that this mode would silently ignore."""
    if config.loss.lm_ce_label_smoothing:
        got = config.loss.lm_ce_label_smoothing
        raise ConfigError(
            explain("loss.lm_ce_label_smoothing", got=got, expected="0, as trainers do not smooth labels")
        )
    if config.train.mode == "grpo" and config.train.control != "none":
        expected = "none, as controls exist for logged sessions only"
        raise ConfigError(explain("train.control", got=config.train.control, expected=expected))
    if config.train.mode == "grpo" and config.train.fsdp.on:
        fix = "Train an adapter on every process (DDP): its base weights need no gradients and no optimizer states."
        expected = "false, as rollouts are sampled from unsharded weights"
        raise ConfigError(explain("train.fsdp.on with train.mode grpo", got="true", expected=expected, fix=fix))
    if config.train.mode == "grpo" and config.train.warmup.mode in ("steps", "until"):
        expected = "auto or off, as a training with rollouts has no warm-up"
        raise ConfigError(explain("train.warmup.mode", got=config.train.warmup.mode, expected=expected))


OUTCOMES = {
    "thinking_target": "learned",
    "thinking_context": "shown as context",
    "thinking_left_out": "left out",
    "thinking_not_shown": "not supported by the template",
    "empty_thought_as_header": "after an empty thinking block in the header",
}
"""The wording for each treatment of turns' thinking, by key in the counts."""


def make_renderer(
    render: RenderConfig, tokenizer: Any, tools: Tools | None, *, template: str | None = None
) -> Renderer:
    """Return a renderer for a config section. The template, which `template` overrides, is also set
    on the tokenizer.
    """
    template = chat_template(render) if template is None else template
    if template is not None:
        # TRL and exported weights use the tokenizer's template, which must be the template used in training.
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
    """Raise ConfigError for a template variable that the template would silently ignore."""
    known_names = renderer.template.names if render.template_variables else set[str]()
    for name in render.template_variables:
        if name not in known_names:
            # Most unknown variables are misspelled.
            near = get_close_matches(name, known_names, n=1)
            got = f"{name!r}, which {renderer.template.name} does not read"
            fix = (
                f"Did you mean {near[0]!r}?"
                if near
                else "Remove the variable, or set render.chat_template to a template that reads it."
            )
            expected = "a variable that the template reads"
            raise ConfigError(explain("render.template_variables", got=got, expected=expected, fix=fix))


def unmatched_models(render: RenderConfig, models: Collection[str]) -> list[str]:
    """Return a warning for each pattern in `student_models` that matches no model in the run.

    This is not an error, since a config may be shared with other runs.
    """
    model_names = ", ".join(sorted(filter(None, models))) or "none: no turn has a model name"
    return [
        explain(
            "render.student_models",
            got=f"{pattern!r}, which matches no turn's model",
            expected=f"a name or pattern that matches a model in the run ({model_names})",
        )
        for pattern in render.student_models
        if not any(fnmatchcase(model, pattern) for model in models)
    ]


def tools_of(run: RunDir | None) -> dict[str | None, list[dict[str, Any]]] | None:
    """Return the tools of each agent in the run, by log format, in the form that chat templates expect."""
    if run is None or not run.path("tools").exists():
        return None
    return {
        format_name: [_described(tool) for tool in agent_tools]
        for format_name, agent_tools in read_tools(run).by_format.items()
    }


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool schema with an empty description, which templates may require but logs do not contain."""
    name, parameters = tool["function"]["name"], tool["function"]["parameters"]
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _thinking_rules(render: RenderConfig) -> ThinkingRules:
    return ThinkingRules(
        own=render.own_thinking, others=render.other_thinking, student_models=tuple(render.student_models)
    )


def chat_template(render: RenderConfig) -> str | None:
    """Read the template file named in the config section; None if it names none."""
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
    """Describe how many turns' thinking was treated in which way; "" if there was no thinking."""
    phrases = [f"{counts[name]} {words}" for name, words in OUTCOMES.items() if counts.get(name)]
    return f"thinking of turns: {', '.join(phrases)}" if phrases else ""
