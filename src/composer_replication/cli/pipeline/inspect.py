"""`crf inspect RUN SITE_ID`: the erring turn as training sees it, token by token, so that a mask can be checked."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from composer_replication.cli.console import is_terminal
from composer_replication.cli.options import add_config_arguments, add_short, overrides_of, refuse_unread

if TYPE_CHECKING:
    from composer_replication.config import CrfConfig
    from composer_replication.objective.hint_proof import HintProof
    from composer_replication.steps.around.inspect import Inspected

HELP = "show which tokens of a site are trained, the hint, and the rows that predict the same token"
_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with sites in it")
    parser.add_argument("site", metavar="SITE_ID", help="the id of a site, or its first characters (`crf sites RUN`)")
    text = "the model whose tokens to show: a folder or a model's name"
    add_short(parser, "--tokenizer", key="train.model", metavar="NAME", help=text)
    add_config_arguments(parser, "render", "train", "loss")
    add_short(parser, "--chat-template", key="render.chat_template", metavar="FILE")
    parser.add_argument("--tools", metavar="FILE", help="a JSON list of schemas to show instead of the run's tools")
    add_short(parser, "--placement", key="train.batch.placement", metavar="PLACE")
    parser.add_argument("--context", type=int, default=16, metavar="N", help="tokens to show around it; default 16")
    parser.add_argument("--tokens", action="store_true", help="list every index pair, not the first and last ones")
    parser.add_argument("--json", action="store_true", help="print ids, spans, index pairs and counts as JSON")
    colour = parser.add_mutually_exclusive_group()
    colour.add_argument("--color", action="store_true", default=None, help="colour even where this is no terminal")
    colour.add_argument("--no-color", action="store_false", dest="color", help="marks only, no escape codes")


def run(args: argparse.Namespace) -> int:
    from composer_replication.errors import InputError, explain
    from composer_replication.runs import RunDir

    if args.context < 0:
        raise InputError(explain("--context", got=args.context, expected="0 or more tokens"))
    run_dir = RunDir.open(args.run)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries say while loading is not our output
        from composer_replication.config.presets import load_with_preset
        from composer_replication.steps.around.inspect import inspect_site, read_schemas

        config = load_with_preset(args.config, overrides_of(args))
        refuse_unread(args)
        tools = read_schemas(args.tools) if args.tools else None
        is_training = bool(args.config or args.set)
        inspected = inspect_site(config, run_dir, args.site, tools=tools, is_training=is_training)
    view, left_out = inspected.view, _in_words(inspected.left_out, config)
    if args.json:
        from composer_replication.canonical_json import encode_as_written
        from composer_replication.cli.console import write_json

        record = {**view.as_json(), "left_out": left_out}
        record |= {} if inspected.proof is None else {"proof": asdict(inspected.proof)}
        write_json(encode_as_written(record, where=f"site {view.site.id}").decode())
        return 0
    sys.stdout.write(_page(args, config, inspected, left_out))
    return 0


def _page(args: argparse.Namespace, config: CrfConfig, inspected: Inspected, left_out: str) -> str:
    from composer_replication.cli.pages.site_page import site_page

    of_tools = f"{inspected.num_tools} of {args.tools or inspected.format}" if inspected.num_tools else "none"
    return site_page(
        inspected.view,
        inspected.renderer,
        tokenizer=f"{config.train.model}, tools: {of_tools}",
        asked=config.train.batch.placement,
        left_out=left_out,
        proof=_proof_in_words(inspected.proof),
        num_context=args.context,
        all_pairs=args.tokens,
        width=shutil.get_terminal_size((_WIDTH, 24)).columns,
        is_colour=_is_colour(args.color),
    )


def _proof_in_words(proof: HintProof | None) -> str:
    if proof is None:
        return ""
    drops = [f"its own hint lowers the call's decision by {proof.without_hint - proof.with_hint:.2f} nats a token"]
    if proof.with_other_hint is not None:
        drops.append(f"that of {proof.other_kind} by {proof.without_hint - proof.with_other_hint:.2f}")
    if proof.good_effect is not None:
        drops.append(f"its own good calls by {-proof.good_effect:.2f}")
    what = f"{proof.num_tokens} tokens, {proof.basis}".replace("_", " ")
    return f"hint proof of the last training: {proof.reason.replace('_', ' ')} ({what}): {', '.join(drops)}"


def _in_words(reason: str, config: CrfConfig) -> str:
    from composer_replication.report.count_words import MEANINGS

    budget = f"; it is {config.train.batch.window[0]:,}" if reason == "longer_than_window" else ""
    return f"{reason}: {MEANINGS[reason]}{budget}" if reason in MEANINGS else reason


def _is_colour(asked: bool | None) -> bool:
    """As asked; otherwise on a terminal that can, unless the user wants none anywhere (no-color.org)."""
    if asked is not None:
        return asked
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and is_terminal(sys.stdout)
