"""`crf doctor`: what this machine has and lacks for the work, each line with what to do."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from composer_replication.cli.console import log, plain, print_json
from composer_replication.errors import ComposerError
from composer_replication.optional import available
from composer_replication.trainer.trained import absolute_base
from composer_replication.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="look at this model's tokenizer and template, too")
    parser.add_argument(
        "--run", metavar="RUN", dest="run_dir", help="look at the disk of this folder; default: this one"
    )
    parser.add_argument("--base-url", metavar="URL", help="ask this OpenAI-compatible endpoint for its models")
    parser.add_argument("--api-key-env", metavar="NAME", help="the variable that holds the endpoint's key")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")


def run(args: argparse.Namespace) -> int:
    folder = None if args.run_dir is None else Path(args.run_dir)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries say while loading is not our output
        lines = list(examine(model=args.model, folder=folder, base_url=args.base_url, api_key_env=args.api_key_env))
    number = {status: sum(line.status == status for line in lines) for status in ("ok", "warn", "fail")}
    if args.json:
        print_json({"lines": [line._asdict() for line in lines], **number})
    else:
        width = max(len(line.name) for line in lines)
        for line in lines:
            print(plain(f"{line.status:<4}  {line.name:<{width}}  {line.found}"))
            if line.fix:
                print(plain(f"{'':<6}{'':<{width}}  -> {line.fix}"))
        log(f"{number['ok']} ok, {number['warn']} warnings, {number['fail']} failures")
    return 1 if number["fail"] else 0


# What a machine has and lacks for each part of the work: one line a question, with what to do.
#
# Nothing is downloaded and no weights are loaded. The hub is asked whether it answers, an endpoint if one is named.

Status = Literal["ok", "warn", "fail"]
GIB = 2**30
_PACKAGE = "composer-replication"
_LEAST_DISK, _LEAST_MEMORY = 5 * GIB, 4 * GIB
# What a verb cannot do without, then what makes it quicker or prettier.
_EXTRAS = {
    "train": "crf train, run, evaluate, and adapters in export and chat",
    "replay": "crf teachers and crf replay",
    "report": "crf report",
    "privacy": "crf ingest --kingfisher",
}
_ALONE = (
    ("vllm", "quick sampling and serving"),
    ("bitsandbytes", "training on weights in 4 bits (qlora)"),
    ("trackio", 'train.report_to = "trackio"'),
    ("wandb", 'train.report_to = "wandb"'),
)
_ON_THE_HUB = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
_NEEDED = ("torch", "transformers", "safetensors", "orjson", "rich")


class _CheckLine(NamedTuple):
    """An answer: what was looked at, how it is, and what to do about it (empty where nothing has to be)."""

    name: str
    status: Status
    found: str
    fix: str = ""


def examine(
    *, model: str | None = None, folder: Path | None = None, base_url: str | None = None, api_key_env: str | None = None
) -> Iterator[_CheckLine]:
    """Every line, in the order of the pipeline; what needs a name that is not given is left out."""
    yield _python()
    yield from _packages()
    yield from _extras()
    yield from _devices()
    yield _memory()
    yield _disk(folder or Path.cwd())
    yield _sandbox()
    yield _hub(os.environ)
    if model is not None:
        yield from _model(absolute_base(model))
    if base_url is not None:
        yield _endpoint(base_url, api_key_env)


def _python() -> _CheckLine:
    version = ".".join(map(str, sys.version_info[:3]))
    return _CheckLine("python", "ok", f"{version}, composer-replication {__version__} in {sys.prefix}")


def _packages() -> Iterator[_CheckLine]:
    for name in _NEEDED:
        version = _version(name)
        fix = "" if version else f"Type: {install_line(name)}"
        yield _CheckLine(name, "ok" if version else "fail", version or "not installed", fix)


def _extras() -> Iterator[_CheckLine]:
    for extra, purpose in _EXTRAS.items():
        if requirements := _declared(extra):
            yield _extra(extra, requirements, f"For {purpose}, type: {install_line(extra=extra)}")
    there = [name for name, _ in _ALONE if available(name)]
    absent = [f"{name} ({purpose})" for name, purpose in _ALONE if name not in there]
    summary = f"installed: {', '.join(there) or 'none'}" + (
        f"; not needed by default: {', '.join(absent)}" if absent else ""
    )
    yield _CheckLine("on request", "ok", summary)


def install_line(*packages: str, extra: str | None = None) -> str:
    """What installs these, or an extra of ours, into this environment: from where this package was installed from."""
    where = _installed_from()
    names = [*packages, *([] if extra is None else [f"{where}[{extra}]"])]
    return shlex.join([sys.executable, "-m", "pip", "install", *names])


def _installed_from() -> str:
    """The folder of the sources, where pip noted one; else the name of the package."""
    try:
        noted = importlib.metadata.distribution(_PACKAGE).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        noted = None
    url = urlsplit(json.loads(noted).get("url", "")) if noted else None
    return url2pathname(url.path) if url is not None and url.scheme == "file" else _PACKAGE


def _extra(extra: str, requirements: Sequence[Requirement], fix: str) -> _CheckLine:
    versions = {requirement.name: _version(requirement.name) for requirement in requirements}
    missing = [f"no {name}" for name, version in versions.items() if version is None]
    mismatched = [
        f"{requirement.name} {versions[requirement.name]}, expected {requirement.specifier}"
        for requirement in requirements
        if (version := versions[requirement.name]) is not None
        and not requirement.specifier.contains(version, prereleases=True)
    ]
    if missing or mismatched:
        return _CheckLine(f"extra {extra}", "warn", ", ".join([*missing, *mismatched]), fix)
    return _CheckLine(f"extra {extra}", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _declared(extra: str) -> list[Requirement]:
    """What the installed package says that an extra needs."""
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree alone
        return []
    every = [Requirement(text) for text in texts]
    return [
        requirement for requirement in every if requirement.marker and requirement.marker.evaluate({"extra": extra})
    ]


def _devices() -> Iterator[_CheckLine]:
    if not available("torch"):
        return
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, and sees no GPU" if built else "torch is built for the CPU"
        fix = "A CPU trains the embedded student in minutes and 0.5B in hours; larger models need a GPU"
        yield _CheckLine("gpu", "warn", f"none: {why}", fix)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
        facts = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, {bf16}"
        is_busy = free < total / 2
        yield _CheckLine(
            f"gpu {index}", "warn" if is_busy else "ok", facts, "Another program holds most of it" if is_busy else ""
        )


def _memory() -> _CheckLine:
    if not available("torch"):
        return _CheckLine("memory", "warn", "not looked at: torch is not there")
    from composer_replication.trainer.watch.memory_plan import free_memory

    free = free_memory()
    fix = (
        ""
        if free >= _LEAST_MEMORY
        else "Close other programs, or take a smaller model: `crf train --dry-run` counts what a step needs"
    )
    return _CheckLine("memory", "warn" if fix else "ok", f"{free / GIB:.1f} GiB can be had", fix)


def _disk(folder: Path) -> _CheckLine:
    disk_folder = next(candidate for candidate in (folder.absolute(), *folder.absolute().parents) if candidate.exists())
    free, name = shutil.disk_usage(disk_folder).free, f"disk at {disk_folder}"
    if not os.access(disk_folder, os.W_OK):
        return _CheckLine(name, "fail", "cannot be written to", "Take another folder, or look at whose it is")
    fix = (
        ""
        if free >= _LEAST_DISK
        else "Checkpoints and merged weights take as much as the model, several times: make room"
    )
    return _CheckLine(name, "warn" if fix else "ok", f"{free / GIB:.1f} GiB free", fix)


def _sandbox() -> _CheckLine:
    from composer_replication.envs.workspace.sandbox import shared_runner
    from composer_replication.errors import SandboxError

    try:
        kind = shared_runner().kind
    except SandboxError as error:
        return _CheckLine(
            "sandbox", "warn", _first_line(error), "Only `crf world` and `crf demo` need it: they run generated tests"
        )
    fix = "Tests of the small world run with limits alone; do not give it strangers' code" if kind == "rlimits" else ""
    return _CheckLine("sandbox", "warn" if fix else "ok", f"tests of the small world run behind: {kind}", fix)


def _hub(environment: Mapping[str, str]) -> _CheckLine:
    """Whether a model that is no folder and not in the cache could be had: the hub is asked for one that it has."""
    from composer_replication.batch.model_folder import not_on_hub

    token = "a token is set" if environment.get("HF_TOKEN") else "no HF_TOKEN"
    if not (reason := not_on_hub(_ON_THE_HUB)):
        return _CheckLine("hub", "ok", f"it answers: models are downloaded when they are named; {token}")
    fix = "Models have to be folders, in the cache, or `student`, which comes with the package"
    is_offline = environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    fix += "; unset HF_HUB_OFFLINE to download" if is_offline else ""
    return _CheckLine("hub", "warn", f"{reason}; {token}", fix)


def _model(name: str) -> Iterator[_CheckLine]:
    """Tokenizer and template, as training and chat will use them; of the weights only whether they are there."""
    from composer_replication.batch.model_folder import load_config, load_tokenizer
    from composer_replication.config import CrfConfig
    from composer_replication.trainer.from_config.inputs import max_context

    try:
        tokenizer = load_tokenizer(name)
        config: Any = load_config(name, what=f"model {name!r}")
    except ComposerError as error:
        yield _CheckLine(
            "model",
            "fail",
            _first_line(error),
            "Name a folder with config.json, tokenizer.json and weights, or a hub name",
        )
        return
    text, learnt = config.get_text_config(), max_context(name, tokenizer)
    window, _ = CrfConfig().train.batch.fitted(learnt).window
    context_note = (
        f"has learnt contexts of up to {learnt:,} tokens" if learnt else "does not say how long its contexts may be"
    )
    yield _CheckLine(
        "model", "ok", f"{config.model_type}, {text.vocab_size:,} words, {context_note}: windows of {window:,}"
    )
    yield _CheckLine("tokenizer", "ok", f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens")
    yield _template(tokenizer)
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        yield _CheckLine(
            "weights", "fail", f"no .safetensors in {name}", "Pickled weights are not read: convert them first"
        )


def _template(tokenizer: Any) -> _CheckLine:
    """Whether a conversation with a call can be rendered with every turn found again."""
    from composer_replication.batch.render.renderer import Renderer

    fix = "Set render.chat_template to a file with a Jinja template that knows tools"
    try:
        renderer = Renderer(tokenizer, tools=[_TOOL])
    except ComposerError as error:
        return _CheckLine("template", "fail", _first_line(error), fix)
    dialect = renderer.dialect
    if not dialect.tools:
        return _CheckLine("template", "warn", "it shows no tools: calls are written as text", fix)
    return _CheckLine(
        "template", "ok", f"shows tools and calls; a turn ends with {', '.join(map(repr, dialect.stops))}"
    )


_TOOL = {
    "type": "function",
    "function": {
        "name": "Read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def _endpoint(base_url: str, api_key_env: str | None) -> _CheckLine:
    import asyncio

    from composer_replication.teacher_replay.prices import list_models

    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        return _CheckLine(
            "endpoint", "fail", f"{api_key_env} is not set", f"export {api_key_env}=... before the command"
        )
    try:
        listed = asyncio.run(list_models(base_url, key))
    except ComposerError as error:
        return _CheckLine("endpoint", "fail", _first_line(error), "Look at the address, and whether it ends in /v1")
    return _CheckLine("endpoint", "ok", f"{base_url} answers with {len(listed)} models")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
