"""`crf evaluate`: what it prints, and that a user's mistake is a sentence."""

from __future__ import annotations

import json
import shutil

import pytest

from composer_replication.cli.main import main
from composer_replication.cli.sites import write_sites
from composer_replication.cli.split import write_split
from composer_replication.config import SitesConfig, SplitConfig
from composer_replication.runs import RunDir
from composer_replication.runs.lineage import RECORD
from output_facts import lines_with

LITTLE = [word for each in ("samples=0", "good_turns=0", "token_gaps=0") for word in ("--set", f"evaluation.{each}")]


@pytest.fixture
def run(folder, tmp_path):
    """A run of which half of the sessions are held out."""
    shutil.copytree(folder / "run", tmp_path / "run")
    opened = RunDir.open(tmp_path / "run")
    write_split(SplitConfig(test=0.5), opened)
    write_sites(SitesConfig(), opened)
    return tmp_path / "run"


def test_the_verdict_is_printed_and_json_is_the_file(run, folder, capsys):
    model = str(folder / "model")
    given = ["evaluate", str(run), "--before", model, "--after", model, *LITTLE]
    assert main(given) == 0
    out = capsys.readouterr().out
    written = json.loads((run / "evaluation.json").read_text())
    assert written["verdict"]["word"] == "no_difference"
    for sentence in written["verdict"]["sentences"]:
        assert sentence in out.splitlines()
    assert "forced_gap" in out
    assert lines_with(out, 6, 12, "sessions", "time")
    assert lines_with(out, "sampled", "evaluation.samples", 0)
    assert main([*given, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((run / "evaluation.json").read_text())
    assert printed["figures"] == written["figures"]
    assert (written["schema"], written["version"]) == ("composer_replication.evaluation", 1)


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["--after", "nowhere/to/be/found", "--before", "MODEL"], ["'nowhere/to/be/found'"]),
        (["--before", "MODEL"], ["--after", "`crf train`"]),
        (["--after", "MODEL"], ["--before", RECORD]),
        (["--before", "MODEL", "--after", "MODEL", "--set", "evaluation.primary=luck"], ["evaluation.primary", "luck"]),
        (["--before", "MODEL", "--after", "MODEL", "--set", "loss.alpha_sdpo=1"], ["loss.alpha_sdpo", "crf evaluate"]),
        (["--before", "MUTE", "--after", "MUTE"], ["tokenizer", "render.chat_template"]),
    ],
)
def test_mistakes_are_sentences(run, folder, tmp_path, capsys, given, facts):
    if "MUTE" in given:  # a tokenizer that cannot say a conversation
        shutil.copytree(folder / "model", tmp_path / "mute")
        (tmp_path / "mute" / "chat_template.jinja").unlink(missing_ok=True)
        settings = json.loads((tmp_path / "mute" / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (tmp_path / "mute" / "tokenizer_config.json").write_text(json.dumps(settings))
    places = {"MODEL": str(folder / "model"), "MUTE": str(tmp_path / "mute")}
    assert main(["evaluate", str(run), *(places.get(word, word) for word in given), *LITTLE]) != 0
    said = capsys.readouterr().err
    assert lines_with(said, *facts)
    assert "Traceback" not in said


def test_a_half_finished_run_is_told_what_is_missing(run, folder, capsys):
    model = str(folder / "model")
    (run / "sites.jsonl").unlink()
    assert main(["evaluate", str(run), "--before", model, "--after", model, *LITTLE]) != 0
    assert "crf sites" in capsys.readouterr().err
    (run / "split.jsonl").unlink()
    assert main(["evaluate", str(run), "--before", model, "--after", model, *LITTLE]) != 0
    assert "crf split" in capsys.readouterr().err
