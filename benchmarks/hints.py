"""Measure the effects of own and unrelated hints on erring and good calls of the same sessions.

    python benchmarks/hints.py prepare RUN --tokenizer FOLDER --out items.jsonl [--hints writer=hints.jsonl]
    python benchmarks/hints.py score items.jsonl --model FOLDER --out result.json
    python benchmarks/hints.py table result.json

`prepare` needs this package, a run with sites, and a tokenizer with a chat template. `score` needs only torch and
transformers, and no network. `table` needs this package only for packed scores, such as those in `experiments/`. The
variants are no hint, the site's own hint (`template`), the error message (`raw_error`), the hint of a site of another
kind (`other_kind`), and each file given with `--hints`. Such a file has rows with a site's id and its hint, like the
answers of a hint writer or the `sites.jsonl` of an older version.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def main() -> None:
    args = _parser().parse_args()
    if args.verb == "prepare":
        from hint_items import prepare

        named = dict(hint.split("=", 1) for hint in args.hints)
        files = {name: Path(file) for name, file in named.items()}
        limits = {"max_sites": args.sites, "max_tokens": args.tokens}
        prepare(args.run, args.tokenizer, args.out, files, placement=args.placement, **limits)
    elif args.verb == "score":
        from hint_effects import score

        options = {"device": args.device, "dtype": args.dtype, "limit": args.limit, "temperatures": args.temperatures}
        score(args.items, args.model, args.out, adapter=args.adapter, **options)
    else:
        from hint_effects import print_tables, read_scores

        for result in args.results:
            is_plain = result.is_file() and result.suffix == ".json"
            read = read_scores if is_plain else _read_packed
            print_tables(result, rounds=args.rounds, held_out=args.held_out, read=read)


def _read_packed(path: Path) -> dict[str, Any]:
    from composer_replication.evaluation.ablation.job import read_stored

    return read_stored(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What hints do to a model.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare", help="sites and good calls of a run as token ids")
    prepare.add_argument("run")
    prepare.add_argument("--tokenizer", required=True, help="a folder with a tokenizer and its chat template")
    prepare.add_argument("--out", type=Path, required=True)
    prepare.add_argument("--hints", action="append", default=[], metavar="NAME=FILE", help="more hints to compare")
    prepare.add_argument("--sites", type=int, default=150, help="at most so many, by turns one of each kind")
    prepare.add_argument("--tokens", type=int, default=8192, help="longest context with its call")
    places = ("before_turn", "in_last_message", "head")
    prepare.add_argument("--placement", choices=places, default=places[0], help="where a hint stands")
    score = verbs.add_parser("score", help="log-probs of every call with every hint")
    score.add_argument("items", type=Path)
    score.add_argument("--model", required=True)
    score.add_argument("--out", type=Path, required=True)
    score.add_argument("--device", help="cuda where there is one")
    score.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, else float32")
    score.add_argument("--adapter", help="a folder with an adapter of PEFT for the model")
    score.add_argument("--temperatures", type=float, nargs="*", default=[], help="score each hint at these as well")
    score.add_argument("--limit", type=int, help="only the first so many items")
    table = verbs.add_parser("table", help="effects in nats, with intervals over sessions")
    table.add_argument("results", type=Path, nargs="+")
    table.add_argument("--held-out", action="store_true", help="of the test side of `crf split` alone")
    table.add_argument("--rounds", type=int, default=2000, help="of the bootstrap")
    return parser


if __name__ == "__main__":
    main()
