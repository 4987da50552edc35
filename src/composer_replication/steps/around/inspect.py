"""`crf inspect`: one site as a training would read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.site_view import SiteView, view_site
from composer_replication.config import CrfConfig
from composer_replication.errors import InputError, explain
from composer_replication.objective.hint_proof import HintProof
from composer_replication.runs import RunDir
from composer_replication.runs.sites import read_site
from composer_replication.sessions.proof import read_proofs
from composer_replication.sessions.read_run import LoggedSession
from composer_replication.trainer.from_config.offline import why_not_taught
from composer_replication.trainer.from_config.renderer import make_renderer, tools_of
from composer_replication.types import Conversation, ErrorSite, Hint


class Inspected(NamedTuple):
    """A site as rows of tokens, and what rendered it. `num_tools` are those of the session's agent, which `format`
    names.

    `left_out` is the reason for which a training with this config does not teach it; empty where it does. `proof` is
    that of the run's last training, where there was one since the sites were found.
    """

    view: SiteView
    renderer: Renderer
    format: str
    num_tools: int
    left_out: str
    proof: HintProof | None


def inspect_site(
    config: CrfConfig,
    run: RunDir,
    identity: str,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    is_training: bool = True,
) -> Inspected:
    """The site's tokens, as `crf train` with this config makes them. `tools` are shown instead of the run's.

    Without a training in mind nothing is left out.
    """
    site, hint, conversation = read_site(run, identity)
    if not config.train.model:
        expected = "the folder or the name of the model that is to be trained, such as `--tokenizer qwen2.5/`"
        raise InputError(explain("--tokenizer", got="none", expected=expected))
    schemas = tools_of(run) if tools is None else list(tools)
    renderer = make_renderer(config.render, load_tokenizer(config.train.model), schemas)
    view = view_site(renderer, conversation, site, hint, placement=config.train.batch.placement)
    left_out = _why_left_out(config, renderer, conversation, site, hint) if is_training else ""
    num_tools = len(renderer.tools_for(conversation.format))
    proofs = read_proofs(run) if run.is_current("hint_proof") else []
    proof = next((candidate for candidate in proofs if candidate.site_id == site.id), None)
    return Inspected(view, renderer, conversation.format, num_tools, left_out, proof)


def read_schemas(name: str) -> list[dict[str, Any]]:
    """The list of tool schemas in a JSON file."""
    try:
        schemas: Any = json.loads(Path(name).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(explain(f"--tools {name}", got=error, expected="a JSON list of schemas")) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(explain(f"--tools {name}", got=error, expected="a text file")) from error
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in cast("list[object]", schemas)):
        raise InputError(explain(f"--tools {name}", got="other JSON", expected="a list of schemas, each an object"))
    return cast("list[dict[str, Any]]", schemas)


def _why_left_out(
    config: CrfConfig, renderer: Renderer, conversation: Conversation, site: ErrorSite, hint: Hint | None
) -> str:
    """As a training counts it; empty also for a site that has no hint, which the view itself tells."""
    if hint is None or not site.is_kept:
        return ""
    if config.loss.alpha_sdpo == 0:
        return "loss.alpha_sdpo is 0"
    return why_not_taught(config, renderer, LoggedSession(conversation=conversation, sites=[(site, hint)]))
