"""`crf inspect RUN SITE_ID`: show an erring turn as training sees it, token by token, so that masks can be checked."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.site_view import SiteView, view_site
from composer_replication.cli.console import (
    add_config_arguments,
    add_config_flag,
    is_terminal,
    overrides_from_args,
    refuse_unread_options,
    write_json,
)
from composer_replication.config import CrfConfig
from composer_replication.errors import InputError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_site
from composer_replication.trainer.from_config.inputs import make_renderer, tools_of
from composer_replication.trainer.from_config.offline import why_site_is_left_out
from composer_replication.trainer.objective.hint_proof import HintProof
from composer_replication.trainer.sessions.proof import read_hint_checks
from composer_replication.trainer.sessions.rendering import LoggedSession
from composer_replication.types import Conversation, ErrorSite, Hint

_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory with sites (`crf sites`)")
    parser.add_argument("site", metavar="SITE_ID", help="the id of a site, or its first characters (`crf sites RUN`)")
    text = "the model whose tokens to show: a folder or a hub name"
    add_config_flag(parser, "--tokenizer", key="train.model", metavar="NAME", help=text)
    add_config_arguments(parser, "render", "train", "loss")
    add_config_flag(parser, "--chat-template", key="render.chat_template", metavar="FILE")
    parser.add_argument("--tools", metavar="FILE", help="a JSON list of tool schemas to use instead of the run's tools")
    add_config_flag(parser, "--placement", key="train.batch.placement", metavar="PLACE")
    parser.add_argument("--context", type=int, default=16, metavar="N", help="tokens of context to show; default 16")
    parser.add_argument("--tokens", action="store_true", help="list every index pair, not only the first and last ones")
    parser.add_argument("--json", action="store_true", help="print ids, spans, index pairs and counts as JSON")
    color_group = parser.add_mutually_exclusive_group()
    color_group.add_argument(
        "--color", action="store_true", default=None, help="use colors even if stdout is not a terminal"
    )
    color_group.add_argument("--no-color", action="store_false", dest="color", help="marks only, no escape codes")


def run(args: argparse.Namespace) -> int:
    if args.context < 0:
        raise InputError(explain("--context", got=args.context, expected="0 or more tokens"))
    run_dir = RunDir.open(args.run)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print while loading; stdout is for the page
        from composer_replication.config.presets import load_with_preset

        config = load_with_preset(args.config, overrides_from_args(args))
        refuse_unread_options(args)
        tools = _read_schemas(args.tools) if args.tools else None
        is_training = bool(args.config or args.set)
        inspected = _inspect_site(config, run_dir, args.site, tools=tools, is_training=is_training)
    view, left_out = inspected.view, _explain_left_out(inspected.left_out, config)
    if args.json:
        from composer_replication.canonical_json import encode_as_written

        record = {**view.as_json(), "left_out": left_out}
        record |= {} if inspected.proof is None else {"proof": asdict(inspected.proof)}
        write_json(encode_as_written(record, where=f"site {view.site.id}").decode())
        return 0
    sys.stdout.write(_page(args, config, inspected, left_out))
    return 0


def _page(args: argparse.Namespace, config: CrfConfig, inspected: _Inspected, left_out: str) -> str:
    from composer_replication.cli.site_page import site_page

    of_tools = f"{inspected.num_tools} of {args.tools or inspected.format}" if inspected.num_tools else "none"
    return site_page(
        inspected.view,
        inspected.renderer,
        tokenizer=f"{config.train.model}, tools: {of_tools}",
        placement=config.train.batch.placement,
        left_out=left_out,
        proof=_describe_proof(inspected.proof),
        num_context=args.context,
        all_pairs=args.tokens,
        width=shutil.get_terminal_size((_WIDTH, 24)).columns,
        uses_color=_uses_color(args.color),
    )


def _describe_proof(proof: HintProof | None) -> str:
    if proof is None:
        return ""
    drops = [f"its own hint lowers the erring call by {proof.without_hint - proof.with_hint:.2f} nats/token"]
    if proof.with_other_hint is not None:
        drops.append(f"the hint for {proof.other_kind} by {proof.without_hint - proof.with_other_hint:.2f}")
    if proof.good_effect is not None:
        drops.append(f"its own hint lowers good calls by {-proof.good_effect:.2f}")
    what = f"{proof.num_tokens} tokens, {proof.basis}".replace("_", " ")
    return f"hint check of the last training: {proof.reason.replace('_', ' ')} ({what}): {', '.join(drops)}"


def _explain_left_out(reason: str, config: CrfConfig) -> str:
    from composer_replication.evaluation.report.records import MEANINGS

    budget = f"; it is {config.train.batch.window[0]:,}" if reason == "longer_than_window" else ""
    return f"{reason}: {MEANINGS[reason]}{budget}" if reason in MEANINGS else reason


def _uses_color(flag: bool | None) -> bool:
    """Return whether to use colors. Without a flag, colors are used on capable terminals unless NO_COLOR is set."""
    if flag is not None:
        return flag
    # NO_COLOR: https://no-color.org
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and is_terminal(sys.stdout)


class _Inspected(NamedTuple):
    """An error site rendered as rows of tokens, with the renderer and the remarks that the page shows."""

    view: SiteView
    renderer: Renderer
    format: str  # of the session's log, such as claude_code; it decides which tools are shown
    num_tools: int
    left_out: str  # why a training with this config drops the site; empty if it does not
    proof: HintProof | None  # from the last training, if the sites have not changed since


def _inspect_site(
    config: CrfConfig,
    run: RunDir,
    site_id: str,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    is_training: bool = True,
) -> _Inspected:
    """Render an error site as `crf train` with this config does. If `tools` is given, it replaces the run's tools.

    Only with `is_training` is it checked whether training would drop the site.
    """
    site, hint, conversation = read_site(run, site_id)
    if not config.train.model:
        expected = "the folder or hub name of the model to train, such as `--tokenizer qwen2.5/`"
        raise InputError(explain("--tokenizer", got="none", expected=expected))
    schemas = tools_of(run) if tools is None else list(tools)
    renderer = make_renderer(config.render, load_tokenizer(config.train.model), schemas)
    view = view_site(renderer, conversation, site, hint, placement=config.train.batch.placement)
    left_out = _why_left_out(config, renderer, conversation, site, hint) if is_training else ""
    num_tools = len(renderer.tools_for(conversation.format))
    proofs = read_hint_checks(run) if run.is_current("hint_proof") else []
    proof = next((candidate for candidate in proofs if candidate.site_id == site.id), None)
    return _Inspected(view, renderer, conversation.format, num_tools, left_out, proof)


def _read_schemas(name: str) -> list[dict[str, Any]]:
    """Read a list of tool schemas from a JSON file."""
    try:
        schemas: Any = json.loads(Path(name).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(explain(f"--tools {name}", got=error, expected="a JSON list of schemas")) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(explain(f"--tools {name}", got=error, expected="a text file")) from error
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in cast("list[object]", schemas)):
        raise InputError(explain(f"--tools {name}", got="other JSON", expected="a list of JSON objects"))
    return cast("list[dict[str, Any]]", schemas)


def _why_left_out(
    config: CrfConfig, renderer: Renderer, conversation: Conversation, site: ErrorSite, hint: Hint | None
) -> str:
    """Return why training drops the site, or an empty string if training keeps it.

    The result is also empty for a site without a hint, because the page shows that there is none.
    """
    if hint is None or not site.is_kept:
        return ""
    if config.loss.alpha_sdpo == 0:
        return "loss.alpha_sdpo is 0"
    return why_site_is_left_out(config, renderer, LoggedSession(conversation=conversation, sites=[(site, hint)]))
