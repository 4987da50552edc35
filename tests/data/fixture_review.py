"""The sites of the shared fixture sessions as rows of the table in tests/data/site_rules_review.md.

`python tests/data/fixture_review.py` prints the rows for whoever reviews them; the last column is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from composer_replication.ingestion import IngestReport, ingest
from composer_replication.sites import find_error_sites

_MAX_EVIDENCE = 58


def review_rows(sessions: Path) -> list[str]:
    """One line of Markdown per site, without the reviewer's column."""
    rows = []
    for conversation in ingest([sessions], IngestReport(), scrubber=None):
        for site in find_error_sites(conversation):
            turn = next(each for each in conversation.turns if each.id == site.turn_id)
            file = Path(turn.provenance.file).name
            place = f"{file[:24]}:{turn.provenance.lines[0]}"
            flags = ("soft " if site.is_soft else "") + ("kept" if site.is_kept else "")
            cells = (len(rows) + 1, place, site.tool or "-", site.kind, site.blame, flags.strip() or "-", _shown(site))
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows


def _shown(site) -> str:
    line = re.sub(r"/(?:home|Users|tmp|workspace)/", "~/", " ".join(site.evidence_text.split()))
    line = re.sub(r"'[\w-]+(?:\.[\w-]+)+\.(?:org|com|net)'", "'a host'", line)
    line = line.replace("|", "¦").replace("`", "'").replace("<", "(").replace(">", ")")
    return line if len(line) <= _MAX_EVIDENCE else line[: _MAX_EVIDENCE - 1] + "…"


if __name__ == "__main__":
    print("\n".join(review_rows(Path(sys.argv[1]))))
