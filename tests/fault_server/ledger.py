"""What the server billed: in memory, and in an append-only file that any process may read at any time."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from fault_server.settings import PICO_PER_USD


class Billed(NamedTuple):
    """One billed request. `is_reported`: the reply, if it arrives, says what it cost."""

    at_s: float  # Unix time
    fingerprint: str
    attempt: int  # of this fingerprint, from 0
    model: str
    session: str
    outcome: str  # "ok" or the name of the fault
    prompt_tokens: int
    completion_tokens: int
    cost_pico: int
    is_reported: bool

    @property
    def cost_usd(self) -> Decimal:
        return usd(self.cost_pico)

    def to_json(self) -> dict[str, Any]:
        record = self._asdict()
        record["cost_usd"] = str(self.cost_usd)
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Billed:
        return cls(*(record[name] for name in cls._fields))


def usd(pico: int) -> Decimal:
    """Exact; a sum of costs has no rounding to be blamed for passing a cap."""
    return Decimal(pico) / PICO_PER_USD


class Ledger:
    def __init__(self, path: Path) -> None:
        # One server, one ledger: the attempts of an older file are not known here.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self.records: list[Billed] = []
        self.total_pico = 0

    def bill(self, record: Billed) -> None:
        """Written before a byte of the reply is sent, so that no client can know more than the file."""
        self._write(record.to_json())
        self.records.append(record)
        self.total_pico += record.cost_pico

    def find(self, generation_id: str) -> Billed | None:
        _, _, rest = generation_id.partition("-")
        fingerprint, _, attempt = rest.rpartition("-")
        wanted = (fingerprint, attempt)
        return next((each for each in self.records if (each.fingerprint, str(each.attempt)) == wanted), None)

    def reset(self) -> None:
        self._write({"reset": True})
        self.records.clear()
        self.total_pico = 0

    def close(self) -> None:
        os.close(self._file)

    def _write(self, record: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")


def read_ledger(path: Path) -> list[Billed]:
    """The records of a ledger file since its last reset; a line still being written is left out."""
    records: list[Billed] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            record = json.loads(line)
            if "reset" in record:
                records.clear()
            else:
                records.append(Billed.from_json(record))
    return records
