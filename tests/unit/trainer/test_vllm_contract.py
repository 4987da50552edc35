"""Generation with vLLM: what TRL calls of it, recorded; and our trainer on a stand-in with those names and no others.

vLLM itself is not in the tested set: its wheels are for CUDA, and want other versions of transformers.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trl

from composer_replication.config import CrfConfig, load
from composer_replication.trainer.presets import grpo_arguments

GENERATION = Path(trl.__file__).parent / "generation"
TESTS = Path(__file__).resolve().parents[2]
IMPORTED = {
    "vllm": {"LLM", "RequestOutput", "SamplingParams"},
    "vllm.sampling_params": {"StructuredOutputsParams"},
    "vllm.utils.network_utils": {"get_ip"},
    "vllm.distributed.weight_transfer.nccl_common": {"trainer_init"},
    "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer"},
    "vllm.distributed.weight_transfer.nccl_engine": {"NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine"},
}
"""The last of them for vLLM below 0.28."""
ON_THE_ENGINE = {"generate", "llm_engine", "reset_prefix_cache", "sleep", "wake_up"}
ROUTES = {
    "/finish_weight_update",
    "/get_world_size",
    "/health",
    "/inference/v1/generate",
    "/init_weight_transfer_engine",
    "/reset_prefix_cache",
    "/server_info",
    "/start_weight_update",
    "/update_weights",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/models",
}
VERSIONS = ("0.22.0", "0.31.0")


def tree(name: str) -> ast.Module:
    return ast.parse((GENERATION / name).read_text(encoding="utf-8"))


def test_trl_imports_these_names_of_vllm() -> None:
    found: dict[str, set[str]] = {}
    for name in ("vllm_generation.py", "vllm_client.py"):
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found.setdefault(str(node.module), set()).update(each.name for each in node.names)
    assert found == IMPORTED


def test_trl_uses_these_of_an_engine_in_its_own_process() -> None:
    used = {
        node.attr
        for node in ast.walk(tree("vllm_generation.py"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "llm"
    }
    assert used == ON_THE_ENGINE


def test_trl_s_tool_loop_asks_an_engine_how_long_a_context_may_be() -> None:
    text = (GENERATION.parent / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8")
    found = set(re.findall(r"self\.vllm_generation\.([\w.]+)", text))
    assert found == {
        "llm.llm_engine.model_config.max_model_len",
        "generate",
        "sync_weights",
        "vllm_client.get_server_info",
    }


def test_trl_asks_a_server_by_these_routes() -> None:
    text = (GENERATION / "vllm_client.py").read_text(encoding="utf-8")
    assert set(re.findall(r"\{self\.base_url\}(/[\w/]+)", text)) == ROUTES


def test_trl_says_which_versions_it_knows_and_that_a_server_takes_weights_over_cuda_alone() -> None:
    text = (GENERATION.parent / "import_utils.py").read_text(encoding="utf-8")
    assert re.findall(r'Version\("(0\.\d+\.\d+)"\) <= _vllm_base_version <= Version\("(0\.\d+\.\d+)"\)', text) == [
        VERSIONS
    ]
    assert 'device.type != "cuda"' in (GENERATION / "vllm_client.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process of its own: TRL looks for vLLM when it is imported."""
    folder = tmp_path_factory.mktemp("vllm")
    found = folder / "found"
    shutil.copytree(TESTS / "stand_ins", found)
    for module, names in IMPORTED.items():
        if module != "vllm":  # imported and, in a training's own process, never called
            path = found / (module.replace(".", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{name} = None\n" for name in sorted(names)), encoding="utf-8")
            for package in list(path.relative_to(found).parents)[:-2]:
                (found / package / "__init__.py").touch()
    record = found / "vllm-0.31.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n", encoding="utf-8")
    (record / "RECORD").write_text("vllm/__init__.py,,\n", encoding="utf-8")
    source = str(Path(__import__("composer_replication").__file__).parents[1])
    path = [str(found), str(TESTS), source]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRL_EXPERIMENTAL_SILENCE": "1"}
    worker = Path(__file__).with_name("vllm_worker.py")
    command = [sys.executable, str(worker), str(folder / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_our_trainer_generates_with_those_names_and_sends_its_weights_each_step(seen: dict[str, Any]) -> None:
    assert seen["names"] == ["LLM", "SamplingParams", "generate", "load_weights", "reset_prefix_cache"]
    assert seen["loaded"] == 2 * seen["parameters"], "all weights, before each of two steps"
    assert seen["moved"] == seen["parameters"], "those of the second step are not those of the start"
    assert seen["prompt_keys"] == ["prompt_token_ids"]
    assert seen["llm"]["logprobs_mode"] == "processed_logprobs"
    assert seen["llm"]["trust_remote_code"] is False


def test_what_was_sampled_has_the_log_probs_that_the_trainer_computes(seen: dict[str, Any]) -> None:
    """So vLLM's correction has nothing to correct: the ids and their order are the same on both sides."""
    assert len(seen["gaps"]) == 2
    assert max(seen["gaps"]) < 1e-4
    assert seen["ratios"] == pytest.approx([1.0, 1.0], abs=1e-3)


def test_the_config_says_where_vllm_runs() -> None:
    given = [
        "train.grpo.use_vllm=true",
        "train.grpo.vllm_mode=server",
        "train.grpo.vllm_server_url=http://127.0.0.1:8000",
    ]
    arguments = grpo_arguments(load(CrfConfig, None, given).train)
    assert (arguments["use_vllm"], arguments["vllm_mode"]) == (True, "server")
    assert arguments["vllm_server_base_url"] == "http://127.0.0.1:8000"
    assert arguments["vllm_gpu_memory_utilization"] == 0.3
