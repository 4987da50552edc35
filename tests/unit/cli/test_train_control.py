"""`train.control`: the same sites with hints of other kinds, half of the pairs turned, all else equal."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

from train_runs import GRPO, adapter_of, same

from composer_replication.config.presets import load_with_preset
from composer_replication.evaluation.arms import Arm
from composer_replication.evaluation.verdict import _control_lacks
from composer_replication.runs.artefacts import control_folders
from composer_replication.trainer.from_config.inputs import read_inputs
from composer_replication.trainer.from_config.offline import offline_data
from output_facts import lines_with

CONTROL = "--set=train.control=shuffled"
# A random model of a few words has -10 nats or so for the names of tools: it is warmed up.
WARM = tuple(f"--set=train.{each}" for each in ("warmup.below=-1", "warmup.steps=2", "optimiser.steps=2"))


def test_hints_are_of_other_kinds_and_exactly_half_of_the_pairs_are_turned(folder, monkeypatch):
    monkeypatch.chdir(folder)
    real = offline_data(read_inputs(load_with_preset("run.toml"))).train
    control = real.shuffled(seed=3)
    own = {each.site.id: each for session in real.rendered for each in session.sites}
    wrong = {each.site.id: each for session in control.rendered for each in session.sites}
    kinds = defaultdict(set)
    for each in own.values():
        kinds[each.hint].add(each.site.kind)
    assert len(own) == len(wrong) == 12
    for identity, each in wrong.items():
        assert each.hint != own[identity].hint
        assert own[identity].site.kind not in kinds[each.hint]
        assert each._replace(hint="") == own[identity]._replace(hint="")
    pairs = [
        (before, after)
        for left, right in zip(real.rendered, control.rendered, strict=True)
        for before, after in zip(left.pairs, right.pairs, strict=True)
    ]
    turned = [after for before, after in pairs if (after.chosen, after.rejected) == (before.rejected, before.chosen)]
    assert len(turned) == len(pairs) // 2 == control.counts["turned_pairs"] == 6
    assert real.rendered[0].counts.get("turned_pairs") is None
    assert sum(before == after for before, after in pairs) == 6
    of_kind, turned_of_kind = Counter(pair.kind for _, pair in pairs), Counter(pair.kind for pair in turned)
    assert len(of_kind) > 1
    assert all(abs(2 * turned_of_kind[kind] - number) <= 1 for kind, number in of_kind.items())
    assert [each.responses for each in real.rendered] == [each.responses for each in control.rendered]
    assert real.channels["lm_ce"] == control.channels["lm_ce"]
    assert control.digest == real.shuffled(seed=3).digest not in (real.digest, real.shuffled(seed=4).digest)


def test_a_site_without_another_kind_beside_it_is_left_out_and_counted(folder, monkeypatch):
    monkeypatch.chdir(folder)
    real = offline_data(read_inputs(load_with_preset("run.toml"))).train
    kind = real.rendered[0].sites[0].site.kind
    alone = type(real)(
        [each for each in real.rendered if each.sites[0].site.kind == kind], real.renderer, real.settings
    )
    control = alone.shuffled()
    assert (control.channels["sdpo_jsd"], alone.counts["sites"]) == (0, 6)
    assert control.drops["sdpo_jsd: no_hint_of_another_kind"] == 6


def test_what_a_control_was_not_taught_is_said(tmp_path):
    def arm(name, hint_steps, pair_steps, **more):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        steps = {"sdpo_kl": hint_steps, "trace_replay_dpo": pair_steps}
        record = {"channels": [{"name": each, "steps": n} for each, n in steps.items()], "counts": {}, "drops": {}}
        (folder / "training.json").write_text(json.dumps(record | more))
        return Arm(name, str(folder), "base", str(folder))

    after = arm("after", 3, 3)
    assert _control_lacks([after]) == []
    assert _control_lacks([after, arm("control", 3, 3, counts={"turned_pairs": 2})]) == []
    (said,) = _control_lacks([after, arm("control", 0, 3, counts={"turned_pairs": 2})])
    assert lines_with(said, "channel 2")
    (said,) = _control_lacks([after, arm("control", 3, 3, counts={"turned_pairs": 0})])
    assert lines_with(said, "channel 3")
    assert len(_control_lacks([after, arm("control", 0, 0)])) == 2
    some = {"sdpo_kl: no_hint_of_another_kind": 4}
    (said,) = _control_lacks([after, arm("control", 3, 3, counts={"turned_pairs": 2}, drops=some)])
    assert lines_with(said, 4, "sites")
    assert "channel" not in said


def test_it_has_a_folder_of_its_own_and_begins_with_the_same_warm_up(train, folder):
    status, _, err = train(*WARM)
    assert status == 0, err
    status, _, err = train(*WARM, CONTROL)
    assert status == 0, err
    assert lines_with(err, "warm-up", "checkpoint-2")
    records = [
        json.loads((at / "adapter" / "training.json").read_text()) for at in (train.output, train.output / "control")
    ]
    assert [each["warmup_steps"] for each in records] == [2, 2]
    assert ["warm-up" in each["seconds"] for each in records] == [True, False]  # the control takes the other's
    assert records[0]["start_digest"] == records[1]["start_digest"]
    assert records[0]["counts"]["sites"] == records[1]["counts"]["sites"]
    assert (records[0]["counts"].get("turned_pairs"), records[1]["counts"]["turned_pairs"]) == (None, 6)
    assert not same(adapter_of(train.output), adapter_of(train.output / "control"))
    status, _, err = train(*WARM, CONTROL, "--set=train.shuffle=2")
    assert status == 0, err
    assert control_folders(train.output) == [train.output / "control", train.output / "control" / "2"]
    second = json.loads((train.output / "control" / "2" / "adapter" / "training.json").read_text())
    assert (second["warmup_steps"], "warm-up" in second["seconds"]) == (2, False)
    assert (second["start_digest"], second["counts"]) == (records[1]["start_digest"], records[1]["counts"])
    assert not same(adapter_of(train.output / "control" / "2"), adapter_of(train.output / "control"))
    status, _, err = train(*GRPO, CONTROL)
    assert status == 1
    assert "train.control" in err
