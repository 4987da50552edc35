"""Every name of PRIME-RL (559b447) that the recipe relies on: files, fields, parameters, keys of the configs.

`test_upstream.py` compares them with a checkout; `test_records.py` our own records and configs with them.
"""

from __future__ import annotations

SOURCE, CONFIGS = "src/prime_rl", "packages/prime-rl-configs/src/prime_rl/configs"

FIELDS = {
    (f"{SOURCE}/trainer/rl/loss.py", "LossInputs"): [
        "trainer_logprobs",
        "inference_logprobs",
        "ref_logprobs",
        "advantages",
        "loss_mask",
        "loss_weights",
    ],
    (f"{SOURCE}/trainer/rl/loss.py", "LossOutputs"): ["loss", "metrics"],
    (f"{CONFIGS}/trainer.py", "CustomLossConfig"): ["type", "import_path", "kwargs"],
}
"""All fields of a record, in order."""

SOME_FIELDS = {
    (f"{SOURCE}/transports/rollouts/types.py", "TrainingSample"): [
        "token_ids",
        "mask",
        "logprobs",
        "ref_logprobs",
        "rl_weights",
        "ref_kl_weights",
        "advantages",
    ],
    (f"{CONFIGS}/algorithm.py", "FrozenModelConfig"): ["name"],
}

PARAMETERS = {
    (f"{SOURCE}/orchestrator/algo/base.py", "Algorithm.__init__"): ["self", "config", "policy_pool"],
    (f"{SOURCE}/orchestrator/algo/base.py", "Algorithm.setup"): ["self"],
    (f"{SOURCE}/orchestrator/algo/base.py", "Algorithm.connect"): ["self", "reference"],
    (f"{SOURCE}/orchestrator/algo/base.py", "Algorithm.score_episode"): ["self", "episode"],
    (f"{SOURCE}/orchestrator/algo/base.py", "Algorithm.score_group"): ["self", "episodes"],
    (f"{SOURCE}/orchestrator/algo/base.py", "Algorithm.finalize_episode"): ["self", "episode"],
    (f"{SOURCE}/orchestrator/algo/base.py", "iter_trainable_traces"): ["episodes"],
    (f"{SOURCE}/orchestrator/algo/__init__.py", "build_algorithm"): ["config", "policy_pool"],
    (f"{SOURCE}/orchestrator/trajectories.py", "iter_trainable_branches"): ["trace"],
    (f"{SOURCE}/orchestrator/trajectories.py", "_loss_weights"): ["branch", "name", "trained_nodes"],
    (f"{SOURCE}/utils/client.py", "InferencePool.score"): ["self", "token_ids"],
    (f"{SOURCE}/utils/utils.py", "import_object"): ["dotted_path"],
    (f"{SOURCE}/trainer/rl/loss.py", "compute_loss"): [
        "trainer_logprobs",
        "inference_logprobs",
        "ref_logprobs",
        "advantages",
        "loss_mask",
        "rl_weights",
        "ce_weights",
        "ref_kl_weights",
        "rl_loss_fn",
        "rl_scale",
        "ce_scale",
        "ref_kl_scale",
    ],
    (f"{SOURCE}/entrypoints/orchestrator.py", "main"): [],
}

_JOB = f"{SOURCE}/templates/multi_node_rl.sbatch.j2"
WORDS = [
    (f"{SOURCE}/entrypoints/rl.py", '["orchestrator", "@",'),
    (_JOB, "uv run orchestrator $ORCHESTRATOR_ARGS"),
    (_JOB, "uv sync --all-extras --all-packages\n"),
    ("pyproject.toml", '"transformers==5.6.2",'),
    (f"{SOURCE}/orchestrator/train_sink.py", "has_ref_kl = sample.ref_kl_weights is not None"),
    (f"{SOURCE}/orchestrator/algo/__init__.py", '"grpo": GRPOAlgorithm'),
]
"""What stands in a file: how `rl` and a job start the orchestrator; that a zero-advantage sample with hints is kept.

The recipe's README tells users to edit the job in both places, and to leave the pinned transformers alone.
"""

_SOURCE_KEYS = {"name", "env", "sampling", "group_size"}
CONFIG_KEYS = {
    "": {
        "max_steps",
        "seq_len",
        "model",
        "deployment",
        "slurm",
        "weight_broadcast",
        "ckpt",
        "monitors",
        "orchestrator",
        "trainer",
        "inference",
    },
    "model": {"name"},
    "deployment": {"type", "num_train_gpus", "num_infer_gpus", "num_train_nodes", "num_infer_nodes"},
    "slurm": {"job_name"},
    "weight_broadcast": {"type"},
    "ckpt": {"interval", "keep_last"},
    "monitors": {"file"},
    "monitors.file": set(),
    "orchestrator": {"batch_size", "group_size", "max_off_policy_steps", "algo", "train", "eval"},
    "orchestrator.algo": {"type"},
    "orchestrator.train": {"sampling", "source"},
    "orchestrator.train.sampling": {"temperature", "max_completion_tokens"},
    "orchestrator.train.source": _SOURCE_KEYS,
    "orchestrator.train.source.env": {"taskset", "agent"},
    "orchestrator.train.source.env.taskset": {"id", "difficulty", "first_seed"},
    "orchestrator.train.source.env.agent": {"harness", "runtime"},
    "orchestrator.train.source.env.agent.harness": {"id", "max_calls"},
    "orchestrator.train.source.env.agent.runtime": {"type"},
    "orchestrator.eval": {"interval", "num_examples", "source"},
    "orchestrator.eval.source": _SOURCE_KEYS,
    "trainer": {"optim", "loss"},
    "trainer.optim": {"type", "lr"},
    "trainer.loss": {"type", "import_path", "kwargs"},
    "inference": {"vllm"},
    "inference.vllm": {"gpu_memory_utilization", "data_parallel_size", "tensor_parallel_size"},
}
"""Keys of a run's TOML that ours may have, by table; the tables of an evaluation's environment are a training's."""

CONFIG_CLASSES = {
    "": ("rl.py", "RLConfig"),
    "model": ("rl.py", "SharedModelConfig"),
    "slurm": ("shared.py", "SlurmConfig"),
    "ckpt": ("rl.py", "SharedCheckpointConfig"),
    "monitors": ("rl.py", "SharedMonitorsConfig"),
    "orchestrator": ("orchestrator.py", "OrchestratorConfig"),
    "orchestrator.train": ("orchestrator.py", "TrainConfig"),
    "orchestrator.train.sampling": ("orchestrator.py", "TrainSamplingConfig"),
    "orchestrator.eval": ("orchestrator.py", "EvalConfig"),
    "trainer": ("trainer.py", "TrainerConfig"),
    "trainer.loss": ("trainer.py", "CustomLossConfig"),
    "inference": ("inference.py", "InferenceConfig"),
}
"""Which class of the engine declares a table, where it is one class that names all its keys."""
