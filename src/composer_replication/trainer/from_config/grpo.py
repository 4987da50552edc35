"""Train on rollouts with `crf train` (train.mode = "grpo"): prompts, rewards, environment, and the trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import set_seed

from composer_replication.config import CrfConfig
from composer_replication.config.train import GRPOSection
from composer_replication.errors import ComposerError, ConfigError, explain
from composer_replication.optional import is_object_name, load_object, require
from composer_replication.runs.artefacts import sha256_of_file
from composer_replication.runs.files import read_conversations
from composer_replication.runs.split import read_test_ids
from composer_replication.trainer.from_config.inputs import (
    Inputs,
    TrainingSetup,
    library_error,
    lora_config,
    make_arguments,
    unmatched_models,
    weighting_of,
)
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.presets import (
    channel_settings,
    grpo_arguments,
    preset_rewards,
    rollout_options,
    teacher_from_config,
)
from composer_replication.trainer.rollouts.worlds.openenv import address_without_login, is_address, openenv_environment
from composer_replication.trainer.rollouts.worlds.verifiers import (
    VerifiersWorld,
    is_verifiers,
    verifiers_world,
    world_reward,
)
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.phases import Say
from composer_replication.trainer.sessions.proof import describe_hint_check
from composer_replication.trainer.start_model import adapter_error, choose_token_rows, prepare_model, with_token_rows
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.diagnosis import RunDiagnosis

if TYPE_CHECKING:
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer


# If there are evaluations, one prompt in this many is held out.
_HELD_OUT_INTERVAL = 10


def prepare_grpo(inputs: Inputs, folder: TrainingFolder, alarm: CollapseAlarm | None, say: Say) -> TrainingSetup:
    """Return the setup for training on rollouts.

    No memory estimate is made, because memory depends on the lengths of the rollouts.
    """
    trl = require("trl", extra="train")
    train = inputs.config.train
    args = make_arguments(
        trl.GRPOConfig,
        train,
        folder.checkpoints,
        per_device_eval_batch_size=train.grpo.num_generations,
        chat_template_kwargs=dict(inputs.config.render.template_variables) or None,
        **grpo_arguments(train),
    )
    diagnosis = RunDiagnosis(
        every=train.diagnose_every,
        max_completion_length=train.grpo.max_completion_length,
        say=say,
        says_summary=False,
    )
    return TrainingSetup(
        args=args,
        build=lambda: _grpo_trainer(inputs, args, folder, alarm, diagnosis, say),
        before=lambda trainer: say(f"channels: {', '.join(trainer.channels_on())}"),
    )


def plan_grpo(inputs: Inputs) -> dict[str, Any]:
    """Return what `TrainingPlan` reports about a training on rollouts: the number of prompts, and any remarks."""
    prompts, held_out = _train_and_eval_prompts(inputs)
    counts = {"prompts": len(prompts), "held_out_prompts": 0 if held_out is None else len(held_out)}
    if inputs.run is None or not inputs.config.render.student_models:
        return {"counts": counts}
    # Prompts name no models, so only logged sessions can be checked against `student_models`.
    turns = (turn for conversation in read_conversations(inputs.run) for turn in conversation.turns)
    models = {turn.model or "" for turn in turns if turn.role == "assistant"}
    return {"counts": counts, "remarks": unmatched_models(inputs.config.render, models)}


def _grpo_trainer(
    inputs: Inputs, args: Any, folder: TrainingFolder, alarm: CollapseAlarm | None, diagnosis: RunDiagnosis, say: Say
) -> tuple[ComposerReplicationTrainer, LoggedSessions | None]:
    """Build the trainer. Also return the logged sessions that it trains on besides rollouts, or None."""
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer

    config, grpo = inputs.config, inputs.config.train.grpo
    rewards, environment, rollouts = _rewards_and_environment(grpo)
    prompts, held_out = _train_and_eval_prompts(inputs)
    set_seed(config.train.optimiser.seed)
    model, adapter = _prepare_policy(inputs, args, say)
    logged = _load_logged_sessions(inputs, model, say)
    try:
        trainer = ComposerReplicationTrainer(
            model=model,
            args=args,
            reward_funcs=[*rewards, *preset_rewards(config.train, inputs.tokenizer)],
            train_dataset=prompts,
            eval_dataset=held_out,
            processing_class=inputs.tokenizer,
            peft_config=adapter,
            environment_factory=environment,
            rollout_func=rollouts,
            settings=channel_settings(config),
            teacher=teacher_from_config(config),
            sdpo_weighting=weighting_of(config),
            rollouts=rollout_options(config),
            heed_gate=grpo.heed_gate,
            logged_sessions=logged,
            alarm=alarm or CollapseAlarm(()),
            diagnosis=diagnosis,
            metrics_path=folder.metrics,
        )
    except ComposerError:
        raise
    except ValueError as error:
        # PEFT raises ValueError for unknown layers, and TRL raises it for invalid arguments.
        of_adapter = adapter is not None and "target modules" in str(error).lower()
        raise adapter_error(error, model) if of_adapter else library_error(error, config.train) from error
    return trainer, logged


def _rewards_and_environment(grpo: GRPOSection) -> tuple[list[Any], Any | None, Any | None]:
    """Return the reward functions, and either an environment factory or a rollout function, if any."""
    rewards = [_import_object(path, "train.grpo.rewards") for path in grpo.rewards]
    rollouts = None if grpo.rollouts is None else _import_object(grpo.rollouts, "train.grpo.rollouts")
    environment = _make_environment(grpo.environment)
    if environment is not None and rollouts is not None:
        fix = "A rollout function has its own environment, so TRL would run every episode twice."
        raise ConfigError(explain("train.grpo", got="environment and rollouts", expected="only one of them", fix=fix))
    # A verifiers environment runs whole episodes, so it is used as the rollout function.
    if isinstance(environment, VerifiersWorld):
        return rewards or [world_reward], None, environment
    if not rewards and environment is None:
        expected = "a reward function as module:function, or an environment with get_reward"
        raise ConfigError(explain("train.grpo.rewards", got="none", expected=expected))
    return rewards, environment, rollouts


def _make_environment(name: str | None) -> Any | None:
    """Return the environment that a name refers to: a server address, a verifiers id, or `module:function`."""
    if name is None:
        return None
    if is_address(name):
        return openenv_environment(name)
    return verifiers_world(name) if is_verifiers(name) else _import_object(name, "train.grpo.environment")


def _prepare_policy(inputs: Inputs, args: Any, say: Say) -> tuple[Any, Any | None]:
    """Return the initial model and the adapter config for the trainer; a 4-bit model already has its adapter."""
    adapter, name = lora_config(inputs.config.train.adapter), inputs.config.train.model
    assert name is not None
    source, protected_ids = inputs.renderer.template.source, inputs.renderer.protected.ids
    # TRL copies weights to vLLM by parameter name, but layers with trainable rows have other names.
    why_not = "with FSDP" if args.fsdp else "with vLLM" if args.use_vllm else ""

    def rows(model: Any) -> list[int]:
        template_ids = [token for text, token in protected_ids.items() if text in source]
        return choose_token_rows(
            inputs.config.train.adapter.token_rows, model, inputs.tokenizer, template_ids, say, why_not=why_not
        )

    if inputs.config.train.adapter.kind == "qlora":
        return prepare_model(name, args, peft_config=adapter, quantization="4bit", token_rows=rows), None
    model = prepare_model(name, args, peft_config=None, quantization="none", adapter_follows=adapter is not None)
    return model, None if adapter is None else with_token_rows(adapter, model, rows(model))


def _load_logged_sessions(inputs: Inputs, model: Any, say: Say) -> LoggedSessions | None:
    """Return the run's sessions with the error sites and preference pairs that this training run uses.

    Returns None if it uses neither.
    """
    config, run = inputs.config, inputs.run
    if run is None:
        return None
    use_sites = config.train.channels.logged_sites and config.loss.alpha_sdpo > 0 and run.path("sites").exists()
    use_pairs = config.loss.beta_replay > 0 and run.path("pairs").exists()
    if not (use_sites or use_pairs):
        return None
    budget, overlap = config.train.batch.window
    # Held-out sessions are for evaluation only.
    held_out = read_test_ids(run)
    sessions = LoggedSessions.from_run(
        run,
        inputs.renderer,
        budget=budget,
        overlap=overlap,
        placement=config.train.batch.placement,
        part=config.train.batch.part,
        responses="none",
        use_sites=use_sites,
        use_pairs=use_pairs,
        contrast=config.train.switches.contrast is not None,
        only=lambda conversation: conversation.id not in held_out,
    )
    for remark in unmatched_models(config.render, sessions.models):
        say(remark)
    if use_sites and config.train.proof.on:
        device = next(model.parameters()).device.type
        # Use the precision of training steps, which run under autocast.
        with torch.autocast(device, torch.bfloat16, enabled=config.train.optimiser.bf16):
            sessions = sessions.prove(model, config.train.proof.margin)
        for sentence in describe_hint_check(sessions.proofs, can_warm_up=False):
            say(sentence)
    sessions.require_items()
    return sessions


def _train_and_eval_prompts(inputs: Inputs) -> tuple[Any, Any]:
    """Return the prompts to train on and, if there are evaluations, the held-out prompts."""
    train = inputs.config.train
    prompts = _read_prompts(train.grpo)
    if not len(prompts):
        raise ConfigError(
            explain(f"train.grpo.dataset {train.grpo.dataset}", got="no prompts", expected="at least one prompt")
        )
    held_out = None
    if train.eval_every and len(prompts) > 1:
        train_rows, eval_rows = _split_rows(len(prompts))
        prompts, held_out = prompts.select(train_rows), prompts.select(eval_rows)
    if inputs.replica is not None:
        prompts = prompts.select(inputs.replica.rows_of(len(prompts)))
        inputs.replica.weigh(len(prompts))
    return prompts, held_out


def _read_prompts(grpo: GRPOSection) -> Any:
    """Return the prompts in the data set, or the tasks of an environment that brings its own."""
    if grpo.environment is not None and is_verifiers(grpo.environment):
        if grpo.dataset is not None:
            expected = "none, since the environment's own tasks are the prompts"
            raise ConfigError(explain("train.grpo.dataset", got=grpo.dataset, expected=expected))
        return require("datasets", extra="train").Dataset.from_list(verifiers_world(grpo.environment).rows())
    if grpo.dataset is None:
        expected = "a file, a folder, a name on the hub or module:function"
        raise ConfigError(explain("train.grpo.dataset", got="none", expected=expected))
    return _load_dataset(grpo.dataset)


def _load_dataset(name: str) -> Any:
    """Return a `datasets.Dataset` with prompts from a function (`module:name`), a file, a folder, or the hub."""
    datasets = require("datasets", extra="train")
    path = Path(name)
    if is_object_name(name) and not path.exists():
        dataset = _import_object(name, "train.grpo.dataset")()
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


def _split_rows(number: int) -> tuple[list[int], list[int]]:
    """Return the indices of the rows to train on, and the indices of the held-out rows."""
    # Every tenth row, spread evenly; at least one.
    held_out = list(range(_HELD_OUT_INTERVAL - 1, number, _HELD_OUT_INTERVAL)) or [number - 1]
    return sorted(set(range(number)) - set(held_out)), held_out


def _import_object(name: str, option: str) -> Any:
    """Import and return the object that an option names as `module:name`."""
    fix = "The module must be in the working directory or in an installed package."
    return load_object(name, what=option, fix=fix, error_class=ConfigError)


class NamedSource(NamedTuple):
    """A prompt data set, reward or environment that the config names, and the hash of its file, if any."""

    kind: str
    name: str
    sha256: str | None


def named_sources(config: CrfConfig) -> list[NamedSource]:
    """Return the prompts, rewards and environment for a training run with rollouts, each with the hash of its file.

    Sources that are not a single file, such as folders and hub names, have no hash.
    """
    grpo = config.train.grpo
    if config.train.mode != "grpo":
        return []
    kinds_and_names = [
        ("dataset", grpo.dataset),
        *(("reward", reward) for reward in grpo.rewards),
        ("environment", grpo.environment),
    ]
    return [
        NamedSource(kind, address_without_login(name) if is_address(name) else name, _source_hash(name))
        for kind, name in kinds_and_names
        if name is not None
    ]


def _source_hash(name: str) -> str | None:
    """Return the hash of the file that a path or an already imported `module:name` refers to."""
    path = Path(name)
    # A verifiers id looks like `module:name`, but does not name a module.
    if is_verifiers(name):
        return None
    if is_object_name(name) and not path.exists():
        module = sys.modules.get(name.partition(":")[0])
        # A module that was defined interactively has no file.
        path = Path(getattr(module, "__file__", None) or "")
    return sha256_of_file(path) if path.is_file() else None
