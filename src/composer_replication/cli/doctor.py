"""`crf doctor`: check what this machine has and lacks, and print one line per check, with advice.

The checks download nothing and load no weights. They only test whether the hub, and the endpoint if one is given, can
be reached.
"""

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
from composer_replication.trainer.trained import resolve_base
from composer_replication.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="also check this model's tokenizer and template")
    parser.add_argument(
        "--run", metavar="RUN", dest="run_dir", help="check the disk of this folder; default: the current one"
    )
    parser.add_argument("--base-url", metavar="URL", help="ask this OpenAI-compatible endpoint for its models")
    parser.add_argument("--api-key-env", metavar="NAME", help="the variable that holds the endpoint's key")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")


def run(args: argparse.Namespace) -> int:
    folder = None if args.run_dir is None else Path(args.run_dir)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print while loading
        lines = list(_run_checks(model=args.model, folder=folder, base_url=args.base_url, api_key_env=args.api_key_env))
    counts = {status: sum(line.status == status for line in lines) for status in ("ok", "warn", "fail")}
    if args.json:
        print_json({"lines": [line._asdict() for line in lines], **counts})
    else:
        width = max(len(line.name) for line in lines)
        for line in lines:
            print(plain(f"{line.status:<4}  {line.name:<{width}}  {line.found}"))
            if line.fix:
                print(plain(f"{'':<6}{'':<{width}}  -> {line.fix}"))
        log(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures")
    return 1 if counts["fail"] else 0


_Status = Literal["ok", "warn", "fail"]
_GIB = 2**30
_PACKAGE = "composer-replication"
_MIN_DISK_BYTES, _MIN_MEMORY_BYTES = 5 * _GIB, 4 * _GIB
# The extras of this package, and the verbs that need them.
_EXTRAS = {
    "train": "crf train, run, evaluate, and adapters in export and chat",
    "replay": "crf teachers and crf replay",
    "report": "crf report",
    "privacy": "crf ingest --kingfisher",
}
# Packages that no extra installs: each makes something faster, or is needed for one option.
_OPTIONAL_PACKAGES = (
    ("vllm", "quick sampling and serving"),
    ("bitsandbytes", "training on weights in 4 bits (qlora)"),
    ("trackio", 'train.report_to = "trackio"'),
    ("wandb", 'train.report_to = "wandb"'),
)
_MODEL_ON_HUB = "Qwen/Qwen2.5-Coder-0.5B-Instruct"  # any public model, to see whether the hub answers
_REQUIRED_PACKAGES = ("torch", "transformers", "safetensors", "orjson", "rich")


class _CheckLine(NamedTuple):
    """The outcome of a check. The field names are those of `--json`; `fix` is empty if nothing needs to be done."""

    name: str
    status: _Status
    found: str
    fix: str = ""


def _run_checks(
    *, model: str | None = None, folder: Path | None = None, base_url: str | None = None, api_key_env: str | None = None
) -> Iterator[_CheckLine]:
    """Yield the outcome of every check. Model and endpoint are checked only if they are given."""
    yield _check_python()
    yield from _check_packages()
    yield from _check_extras()
    yield from _check_gpus()
    yield _check_memory()
    yield _check_disk(folder or Path.cwd())
    yield _check_sandbox()
    yield _check_hub(os.environ)
    if model is not None:
        yield from _check_model(resolve_base(model))
    if base_url is not None:
        yield _check_endpoint(base_url, api_key_env)


def _check_python() -> _CheckLine:
    version = ".".join(map(str, sys.version_info[:3]))
    return _CheckLine("python", "ok", f"{version}, composer-replication {__version__} in {sys.prefix}")


def _check_packages() -> Iterator[_CheckLine]:
    for name in _REQUIRED_PACKAGES:
        version = _installed_version(name)
        fix = "" if version else f"Type: {_install_line(name)}"
        yield _CheckLine(name, "ok" if version else "fail", version or "not installed", fix)


def _check_extras() -> Iterator[_CheckLine]:
    for extra, purpose in _EXTRAS.items():
        if requirements := _extra_requirements(extra):
            yield _check_extra(extra, requirements, f"For {purpose}, type: {_install_line(extra=extra)}")
    installed = [name for name, _ in _OPTIONAL_PACKAGES if available(name)]
    absent = [f"{name} ({purpose})" for name, purpose in _OPTIONAL_PACKAGES if name not in installed]
    summary = f"installed: {', '.join(installed) or 'none'}" + (
        f"; not needed by default: {', '.join(absent)}" if absent else ""
    )
    yield _CheckLine("on request", "ok", summary)


def _install_line(*packages: str, extra: str | None = None) -> str:
    """Return the pip command that installs packages, or an extra of this package, into the current environment."""
    where = _install_source()
    names = [*packages, *([] if extra is None else [f"{where}[{extra}]"])]
    return shlex.join([sys.executable, "-m", "pip", "install", *names])


def _install_source() -> str:
    """Return the source folder from which this package was installed, or its name if it came from a package index."""
    try:
        # pip writes direct_url.json (PEP 610) for an installation from a folder or URL.
        direct_url = importlib.metadata.distribution(_PACKAGE).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        direct_url = None
    url = urlsplit(json.loads(direct_url).get("url", "")) if direct_url else None
    return url2pathname(url.path) if url is not None and url.scheme == "file" else _PACKAGE


def _check_extra(extra: str, requirements: Sequence[Requirement], fix: str) -> _CheckLine:
    versions = {requirement.name: _installed_version(requirement.name) for requirement in requirements}
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


def _extra_requirements(extra: str) -> list[Requirement]:
    """Return the requirements of an extra, from the metadata of the installed package."""
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree without installing it
        return []
    all_requirements = [Requirement(text) for text in texts]
    return [
        requirement
        for requirement in all_requirements
        if requirement.marker and requirement.marker.evaluate({"extra": extra})
    ]


def _check_gpus() -> Iterator[_CheckLine]:
    if not available("torch"):
        return
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} but finds no GPU" if built else "torch is built for the CPU"
        fix = "A CPU trains the embedded student in minutes and a 0.5B model in hours; larger models need a GPU"
        yield _CheckLine("gpu", "warn", f"none: {why}", fix)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
        facts = f"{torch.cuda.get_device_name(index)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free, {bf16}"
        is_busy = free < total / 2
        yield _CheckLine(
            f"gpu {index}",
            "warn" if is_busy else "ok",
            facts,
            "Another program uses most of its memory" if is_busy else "",
        )


