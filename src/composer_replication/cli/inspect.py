"""`crf inspect RUN SITE_ID`: the erring turn as training sees it, token by token, so that a mask can be checked."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.console import is_terminal

if TYPE_CHECKING:
    from composer_replication.batch.render import Renderer
    from composer_replication.config import CrfConfig
    from composer_replication.runs import RunDir
    from composer_replication.types import Conversation, ErrorSite, Hint

HELP = "show which tokens of a site are trained, the hint, and the rows that predict the same token"
_PLACEMENTS = ("before_turn", "in_last_message", "head")
_MAX_NEAR = 3
_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with sites in it")
    parser.add_argument("site", metavar="SITE_ID", help="the id of a site, or its first characters (`crf sites RUN`)")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="the model whose tokens to show: a folder or a model's name"
    )
    parser.add_argument("--config", metavar="FILE", help="show what `crf train` with this config trains")
    parser.add_argument(
        "--set",
        action="append",
        metavar="A.B=C",
        help="an option over the config's, as for `crf train`; may be repeated",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="use this template instead of the tokenizer's")
    parser.add_argument("--tools", metavar="FILE", help="a JSON list of schemas to show instead of the run's tools")
    parser.add_argument("--placement", choices=_PLACEMENTS, help="where the hint goes; default before_turn")
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
    site, hint, conversation = _read(run_dir, args.site)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries say while loading is not our output
        config = _config(args)
        tokenizer, renderer = _renderer(args, config, run_dir, conversation)
        placement = args.placement or config.train.batch.placement
        from composer_replication.batch.site_view import view_site

        view = view_site(renderer, conversation, site, hint, placement=placement)
        left_out = _why_left_out(config, renderer, conversation, site, hint) if args.config or args.set else ""
    if args.json:
        from composer_replication.canonical_json import encode_as_written
        from composer_replication.cli.console import write_json

        found = {**view.as_json(), "left_out": left_out}
        write_json(encode_as_written(found, where=f"site {site.id}").decode())
        return 0
    from composer_replication.cli.site_page import site_page

    sys.stdout.write(
        site_page(
            view,
            renderer,
            tokenizer=tokenizer,
            asked=placement,
            left_out=left_out,
            num_context=args.context,
            all_pairs=args.tokens,
            width=shutil.get_terminal_size((_WIDTH, 24)).columns,
            is_colour=_is_colour(args.color),
        )
    )
    return 0


def _is_colour(asked: bool | None) -> bool:
    """As asked; otherwise on a terminal that can, unless the user wants none anywhere (no-color.org)."""
    if asked is not None:
        return asked
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and is_terminal(sys.stdout)


def _read(run_dir: RunDir, identity: str) -> tuple[ErrorSite, Hint | None, Conversation]:
    from composer_replication.errors import InputError, explain
    from composer_replication.hint_generator.run_sites import find_site
    from composer_replication.runs.conversations import read_conversations

    try:
        site, hint = find_site(run_dir, identity)
    except InputError as error:
        near = _near(run_dir, identity)
        raise InputError(f"{error}. Near it: {', '.join(near)}" if near else str(error)) from error
    found = next((each for each in read_conversations(run_dir) if each.id == site.conversation_id), None)
    if found is None:
        fix = "The conversations were written anew: run `crf sites RUN` again."
        expected = "one of this run"
        what = f"conversation of site {site.id}"
        raise InputError(explain(what, got=repr(site.conversation_id), expected=expected, fix=fix))
    return site, hint, found


def _near(run_dir: RunDir, identity: str) -> list[str]:
    """Ids that begin like the one asked for, or else those that look most like it."""
    from difflib import get_close_matches

    from composer_replication.hint_generator.run_sites import read_sites

    ids = list(dict.fromkeys(site.id for site, _ in read_sites(run_dir)))
    begin = [each for each in ids if identity and each.startswith(identity)]
    return begin[:_MAX_NEAR] or get_close_matches(identity, ids, n=_MAX_NEAR)


def _config(args: argparse.Namespace) -> CrfConfig:
    from composer_replication.config import CrfConfig

    if not (args.config or args.set):
        return CrfConfig()
    from composer_replication.trainer.presets import load_with_preset

    return load_with_preset(args.config, args.set or ())


def _why_left_out(
    config: CrfConfig, renderer: Renderer, conversation: Conversation, site: ErrorSite, hint: Hint | None
) -> str:
    """Why a training with this config does not teach a site that has a hint; empty where it does."""
    if hint is None or not site.is_kept:
        return ""  # the page says so anyway
    if config.loss.alpha_sdpo == 0:
        return "loss.alpha_sdpo is 0"
    from composer_replication.cli.count_words import MEANINGS
    from composer_replication.sessions.dataset import LoggedSession
    from composer_replication.trainer.from_config.offline import why_not_taught

    reason = why_not_taught(config, renderer, LoggedSession(conversation=conversation, sites=[(site, hint)]))
    budget = f"; it is {config.train.batch.budget:,}" if reason == "longer_than_window" else ""
    return f"{reason}: {MEANINGS[reason]}{budget}" if reason in MEANINGS else reason


def _renderer(
    args: argparse.Namespace, config: CrfConfig, run_dir: RunDir, conversation: Conversation
) -> tuple[str, Renderer]:
    """The tokenizer's name with the session's tools, and the renderer that `crf train` would make of the run."""
    from composer_replication.errors import InputError, explain

    name = args.tokenizer or config.train.model
    if not name:
        expected = "the folder or the name of the model that is to be trained, such as `--tokenizer qwen2.5/`"
        raise InputError(explain("--tokenizer", got="none", expected=expected))
    template = _text(args.chat_template, "--chat-template") if args.chat_template else None
    from composer_replication.batch.load_tokenizer import load_tokenizer
    from composer_replication.trainer.from_config.renderer import make_renderer, tools_of

    tools = _schemas(args.tools) if args.tools else tools_of(run_dir)
    renderer = make_renderer(config.render, load_tokenizer(name), tools, template=template)
    num_tools = len(renderer.tools_for(conversation.format))
    shown = f"{num_tools} of {args.tools or conversation.format}" if num_tools else "none"
    return f"{name}, tools: {shown}", renderer


def _schemas(name: str) -> list[dict[str, Any]]:
    import json

    from composer_replication.errors import InputError, explain

    try:
        found = json.loads(_text(name, "--tools"))
    except json.JSONDecodeError as error:
        raise InputError(explain(f"--tools {name}", got=error, expected="a JSON list of schemas")) from error
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise InputError(explain(f"--tools {name}", got="other JSON", expected="a list of schemas, each an object"))
    return found


def _text(name: str, option: str) -> str:
    from composer_replication.errors import InputError, explain

    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(explain(f"{option} {name}", got=error, expected="a text file")) from error
