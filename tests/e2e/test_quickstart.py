"""The quickstart as a user runs it, and that it fails loudly when a channel is dead or a gradient is not finite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import run as quickstart
import torch

import composer_replication
from composer_replication.cli.ingest import ingest
from composer_replication.cli.sites import write_sites
from composer_replication.config import IngestConfig, SitesConfig
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_sites
from output_facts import lines_with


def test_the_tiny_run_prints_every_channel_at_every_step_and_learns(capsys):
    assert quickstart.main(["--tiny", "--steps", "4", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for name in ("lm_ce", "sdpo_jsd", "trace_replay_dpo", "grad norm"):
        assert name in printed
    assert len(re.findall(r"^│ +[1-4] │", printed, flags=re.MULTILINE)) == 4
    first, last = map(float, re.search(r"total ([\d.]+) -> ([\d.]+)", printed).groups())
    assert last < first


@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        (("ctx_teacher_input_ids", "sdpo_loss_mask", "sdpo_student_index", "sdpo_teacher_index"), "sdpo_jsd"),
        (
            tuple(
                f"dpo_{s}_{k}" for s in ("chosen", "rejected") for k in ("input_ids", "response_mask", "ref_logprobs")
            ),
            "trace_replay_dpo",
        ),
    ],
)
def test_a_dead_channel_fails_the_run(monkeypatch, capsys, dropped, named):
    def batch_without(*args, **kwargs):
        batch = composer_replication.build_batch(*args, **kwargs)
        return {key: value for key, value in batch.items() if key not in dropped}

    monkeypatch.setattr(quickstart, "build_batch", batch_without)
    assert quickstart.main(["--tiny", "--steps", "1", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert "InactiveChannelError" in error
    assert named in error


def test_a_channel_with_weight_zero_may_be_inactive(capsys):
    assert quickstart.main(["--tiny", "--steps", "1", "--alpha-sdpo", "0", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in lines_with(shown, "tokens")] == ["lm_ce"]  # of the channels that ran


def test_the_hint_of_the_readme_is_the_one_that_its_example_gets(tmp_path):
    """The first page shows what `crf sites` says of the example sessions, not what it might say."""
    root = Path(__file__).parents[2]
    shown = (root / "README.md").read_text(encoding="utf-8").partition("## The idea")[2].partition("```\n\n")[0]
    run = RunDir.create(tmp_path / "run")
    ingest(IngestConfig(paths=(str(root / "examples" / "sessions"),), workers=1), run)
    write_sites(SitesConfig(), run)
    page = " ".join(shown.split())
    told = [(site, hint) for site, hint in read_sites(run) if hint is not None and hint.text in page]
    assert [site.kind for site, _ in told] == ["edit_no_match"]
    assert told[0][0].evidence_text.splitlines()[0] in page


def test_a_gradient_that_is_not_finite_fails_the_run(monkeypatch, capsys):
    compose = quickstart.compose_loss

    def poisoned(*args, **kwargs):
        components = compose(*args, **kwargs)
        components.total = components.total * torch.tensor(float("nan"))
        return components

    monkeypatch.setattr(quickstart, "compose_loss", poisoned)
    assert quickstart.main(["--tiny", "--steps", "1", "--device", "cpu"]) == 1
    assert "NonFiniteError" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_one_line_and_no_steps_are_refused(tmp_path, capsys):
    assert quickstart.main(["--model", str(tmp_path / "nowhere"), "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert lines_with(error, f"'{tmp_path / 'nowhere'}'")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit):
        quickstart.main(["--tiny", "--steps", "0"])


def test_a_local_folder_loads_the_ordinary_way(tmp_path, capsys):
    from tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_model(tokenizer).save_pretrained(tmp_path)
    assert quickstart.main(["--model", str(tmp_path), "--steps", "1", "--device", "cpu"]) == 0
    assert lines_with(capsys.readouterr().out, "sdpo_jsd", 97, "tokens")
