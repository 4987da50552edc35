"""`make audit` against a folder of advisories: which pins are affected, and no audit is not a clean one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "audit.py"


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "pins", lambda: {"some-package": {"1.5.0"}})
    return module


def advisory(folder: Path, **affected: Any) -> Path:
    record = {"id": "X-1", "affected": [{"package": {"name": "Some_Package"}, **affected}]}
    (folder / "x.json").write_text(json.dumps(record))
    return folder


def events(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"ranges": [{"type": "ECOSYSTEM", "events": [dict([pair]) for pair in pairs]}]}


@pytest.mark.parametrize(
    ("affected", "status"),
    [
        ({"versions": ["1.5.0"]}, 1),
        ({"versions": ["1.4"]}, 0),
        (events(("introduced", "0"), ("fixed", "1.5.1")), 1),
        (events(("introduced", "0"), ("fixed", "1.5.0")), 0),
        (events(("introduced", "1.0"), ("last_affected", "1.5.0")), 1),
        (events(("introduced", "1.0"), ("fixed", "1.1"), ("introduced", "1.5"), ("fixed", "1.6")), 1),
        (events(("introduced", "1.6")), 0),
    ],
)
def test_a_pin_is_affected_as_osv_says(audit: Any, tmp_path: Path, affected: dict[str, Any], status: int) -> None:
    assert audit.offline(advisory(tmp_path, **affected)) == status


def test_a_folder_without_advisories_is_no_clean_audit(audit: Any, tmp_path: Path) -> None:
    assert audit.offline(tmp_path) == 1
