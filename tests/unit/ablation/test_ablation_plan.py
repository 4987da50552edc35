"""arms.toml: what is read of it, and what is refused before anything runs."""

from __future__ import annotations

import pytest
from ablation_plans import write_arms

from composer_replication.errors import ConfigError
from composer_replication.evaluation.ablation.job import Job, Result, Spent, Unit, _read_job, write_job
from composer_replication.evaluation.ablation.jobs import _freeze
from composer_replication.evaluation.ablation.plan import read_plan
from refusals import refusal


def test_base_and_an_arm_s_own_settings_become_one_config(tmp_path):
    plan = read_plan(write_arms(tmp_path))
    assert plan.seeds == (1, 2)
    assert [(arm.config.loss.alpha_sdpo, arm.config.train.control) for arm in plan.arms.values()] == [
        (0.1, "none"),
        (0.5, "none"),
        (0.5, "shuffled"),
    ]
    assert {arm.config.train.optimiser.lr for arm in plan.arms.values()} == {1e-3}
    assert plan.experiment.budget.steps == 2
    assert plan.metrics["forced_gap"].per == "sites"


def test_a_preset_lies_below_the_file_and_overrides_above_it(tmp_path):
    path = write_arms(tmp_path, ('train.preset = "none"', 'train.preset = "composer"'))
    plain = read_plan(path, ["train.optimiser.lr=0.5"]).arms["plain"].config
    assert plain.train.teacher.kind == "trust_region"  # the preset's
    assert plain.train.optimiser.steps == 2  # the file's
    assert plain.train.optimiser.lr == 0.5


def test_an_arm_is_compared_with_the_baseline_and_with_its_control(tmp_path):
    frozen = _freeze(read_plan(write_arms(tmp_path)), tmp_path, has_begun=False)
    assert {name: frozen.compared_with(name) for name in frozen.arms} == {
        "plain": [],
        "hints": ["plain", "shuffled"],
        "shuffled": ["plain"],
    }


REFUSED = {
    "no prediction": (('predict = "As plain."', ""), {"what": "[arms.shuffled]: predict"}),
    "unknown baseline": (
        ('baseline = "plain"', 'baseline = "plan"'),
        {"what": "ablate.baseline", "got": "'plan'", "expected": "plain, hints, shuffled"},
    ),
    "misspelt primary": (
        ('primary = "forced_gap"', 'primary = "forced_gp"'),
        {"what": "ablate.primary", "got": "'forced_gp'", "expected": "forced_gap", "fix": "forced_gap"},
    ),
    "unknown control": (
        ('control_of = "hints"', 'control_of = "hint"'),
        {"what": "arms.shuffled.control_of", "got": "'hint'"},
    ),
    "itself": (
        ('control_of = "hints"', 'control_of = "shuffled"'),
        {"what": "arms.shuffled.control_of", "got": "'shuffled'", "expected": "plain, hints"},
    ),
    "misspelt setting": (
        ("set.loss.alpha_sdpo", "set.loss.alpha_spdo"),
        {"what": "[arms.hints.set]", "got": "loss.alpha_spdo", "fix": "loss.alpha_sdpo"},
    ),
    "misspelt key": (
        ('about = "With hints."', 'abuot = "With hints."'),
        {"what": "[arms.hints]", "got": "abuot", "fix": "about"},
    ),
    "misspelt world": (
        ('world = "logs"', 'world = "log"'),
        {"what": "ablate.world", "got": "'log'", "expected": "workspace, logs"},
    ),
    "no world": (('world = "logs"', 'world = "json"'), {"what": "ablate.world", "got": "run_job"}),
    "seed twice": (("seeds = [1, 2]", "seeds = [1, 1]"), {"what": "ablate.seeds", "got": "[1, 1]"}),
    "no question": (('question = "Does it help?"', ""), {"what": "ablate.question"}),
    "name of a path": (("[arms.hints]", '[arms."../hints"]'), {"what": "../hints", "got": "'../hints'"}),
    "world's option": (
        ("[arms.plain]", "[world]\nfoo = 1\n[arms.plain]"),
        {"what": "[world]", "got": "foo", "expected": "share_warmup"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_with_its_place(tmp_path, case):
    change, facts = REFUSED[case]
    with refusal(ConfigError, **facts):
        read_plan(write_arms(tmp_path, change))


def test_the_primary_figure_may_be_of_one_kind(tmp_path):
    plan = read_plan(write_arms(tmp_path, ('primary = "forced_gap"', 'primary = "forced_gap:edit_no_match"')))
    assert plan.metrics["forced_gap:edit_no_match"].better == "up"


def test_a_job_comes_back_from_its_folder_as_it_was(tmp_path):
    plan = read_plan(write_arms(tmp_path))
    arm, folder = plan.arms["hints"], tmp_path / "jobs" / "hints" / "2"
    job = Job(
        folder=folder,
        arm="hints",
        seed=2,
        world="logs",
        config=arm.config,
        options=arm.options,
        budget=plan.experiment.budget,
        run=tmp_path,
    )
    write_job(job)
    assert _read_job(folder) == job
    assert job.shared == tmp_path / "jobs" / ".shared"


def test_a_result_comes_back_from_json_as_it_was():
    result = Result(
        arm="a",
        seed=1,
        world="logs",
        spent=Spent(rollouts=3, tokens=40, steps=5, seconds=1.5),
        units=[Unit("task-1", {"solved": 1, "calls": 7})],
        curve=[{"rollouts": 3, "success": 0.5}],
        digests={"start": "ab"},
        config_sha256="cd",
    )
    assert Result.from_json(result.as_json()) == result
