"""`crf train` with rollouts: prompts, rewards and environment by name, and the trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import set_seed

from composer_replication.config.rollouts import GRPOSection
from composer_replication.errors import ComposerError, ConfigError, explain
from composer_replication.optional import require
from composer_replication.rollouts.worlds.openenv import is_address, openenv_environment
from composer_replication.rollouts.worlds.verifiers import VerifiersWorld, is_verifiers, verifiers_world, world_reward
from composer_replication.runs.split import held_out_of
from composer_replication.sessions.dataset import LoggedSessions
from composer_replication.sessions.phases import Say
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.from_config.inputs import (
    Inputs,
    lora_config,
    named_object,
    prompts_of,
    token_rows,
    weighting_of,
)
from composer_replication.trainer.from_config.offline import tell_proof
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.from_config.renderer import unmatched_models
from composer_replication.trainer.from_config.requirements import make_arguments, refused
from composer_replication.trainer.presets import (
    channel_settings,
    grpo_arguments,
    preset_rewards,
    rollout_options,
    teacher_of,
    training_arguments,
)
from composer_replication.trainer.start_model import adapter_refused, prepare_model
from composer_replication.trainer.token_rows import with_token_rows
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.run_diagnosis import RunDiagnosis


def grpo_arguments_of(inputs: Inputs, folder: TrainingFolder) -> Any:
    """A `trl.GRPOConfig`; what TRL refuses is told in its own words."""
    trl = require("trl", extra="train")
    train = inputs.config.train
    return make_arguments(
        trl.GRPOConfig,
        train,
        output_dir=str(folder.checkpoints),
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        per_device_eval_batch_size=train.grpo.num_generations,
        chat_template_kwargs=dict(inputs.config.render.template_variables) or None,
        **training_arguments(train),
        **grpo_arguments(train),
    )


def grpo_trainer(
    inputs: Inputs, args: Any, folder: TrainingFolder, alarm: CollapseAlarm | None, diagnosis: RunDiagnosis, say: Say
) -> tuple[ComposerReplicationTrainer, LoggedSessions | None]:
    """The trainer, and the run's logged sessions that it has beside its rollouts, where a run is named."""
    config, grpo = inputs.config, inputs.config.train.grpo
    rewards, environment, rollouts = rewards_and_world(grpo)
    prompts, held_out = prompts_of(inputs)
    set_seed(config.train.optimiser.seed)
    model, adapter = _model(inputs, args, say)
    logged = _logged(inputs, model, say)
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
            teacher=teacher_of(config),
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
        of_adapter = adapter is not None and "target modules" in str(error).lower()
        raise adapter_refused(error, model) if of_adapter else refused(error, config.train) from error
    return trainer, logged


def rewards_and_world(grpo: GRPOSection) -> tuple[list[Any], Any | None, Any | None]:
    """The reward functions, and what makes environments or rollouts: ours, an OpenEnv server's, or verifiers'."""
    rewards = [named_object(path, "train.grpo.rewards") for path in grpo.rewards]
    rollouts = None if grpo.rollouts is None else named_object(grpo.rollouts, "train.grpo.rollouts")
    environment = _environment(grpo.environment)
    if environment is not None and rollouts is not None:
        fix = "A rollout function has its own environment: TRL would play a second time."
        raise ConfigError(explain("train.grpo", got="environment and rollouts", expected="one of the two", fix=fix))
    if isinstance(environment, VerifiersWorld):
        return rewards or [world_reward], None, environment
    if not rewards and environment is None:
        expected = "one as module:function, or an environment with get_reward"
        raise ConfigError(explain("train.grpo.rewards", got="none", expected=expected))
    return rewards, environment, rollouts


def _environment(name: str | None) -> Any | None:
    """By what its name is: a server's address, an id of verifiers, or a callable."""
    if name is None:
        return None
    if is_address(name):
        return openenv_environment(name)
    return verifiers_world(name) if is_verifiers(name) else named_object(name, "train.grpo.environment")


def _model(inputs: Inputs, args: Any, say: Say) -> tuple[Any, Any | None]:
    """The start weights, and the adapter that the trainer puts on; weights in 4 bits have theirs already."""
    adapter, name = lora_config(inputs.config.train.adapter), inputs.config.train.model
    assert name is not None
    source, protected_ids = inputs.renderer.template.source, inputs.renderer.protected.ids
    # TRL hands vLLM the weights by names that wrapped layers do not have.
    why_not = "with FSDP" if args.fsdp else "with vLLM" if args.use_vllm else ""

    def rows(model: Any) -> list[int]:
        said_ids = [number for text, number in protected_ids.items() if text in source]
        return token_rows(inputs, model, said_ids, say, why_not=why_not)

    if inputs.config.train.adapter.kind == "qlora":
        return prepare_model(name, args, peft_config=adapter, quantization="4bit", token_rows=rows), None
    model = prepare_model(name, args, peft_config=None, quantization="none", adapter_follows=adapter is not None)
    return model, None if adapter is None else with_token_rows(adapter, model, rows(model))


def _logged(inputs: Inputs, model: Any, say: Say) -> LoggedSessions | None:
    """Sites and pairs of the run directory, where there is one with some."""
    config, run = inputs.config, inputs.run
    if run is None:
        return None
    use_sites = config.train.channels.logged_sites and config.loss.alpha_sdpo > 0 and run.path("sites").exists()
    use_pairs = config.loss.beta_replay > 0 and run.path("pairs").exists()
    if not (use_sites or use_pairs):
        return None
    budget, overlap = config.train.batch.window
    held_out = held_out_of(run)
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
        with torch.autocast(device, torch.bfloat16, enabled=config.train.optimiser.bf16):  # as the steps are
            sessions = sessions.prove(model, config.train.proof.margin)
        tell_proof(sessions, say, can_warm_up=False)
    sessions.require_items()
    return sessions
