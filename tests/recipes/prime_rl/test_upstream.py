"""A checkout of PRIME-RL against our records of it: what moved is named. Its own classes run ours, where they can."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.envs.student import load_student, student_folder
from composer_replication.recipes.prime_rl import hinted_turns
from recipes.plain_losses import load_start
from recipes.prime_rl.contract import CONFIG_CLASSES, CONFIG_KEYS, CONFIGS, FIELDS, PARAMETERS, SOME_FIELDS, WORDS
from recipes.prime_rl.engine_records import engine_loss, give_advantages, samples_of, trainer_logprobs
from recipes.prime_rl.recorded_traces import Pool, give_logprobs, own_traces, verifiers_trace
from recipes.prime_rl.test_records import RUNS
from recipes.prime_rl.upstream import Names, checkout, imported
from recipes.recorded_steps import fixed_batch

pytestmark = pytest.mark.filterwarnings("ignore")  # its libraries' own


@pytest.mark.parametrize(("path", "name"), FIELDS, ids=str)
def test_a_record_has_the_fields_that_we_know(path: str, name: str) -> None:
    assert Names(path).fields(name) == FIELDS[path, name]


@pytest.mark.parametrize(("path", "name"), SOME_FIELDS, ids=str)
def test_a_record_still_has_the_fields_that_we_read(path: str, name: str) -> None:
    missing = set(SOME_FIELDS[path, name]) - set(Names(path).fields(name))
    assert not missing, f"PRIME-RL: {name} has no {sorted(missing)} any more"


@pytest.mark.parametrize(("path", "name"), PARAMETERS, ids=str)
def test_a_function_takes_what_we_know(path: str, name: str) -> None:
    assert Names(path).parameters(name) == PARAMETERS[path, name]


@pytest.mark.parametrize(("path", "words"), WORDS)
def test_a_file_still_says_what_we_rely_on(path: str, words: str) -> None:
    assert words in (checkout() / path).read_text(encoding="utf-8"), f"PRIME-RL: {path} changed"


@pytest.mark.parametrize("table", CONFIG_CLASSES)
def test_a_table_of_a_config_has_the_keys_that_we_know(table: str) -> None:
    path, name = CONFIG_CLASSES[table]
    missing = CONFIG_KEYS[table] - set(Names(f"{CONFIGS}/{path}").fields(name))
    assert not missing, f"PRIME-RL: {name} has no {sorted(missing)}"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_config_is_one_to_the_engine_s_own_classes(path: Path) -> None:
    config = imported("prime_rl.configs.rl").RLConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    source = config.orchestrator.train.source[0]
    assert type(source.env).__name__ == "WorkspaceEnvConfig"
    assert source.env.agent.harness.max_calls == 40
    assert config.trainer.loss.import_path.endswith("composer_loss.loss_fn")
    assert config.orchestrator.train.filter_zero_advantages


@pytest.fixture(scope="module")
def annotated() -> Any:
    """The fixed batch through the engine's own classes: its GRPO, our hooks in it, its samples; ours beside them."""
    algo = imported("prime_rl.orchestrator.algo")
    configs = imported("prime_rl.configs.algorithm")
    vf = imported("verifiers.v1")
    before = dict(algo.ALGORITHM_CLASSES)
    try:
        hinted_turns.register(hinted_turns.HintSettings(alpha_sdpo=0.1))
        model, batch = load_start(), fixed_batch()
        pool = Pool(model, str(student_folder()))
        algorithm = algo.build_algorithm(configs.GRPOAlgoConfig(), pool)
    finally:
        algo.ALGORITHM_CLASSES.update(before)
    own = own_traces(load_student()[1], batch)
    with torch.no_grad():
        give_logprobs(own, [trainer_logprobs(model, each.branches[0].token_ids).tolist() for each in own])
    theirs = [verifiers_trace(vf, each) for each in own]
    asyncio.run(algorithm.setup())
    for trace in theirs:
        asyncio.run(algorithm.finalize_episode(episode := vf.Episode.model_construct(traces=[trace])))
        assert episode.traces[0] is trace
    for group in sorted(set(batch.group.tolist())):
        rows = [row for row, each in enumerate(batch.group.tolist()) if each == group]
        episodes = [vf.Episode.model_construct(traces=[theirs[row]]) for row in rows]
        asyncio.run(algorithm.finalize_group(episodes))
    give_advantages(own, batch.group.tolist())
    hinted = algorithm.hinted_turns
    for trace in own:
        asyncio.run(hinted.annotate(trace, trace.branches, pool.score))
    return model, theirs, own


def test_the_engine_s_own_samples_are_those_of_our_records(annotated: Any) -> None:
    _, theirs, own = annotated
    to_samples = imported("prime_rl.orchestrator.trajectories").trace_to_samples
    prune = imported("prime_rl.orchestrator.train_sink")._prune_zero_advantages
    for trace, wanted in zip(theirs, samples_of(own), strict=True):
        (found,) = to_samples(trace)
        is_kept = prune(found)
        assert is_kept == bool(any(wanted.rl_weights or ()) or wanted.ref_kl_weights)
        assert (found.token_ids, found.mask) == (wanted.token_ids, wanted.mask)
        for name in ("logprobs", "advantages", "ref_logprobs", "ref_kl_weights"):
            given = getattr(found, name)
            assert given == pytest.approx(getattr(wanted, name), abs=1e-5) if given else not getattr(wanted, name), name


def test_the_engine_s_own_loss_is_that_of_our_records(annotated: Any) -> None:
    model, _, own = annotated
    loss = imported("prime_rl.trainer.rl.loss")
    config = imported("prime_rl.configs.trainer").CustomLossConfig(
        import_path="composer_replication.recipes.prime_rl.composer_loss.loss_fn"
    )
    samples = list(samples_of(own))
    with torch.no_grad():
        logprobs = [trainer_logprobs(model, each.token_ids) for each in samples]
    ours = [each.clone().requires_grad_() for each in logprobs]
    wanted = engine_loss(samples, ours).total
    given = [each.clone().requires_grad_() for each in logprobs]
    found, metrics = loss.compute_loss(
        trainer_logprobs=given,
        inference_logprobs=[torch.tensor(each.logprobs) for each in samples],
        ref_logprobs=[torch.tensor(each.ref_logprobs or [0.0] * len(each.mask)) for each in samples],
        advantages=[torch.tensor(each.advantages) for each in samples],
        loss_mask=[torch.tensor(each.mask) for each in samples],
        rl_weights=[torch.tensor(each.rl_weights) for each in samples],
        ce_weights=None,
        ref_kl_weights=[torch.tensor(each.ref_kl_weights or [0.0] * len(each.mask)) for each in samples],
        rl_loss_fn=loss.setup_rl_loss_fn(config),
        rl_scale=sum(int(torch.tensor(each.rl_weights).count_nonzero()) for each in samples),
        ce_scale=1,
        ref_kl_scale=sum(int(torch.tensor(each.ref_kl_weights or [0.0]).count_nonzero()) for each in samples),
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert "loss/policy" in metrics
    pairs = zip(torch.autograd.grad(found, given), torch.autograd.grad(wanted, ours), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
