"""Check a training's config, and read its inputs: tokenizer, renderer, adapter, loss weighting, training arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from composer_replication.batch.model_folder import load_config, load_tokenizer, resolve_model
from composer_replication.batch.render.dialect import ThinkingRules
from composer_replication.batch.render.renderer import Renderer, Tools
from composer_replication.config import CrfConfig, TrainConfig
from composer_replication.config.sections import RenderConfig
from composer_replication.config.train import AdapterConfig
from composer_replication.errors import ComposerError, ConfigError, MissingExtraError, explain
from composer_replication.optional import available, require
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_tools
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.same_start import launched_processes

if TYPE_CHECKING:
    from composer_replication.trainer.replica import Replica
    from composer_replication.trainer.sessions.dataset import LoggedSessions


# transformers gives tokenizers without a length limit a `model_max_length` of 10**30.
_MAX_POSITIONS = 10**9


class Inputs(NamedTuple):
    """The inputs that both modes of training need."""

    config: CrfConfig
    run: RunDir | None
    tokenizer: Any
    renderer: Renderer
    replica: Replica | None = None


class TrainingSetup(NamedTuple):
    """The parts of a training run that depend on its mode.

    `args` are the training arguments. `build` returns the trainer and its logged sessions. `before` is called with the
    trainer just before the first step, to report its state. `sessions` are the sessions of an offline training, as they
    were before the hint check.
    """

    args: Any
    build: Callable[[], tuple[Any, LoggedSessions | None]]
    before: Callable[[Any], None]
    sessions: LoggedSessions | None = None


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


def model_config(name: str) -> Any:
    """Return the initial model's config without loading its weights."""
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


def weighting_of(config: CrfConfig) -> RowWeighting | None:
    """Return the token weighting of the hint distillation (channel 2), or None if all of its switches are off."""
    weighting = RowWeighting(**vars(config.train.switches))
    return weighting if weighting.changes_weights or weighting.contrast is not None else None


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


def make_renderer(
    render: RenderConfig, tokenizer: Any, tools: Tools | None, *, template: str | None = None
) -> Renderer:
    """Return a renderer for a config section, and set its chat template on the tokenizer as well.

    `template` overrides the section's own template.
    """
    template = _read_chat_template(render) if template is None else template
    if template is not None:
        # TRL and exported weights use the tokenizer's template, which must be the template used in training.
        tokenizer.chat_template = template
    renderer = Renderer(
        tokenizer,
        tools=tools,
        chat_template=template,
        template_options=render.template_variables,
        thinking=ThinkingRules(
            own=render.own_thinking, others=render.other_thinking, student_models=tuple(render.student_models)
        ),
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

    def with_description(tool: Mapping[str, Any]) -> dict[str, Any]:
        # Templates may require a description, which logs do not contain.
        name, parameters = tool["function"]["name"], tool["function"]["parameters"]
        return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}

    by_format = read_tools(run).by_format
    return {format_name: [with_description(tool) for tool in tools] for format_name, tools in by_format.items()}