def _check_memory() -> _CheckLine:
    if not available("torch"):
        return _CheckLine("memory", "warn", "not checked: torch is not installed")
    from composer_replication.trainer.watch.memory_plan import free_memory

    free = free_memory()
    fix = (
        ""
        if free >= _MIN_MEMORY_BYTES
        else "Close other programs, or use a smaller model: `crf train --dry-run` shows what a step needs"
    )
    return _CheckLine("memory", "warn" if fix else "ok", f"{free / _GIB:.1f} GiB available", fix)


def _check_disk(folder: Path) -> _CheckLine:
    disk_folder = next(candidate for candidate in (folder.absolute(), *folder.absolute().parents) if candidate.exists())
    free, name = shutil.disk_usage(disk_folder).free, f"disk at {disk_folder}"
    if not os.access(disk_folder, os.W_OK):
        return _CheckLine(name, "fail", "is not writable", "Choose another folder, or check its owner and permissions")
    fix = (
        ""
        if free >= _MIN_DISK_BYTES
        else "Checkpoints and merged weights take several times the size of the model: free some space"
    )
    return _CheckLine(name, "warn" if fix else "ok", f"{free / _GIB:.1f} GiB free", fix)


def _check_sandbox() -> _CheckLine:
    from composer_replication.envs.workspace.sandbox import shared_runner
    from composer_replication.errors import SandboxError

    try:
        kind = shared_runner().kind
    except SandboxError as error:
        return _CheckLine(
            "sandbox", "warn", _first_line(error), "Only `crf world` and `crf demo` need it, to run generated tests"
        )
    fix = "Tests in the toy environment run without isolation; do not use untrusted code" if kind == "rlimits" else ""
    return _CheckLine("sandbox", "warn" if fix else "ok", f"tests in the toy environment are isolated by: {kind}", fix)


def _check_hub(environment: Mapping[str, str]) -> _CheckLine:
    """Check whether models can be downloaded, by asking the hub for a model that exists."""
    from composer_replication.batch.model_folder import hub_absence_reason

    token = "a token is set" if environment.get("HF_TOKEN") else "no HF_TOKEN"
    if not (reason := hub_absence_reason(_MODEL_ON_HUB)):
        return _CheckLine("hub", "ok", f"reachable: models are downloaded on demand; {token}")
    fix = "Use models in folders or in the cache, or `student`, which comes with the package"
    is_offline = environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    fix += "; unset HF_HUB_OFFLINE to download" if is_offline else ""
    return _CheckLine("hub", "warn", f"{reason}; {token}", fix)


def _check_model(name: str) -> Iterator[_CheckLine]:
    """Check the tokenizer and the template in the way training and chat use them, and whether the weights exist."""
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
    window, _ = CrfConfig().train.batch.fit_to_context(learnt).window
    context_note = (
        f"was trained on contexts of up to {learnt:,} tokens" if learnt else "does not state its maximum context"
    )
    yield _CheckLine(
        "model", "ok", f"{config.model_type}, vocabulary of {text.vocab_size:,}, {context_note}: windows of {window:,}"
    )
    yield _CheckLine("tokenizer", "ok", f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens")
    yield _check_template(tokenizer)
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        yield _CheckLine(
            "weights", "fail", f"no .safetensors in {name}", "Pickled weights are not supported: convert them first"
        )


def _check_template(tokenizer: Any) -> _CheckLine:
    """Check that the template can render a tool call, and that every turn can be located in the rendered text."""
    from composer_replication.batch.render.renderer import Renderer

    fix = "Set render.chat_template to a file with a Jinja template that supports tools"
    try:
        renderer = Renderer(tokenizer, tools=[_TOOL])
    except ComposerError as error:
        return _CheckLine("template", "fail", _first_line(error), fix)
    dialect = renderer.dialect
    if not dialect.tools:
        return _CheckLine("template", "warn", "does not support tools: calls are written as text", fix)
    return _CheckLine(
        "template", "ok", f"supports tools and calls; a turn ends with {', '.join(map(repr, dialect.stops))}"
    )


_TOOL = {
    "type": "function",
    "function": {
        "name": "Read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def _check_endpoint(base_url: str, api_key_env: str | None) -> _CheckLine:
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
        return _CheckLine("endpoint", "fail", _first_line(error), "Check the address, and whether it ends in /v1")
    return _CheckLine("endpoint", "ok", f"{base_url} answers with {len(listed)} models")


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
