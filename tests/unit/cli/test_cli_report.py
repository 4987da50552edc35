"""`crf report` as a user runs it: what it prints, where it writes, without torch, and without the extra."""

from __future__ import annotations

import json

import pytest
from crf import crf, must

from output_facts import lines_with
from report_runs import make_run

NO_TORCH = "import sys; sys.modules.update(dict.fromkeys({names!r})); from composer_replication.cli.main import main; "
RUN = "sys.exit(main(['report', 'run']))"


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "run", 3)
    return tmp_path


def test_it_prints_the_verdict_and_where_the_pages_are(folder):
    printed = must("report", "run", cwd=folder).splitlines()
    verdict = json.loads((folder / "run" / "evaluation.json").read_text())["verdict"]
    assert verdict["word"] == "better"
    assert printed[0].endswith(" ".join(verdict["sentences"]))
    assert printed[1:] == [
        "run/report.html",
        "run/report.md",
    ]
    said = json.loads(must("report", "run", "-o", "out/page.html", "--json", cwd=folder))
    assert (said["html"], said["verdict"], said["missing"], said["sessions"]) == ("out/page.html", "better", [], 3)
    assert (folder / "out" / "page.md").exists()


def test_what_is_missing_is_said_on_stderr(folder):
    (folder / "run" / "evaluation.json").unlink()
    done = crf("report", "run", cwd=folder)
    assert done.returncode == 0
    assert lines_with(done.stderr, "evaluation.json", "`crf evaluate RUN --before MODEL --after ADAPTER`")


def test_neither_torch_nor_transformers_is_needed(folder):
    import subprocess
    import sys

    names = ["torch", "transformers", "tokenizers", "safetensors", "datasets", "trl", "peft"]
    code = NO_TORCH.format(names=names) + RUN
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "report.html").exists()


def test_without_the_extra_it_says_what_to_install(folder):
    import subprocess
    import sys

    code = NO_TORCH.format(names=["matplotlib"]) + RUN
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert lines_with(done.stderr, "matplotlib", 'pip install "composer-replication[report]"')