def _read_chat_template(render: RenderConfig) -> str | None:
    """Return the contents of the template file named in the config section, or None if it names no file."""
    if render.chat_template is None:
        return None
    try:
        return Path(render.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = "a text file with a Jinja template"
        raise ConfigError(
            explain(f"render.chat_template {render.chat_template}", got=error, expected=expected)
        ) from error


def make_arguments(make: Callable[..., Any], train: TrainConfig, output: Path, **changes: Any) -> Any:
    """Return the training arguments for a config, with `changes` taking precedence.

    `make` is `TrainingArguments` or a subclass of it. A library's error is raised as a ConfigError that names the
    option at fault, or else quotes the library's message.
    """
    _check_installed(train)
    arguments = _training_arguments(train)
    # The caller reports progress, and torch warns about pinned memory without a GPU.
    arguments |= {"disable_tqdm": True, "dataloader_pin_memory": torch.cuda.is_available()}
    # Without an accelerator, accelerate creates a (gloo) process group only if `use_cpu` is set.
    if launched_processes() > 1 and not torch.accelerator.is_available():
        arguments["use_cpu"] = True
    try:
        return make(output_dir=str(output), **{**arguments, **changes})
    except (ValueError, ImportError, RuntimeError) as error:
        raise library_error(error, train) from error


def library_error(error: Exception, train: TrainConfig) -> ComposerError:
    """Return a ConfigError for a library's error. It names the option at fault, or quotes the library."""
    if isinstance(error, ComposerError):
        return error
    got = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if train.optimiser.bf16 and "bf16" in got:
        fix = "Set train.optimiser.bf16 = false to compute in fp32."
        expected = "false, or a GPU that supports bf16"
        return ConfigError(explain("train.optimiser.bf16", got=f"true ({got})", expected=expected, fix=fix))
    if train.mode == "grpo" and "divisible by num_generations" in got:
        return _incomplete_groups_error(train)
    library = "TRL" if train.mode == "grpo" else "transformers"
    return ConfigError(explain(f"train.mode {train.mode}", got=got, expected=f"options that {library} accepts"))


def _incomplete_groups_error(train: TrainConfig) -> ConfigError:
    """Return the error for a step that cannot be divided into complete groups of rollouts for the same prompt."""
    group = train.grpo.num_generations
    per_device, accumulation = train.optimiser.per_device, train.optimiser.accumulation
    got = f"{per_device} x {accumulation} = {per_device * accumulation} rollouts per process and step"
    expected = f"complete groups of train.grpo.num_generations = {group} rollouts over all processes"
    fix = f"Set train.optimiser.per_device = {group}, or train.grpo.num_generations to a divisor of the rollout count."
    return ConfigError(
        explain("train.optimiser.per_device x train.optimiser.accumulation", got=got, expected=expected, fix=fix)
    )


def _check_installed(train: TrainConfig) -> None:
    """Raise ConfigError if an option needs a package that is not installed.

    The packages checked here are each needed by a single option, and no extra installs them.
    """
    if train.report_to != "none" and not available(train.report_to):
        fix = f'Type: pip install {train.report_to}. Or set train.report_to = "none": metrics.jsonl has everything.'
        got = f"{train.report_to}, which is not installed"
        raise ConfigError(explain("train.report_to", got=got, expected="none, or an installed tracker", fix=fix))
    if train.adapter.kind == "qlora" and not available("bitsandbytes"):
        fix = 'Type: pip install bitsandbytes. Or set train.adapter.kind = "lora", which does not quantize the weights.'
        got = "qlora without bitsandbytes"
        raise ConfigError(
            explain("train.adapter.kind", got=got, expected="lora or none, or bitsandbytes installed", fix=fix)
        )


def check_training_extra(train: TrainConfig) -> None:
    """Raise MissingExtraError if packages from the extra `train` are missing; the message has the install command."""
    needed = ["accelerate"]
    needed += ["peft"] if train.adapter.kind != "none" else []
    needed += ["trl", "datasets"] if train.mode == "grpo" else []
    missing = [package for package in needed if not available(package)]
    if missing:
        fix = 'Type: pip install "composer-replication[train]"'
        got = f"no {', no '.join(missing)}"
        raise MissingExtraError(explain("training", got=got, expected="the extra `train`", fix=fix), name=missing[0])


def _training_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return keyword arguments for `TrainingArguments` or TRL's `GRPOConfig` from the options in [train]."""
    optimiser = config.optimiser
    # transformers' plain "constant" schedule ignores warmup_steps.
    warmed = "constant_with_warmup" if optimiser.warmup else "constant"
    return {
        "max_steps": optimiser.steps,
        "learning_rate": optimiser.lr,
        "lr_scheduler_type": warmed if optimiser.schedule == "constant" else optimiser.schedule,
        "warmup_steps": optimiser.warmup,
        "gradient_accumulation_steps": optimiser.accumulation,
        "per_device_train_batch_size": optimiser.per_device,
        "weight_decay": optimiser.weight_decay,
        "max_grad_norm": optimiser.max_grad_norm,
        "seed": optimiser.seed,
        "bf16": optimiser.bf16,
        "gradient_checkpointing": optimiser.checkpointing,
        "save_strategy": "steps",
        "save_steps": config.save.every,
        "save_total_limit": config.save.keep,
        "logging_steps": config.log_every,
        "eval_strategy": "steps" if config.eval_every else "no",
        "eval_steps": config.eval_every or None,
        "report_to": config.report_to,
    }
