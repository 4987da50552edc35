"""Three states with recorded replies of three teachers: states -> pairs -> normaliser. Nothing is sent anywhere."""

from __future__ import annotations

import json
from pathlib import Path

from composer_replication.pairs.extract import extract_pairs
from composer_replication.pairs.normalise import DJNormalizer

HERE = Path(__file__).parent


def main() -> None:
    states = json.loads((HERE / "states.json").read_text())
    replies = json.loads((HERE / "replies.json").read_text())
    found = extract_pairs(states, replies)
    for record in found.records:
        pair = record.pair
        print(f"{pair['state_id']}: {pair['n_teachers_agreeing']} teachers agree")
        print(f"  chosen   {pair['chosen']}")
        print(f"  rejected {pair['rejected']}")
    print("without a pair:", dict(found.report.drops))
    normalizer = DJNormalizer()
    kept = normalizer.normalize(found.pairs)
    print("after the filters:", [pair.state_id for pair in kept])


if __name__ == "__main__":
    main()
