"""Export weights for other programs: `crf export RUN --to DIR`.

    merged/    the initial model and the adapter merged into one model and compared with the adapter; a model card
    adapter/   the adapter itself
    ollama/    a Modelfile; model.gguf if llama.cpp's converter is installed
    vllm/      serve.sh
    DATA.md    what the weights were trained on

With `push`, the merged weights are sent to the Hugging Face hub.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from composer_replication.atomic import atomic_write_text, staged_path
from composer_replication.batch.model_folder import load_adapter, load_config, load_model, load_tokenizer
from composer_replication.errors import InputError, RunError, explain
from composer_replication.optional import require
from composer_replication.runs import RunDir
from composer_replication.runs.directory import record_outside_copy, require_empty_folder
from composer_replication.runs.files import hash_weight_files, read_evaluation
from composer_replication.runs.lineage import RECORD
from composer_replication.trainer.trained import Trained, data_card, trained_weights

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """An export: its folder, how close the merged weights are to the adapter, and the files for other programs."""

    folder: Path
    check: _MergeCheck
    formats: tuple[ExportFormat, ...]
    pushed: str | None = None  # the address on the hub


def export_weights(
    name: str,
    folder: Path,
    *,
    adapter: str | None = None,
    precision: Precision = "auto",
    push: str | None = None,
    is_public: bool = False,
    api: Any = None,
    environment: Mapping[str, str] = os.environ,
) -> ExportedWeights:
    """Export trained weights to a new folder, which appears complete or not at all.

    Args:
        name: A run with trained weights, or a folder of weights.
        folder: The new folder.
        adapter: An adapter to use instead of the run's own.
        precision: The precision of the merged weights.
        push: A repository on the hub to which the merged weights and their card are uploaded.
        is_public: Allow a public repository.
        api: Replaces `huggingface_hub.HfApi` in tests.
        environment: The environment variables that say where llama.cpp's converter is.
    """
    require_empty_folder(folder)
    if push is not None:
        _check_repository(push)
    trained = trained_weights(name, adapter)

    folder.parent.mkdir(parents=True, exist_ok=True)
    if trained.run is not None:
        record_outside_copy(trained.run, "exported weights", folder)
    with staged_path(folder) as unfinished:
        check = _merge_adapter(trained, unfinished / "merged", precision=precision)
        exports = _write_formats(trained, unfinished, precision=check.precision, environment=environment)
        _write_cards(trained, unfinished, folder, public_name=push)
        if folder.exists():  # it is empty, or `require_empty_folder` would have raised
            folder.rmdir()
    exports = tuple(
        export._replace(path=export.path and folder / export.path.relative_to(unfinished)) for export in exports
    )
    address = None if push is None else _push_folder(folder / "merged", push, is_public=is_public, api=api)
    return ExportedWeights(folder=folder, check=check, formats=exports, pushed=address)


def _write_formats(
    trained: Trained, unfinished: Path, *, precision: str, environment: Mapping[str, str]
) -> tuple[ExportFormat, ...]:
    from composer_replication.trainer.trained import make_base_absolute

    merged = unfinished / "merged"
    tokenizer, config = load_tokenizer(str(merged)), load_config(str(merged), what=f"merged weights {merged}")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name in ("ollama", "vllm"):
        (unfinished / name).mkdir()
    if trained.adapter is not None:
        shutil.copytree(
            trained.adapter, unfinished / "adapter", ignore=shutil.ignore_patterns("README.md", "*.bin", "*.pt")
        )
        make_base_absolute(unfinished / "adapter")
    gguf = _write_gguf(merged, unfinished / "ollama" / "model.gguf", precision=precision, environment=environment)
    weights = "./model.gguf" if gguf.path is not None else "../merged"
    ollama = _write_ollama(unfinished / "ollama", tokenizer, weights=weights, max_length=longest)
    return gguf, ollama, _write_vllm(unfinished / "vllm", max_length=longest)


def _write_cards(trained: Trained, unfinished: Path, folder: Path, *, public_name: str | None) -> None:
    """Write a card for each set of weights. The card of pushed weights contains no local path."""
    from composer_replication.trainer.trained import model_card

    run, evaluation = trained.run, _evaluation_of(trained)
    is_public, merged_name = public_name is not None, public_name or str(folder.absolute() / "merged")
    card = model_card(trained, form="merged", name=merged_name, evaluation=evaluation, is_public=is_public)
    atomic_write_text(unfinished / "merged" / "README.md", card)
    if trained.adapter is not None:
        name = str(folder.absolute() / "adapter")
        card = model_card(trained, form="adapter", name=name, evaluation=evaluation)
        atomic_write_text(unfinished / "adapter" / "README.md", card)
    if run is not None:
        atomic_write_text(unfinished / "DATA.md", _run_card(run))


# ---- Pushing to the hub: private unless --public is given, and never data

# "ada/small-model" matches; not "small-model", "ada/models/small" or "-ada/small"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PUSHED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md")


def _check_repository(name: str) -> None:
    """Raise InputError unless the name has the form owner/name. Called before merging, which takes minutes."""
    if _REPOSITORY.fullmatch(name) is None:
        fix = "Write your user name or organization, a slash, and the name of the repository."
        raise InputError(explain("--push", got=repr(name), expected="owner/name", fix=fix))


def _push_folder(folder: Path, repository: str, *, is_public: bool = False, api: Any = None) -> str:
    """Upload a folder of weights to the hub and return its address. `api` replaces `huggingface_hub.HfApi` in tests."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] (of whichever HTTP library this version is built on)
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    hub = HfApi() if api is None else api
    _check_repository(repository)
    try:
        hub.create_repo(repo_id=repository, repo_type="model", private=not is_public, exist_ok=True)
        if not is_public and hub.repo_info(repo_id=repository, repo_type="model").private is not True:
            # With exist_ok, an existing repository keeps its visibility.
            raise _refuse_public(repository)
        commit = hub.upload_folder(
            folder_path=str(folder),
            repo_id=repository,
            repo_type="model",
            commit_message="Weights made by composer-replication",
            allow_patterns=list(_PUSHED_FILES),
        )
    except OfflineModeIsEnabled as error:
        raise _push_error(repository, error, "HF_HUB_OFFLINE is set: unset it to upload.") from error
    except LocalTokenNotFoundError as error:
        raise _push_error(repository, error, "Run `hf auth login`, or set HF_TOKEN to a write token.") from error
    except HfHubHTTPError as error:
        fix = "Check the name, and whether your token may write there (`hf auth whoami`)."
        raise _push_error(repository, error, fix) from error
    except ValueError as error:  # the client rejects the name or the address
        raise _push_error(repository, error, "Check the name and HF_ENDPOINT.") from error
    except (HTTPError, OSError) as error:
        raise _push_error(repository, error, "Check the network, then run the same command again.") from error
    return str(getattr(commit, "commit_url", None) or commit)


def _refuse_public(repository: str) -> RunError:
    fix = "Make it private on the hub, choose another one, or add --public to publish these weights."
    got = "an existing repository that is public"
    return RunError(explain(f"pushing to {repository}", got=got, expected="a private one", fix=fix))


def _push_error(repository: str, error: Exception, fix: str) -> RunError:
    lines = str(error).strip().splitlines()
    got = f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
    return RunError(explain(f"pushing to {repository}", got=got, expected="an upload that the hub accepts", fix=fix))


# ---- Merging an adapter into its initial model, and checking that the merged model behaves like the adapter
# The log-probs of a probe text are computed with the adapter, and again with the merged weights as read from disk.
# Merging rounds to the precision of the weights (bf16 keeps 8 bits). The rounding error is compared with the effect of
# the adapter: a merge that loses more than `_MAX_LOSS_SHARE` of the effect is refused.

Precision = Literal["auto", "float32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = ("auto", "float32", "bfloat16", "float16")
_PROBE = "def mean(values):\n    return sum(values) / len(values)\n\nRead tests/test_stats.py, then run the tests. "
_PROBE_TOKENS, _RANDOM_TOKENS = 192, 64
_MAX_LOSS_SHARE, _EXACT_NATS = 0.25, 1e-4
_COPIED_SUFFIXES = (".json", ".jinja", ".safetensors", ".txt", ".model")


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergeCheck:
    """The distance between the log-probs of the merged model and those of the adapter on a probe text, in nats.

    `difference` is this distance, and `effect` is the distance between the adapter and the initial model. Each is a
    root mean square over tokens, weighted by the probabilities of the vocabulary entries.
    """

    difference: float  # merged model to adapter
    effect: float  # adapter to initial model
    num_tokens: int
    precision: str
    why: str = ""  # why it is not the precision of the initial model

    @property
    def is_close(self) -> bool:
        return self.difference <= max(_EXACT_NATS, _MAX_LOSS_SHARE * self.effect)

    def __str__(self) -> str:
        lost = f", {self.difference / self.effect:.1%} of what the adapter changes" if self.effect else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.difference:.2g} nats from the adapter on its initial model{lost} ({self.precision}{why})"


def _merge_adapter(
    trained: Trained, folder: Path, *, precision: Precision = "auto", device: str = "cpu"
) -> _MergeCheck:
    """Merge the initial model and the adapter into one model, and write it to `folder` with tokenizer and template.

    With "auto", the precision is that of the initial model, or float32 if rounding would lose too much of a small
    change. Raises InputError if the merged model still differs from the adapter. Without an adapter, the trained
    weights are copied.
    """
    if trained.adapter is None:
        _copy_model(trained, folder)
        return _MergeCheck(difference=0.0, effect=0.0, num_tokens=0, precision="as trained")
    dtype = _resolve_dtype(trained.base, precision)
    check = _merge_and_compare(trained, trained.adapter, folder, dtype, device)
    if not check.is_close and precision == "auto" and dtype != torch.float32:
        shutil.rmtree(folder)  # float32 may need more shards, and old ones must not remain
        share = f"{check.difference / check.effect:.0%} of what the adapter changes"
        why = f"in {check.precision}, the initial model's precision, rounding would lose {share}"
        check = replace(_merge_and_compare(trained, trained.adapter, folder, torch.float32, device), why=why)
    if not check.is_close:
        fix = "Use a higher precision (--precision float32), or the adapter without merging."
        expected = f"at most {_MAX_LOSS_SHARE:.0%} of what the adapter changes"
        raise InputError(explain(f"merged weights in {folder}", got=str(check), expected=expected, fix=fix))
    return check


def _merge_and_compare(trained: Trained, adapter: Path, folder: Path, dtype: torch.dtype, device: str) -> _MergeCheck:
    tokenizer = load_tokenizer(_tokenizer_folder(trained))
    base = load_model(trained.base, what=f"initial model {trained.base!r}", dtype=torch.float32).to(device).eval()
    probe = _probe_ids(tokenizer, base.config).to(device)
    without_adapter = _logprobs(base, probe)
    adapted = load_adapter(base, adapter, what="adapter")
    with_adapter = _logprobs(adapted, probe)
    merged = adapted.merge_and_unload(safe_merge=True)
    merged.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Free them before the merged model is loaded, or two models would be in memory.
    del base, adapted, merged
    gc.collect()
    written = load_model(str(folder), what=f"merged weights {str(folder)!r}", dtype=torch.float32).to(device).eval()
    return _MergeCheck(
        difference=_distance(with_adapter, _logprobs(written, probe)),
        effect=_distance(without_adapter, with_adapter),
        num_tokens=probe.numel(),
        precision=str(dtype).removeprefix("torch."),
    )


def _resolve_dtype(base: str, precision: Precision) -> torch.dtype:
    """Return the dtype for a precision. For "auto", it is the dtype of the initial model."""
    name = precision
    if precision == "auto":
        config = load_config(base, what=f"initial model {base!r}")
        name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype: Any = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(explain("precision", got=repr(name), expected=f"one of {', '.join(PRECISIONS)}"))
    return dtype


def _probe_ids(tokenizer: Any, config: Any) -> Tensor:
    """Return one row of token ids for the comparison: code and prose, then random ids, so that it covers rare
    tokens.
    """
    text_ids = tokenizer(_PROBE * 8, add_special_tokens=False)["input_ids"][:_PROBE_TOKENS]
    # The embedding may be padded beyond the tokenizer's ids, or the tokenizer may have unused ones beyond it.
    size = min(int(config.get_text_config().vocab_size), len(tokenizer))
    random_ids = torch.randint(0, size, (_RANDOM_TOKENS,), generator=torch.Generator().manual_seed(0))
    return torch.tensor([[*text_ids, *random_ids.tolist()]])


def _logprobs(model: nn.Module, probe: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=probe, use_cache=False).logits[0].float().log_softmax(-1).cpu()


def _distance(logp_NV: Tensor, other_logp_NV: Tensor) -> float:
    """Return the root mean square distance between two models' log-probs p and q, weighted by probability.

    The formula is sqrt(mean over tokens of sum_v p(v) * (log p(v) - log q(v))^2).
    """
    return float((logp_NV.exp() * (logp_NV - other_logp_NV).square()).sum(-1).mean().sqrt())


def _tokenizer_folder(trained: Trained) -> str:
    # A training with a chat template of its own saves the tokenizer with the adapter.
    folder = trained.folder
    return str(folder) if folder is not None and (folder / "tokenizer_config.json").is_file() else trained.base


def _copy_model(trained: Trained, folder: Path) -> None:
    assert trained.model is not None
    folder.mkdir(parents=True, exist_ok=True)
    for path in _model_files(trained.model):
        shutil.copyfile(path, folder / path.name)


def _model_files(folder: Path) -> Iterator[Path]:
    """Yield the weight, config and tokenizer files, but not training.json, which contains paths of this machine."""
    for path in sorted(folder.iterdir()):
        is_plain = path.is_file() and not path.is_symlink()
        if is_plain and path.suffix in _COPIED_SUFFIXES and path.name != RECORD:
            yield path


# ---- Formats for other programs: a GGUF file, a Modelfile for Ollama, a script for vLLM
# vLLM and llama.cpp use the chat template in the weights' folder. Ollama has a template language of its own. The text
# around a message is found by rendering messages with a marker, and the template is written only if a whole
# conversation comes out the same from both. Tools cannot be expressed.

CONVERTER = "convert_hf_to_gguf.py"
_CONVERTER_VARIABLES = ("LLAMA_CPP", "LLAMA_CPP_DIR")
_CONVERTER_TIMEOUT_S = 3600
_GGUF_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_ROLES = ("system", "user", "assistant")
_MARK = "MARKEDTEXT"


class ExportFormat(NamedTuple):
    """A file for another program: its path, or None with a sentence that explains why the file was not made."""

    what: str
    path: Path | None
    sentence: str


def _find_converter(environment: Mapping[str, str]) -> Path | None:
    """Return the path of llama.cpp's converter, from the folder that LLAMA_CPP names or from the PATH."""
    in_folders = [Path(environment[name]) / CONVERTER for name in _CONVERTER_VARIABLES if environment.get(name)]
    on_path = shutil.which(CONVERTER, path=environment.get("PATH"))
    candidates = [*in_folders, *([Path(on_path)] if on_path else [])]
    return next((path for path in candidates if path.is_file()), None)


def _write_gguf(
    merged: Path, target: Path, *, precision: str, environment: Mapping[str, str] = os.environ
) -> ExportFormat:
    """Convert the merged weights to a GGUF file, if llama.cpp's converter is installed and supports the model."""
    converter = _find_converter(environment)
    if converter is None:
        return ExportFormat(
            "gguf", None, f"not made: {CONVERTER} of llama.cpp is not on the PATH (or set LLAMA_CPP to its folder)"
        )
    out_type = _GGUF_TYPES.get(precision, "auto")
    command = [sys.executable, str(converter), str(merged), "--outfile", str(target), "--outtype", out_type]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERTER_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return ExportFormat("gguf", None, f"not made: {CONVERTER} did not run ({error})")
    if process.returncode or not target.is_file():
        lines = (process.stderr or process.stdout).strip().splitlines()
        target.unlink(missing_ok=True)  # a failed conversion may leave a partial file
        return ExportFormat("gguf", None, f"not made: {CONVERTER} said: {lines[-1] if lines else 'nothing'}")
    return ExportFormat("gguf", target, f"by {CONVERTER}, {out_type}")


def _write_vllm(folder: Path, *, max_length: int | None) -> ExportFormat:
    """Write a script that serves the merged weights with vLLM, using their own chat template."""
    words = ["vllm", "serve", "../merged", "--chat-template", "../merged/chat_template.jinja"]
    words += ["--max-model-len", str(max_length)] if max_length else []
    lines = [
        "#!/bin/sh",
        "# An OpenAI-compatible endpoint at http://127.0.0.1:8000/v1. For tool calls add the parser of the model's",
        "# family: --enable-auto-tool-choice --tool-call-parser hermes (Qwen), llama3_json (Llama), mistral (Mistral).",
        'cd "$(dirname "$0")" || exit 1',
        f'exec {shlex.join(words)} --host 127.0.0.1 "$@"',
    ]
    path = folder / "serve.sh"
    atomic_write_text(path, "\n".join(lines) + "\n")
    path.chmod(0o755)
    return ExportFormat("vllm", path, "runs `vllm serve` on the merged weights, with their template")


def _write_ollama(folder: Path, tokenizer: Any, *, weights: str, max_length: int | None) -> ExportFormat:
    """Write a Modelfile for Ollama.

    It contains a template only if one was found that renders the same text as the model's chat template.
    """
    parts = _ollama_template(tokenizer)
    lines = [f"FROM {weights}"]
    if parts is not None:
        lines += [f'TEMPLATE """{parts.template}"""', *(f"PARAMETER stop {_quoted(stop)}" for stop in parts.stops)]
    lines += [f"PARAMETER num_ctx {max_length}"] if max_length else []
    path = folder / "Modelfile"
    atomic_write_text(path, "\n".join(lines) + "\n")
    if parts is None:
        return ExportFormat("ollama", path, "without a template: Ollama's language cannot express this one")
    return ExportFormat("ollama", path, "with the template, but without tools; use vLLM or llama-server for tools")


@dataclass(frozen=True, slots=True)
class _OllamaTemplate:
    """A chat template in Ollama's template language, and its parts."""

    template: str
    stops: tuple[str, ...]  # texts that end an answer
    around: Mapping[str, tuple[str, str]]  # by role: the texts before and after a message
    begin: str  # the begin-of-text token
    answer: str  # the prompt for an answer

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text that Ollama would render for these messages."""
        texts = (
            self.around[message["role"]][0] + message["content"] + self.around[message["role"]][1]
            for message in messages
        )
        return self.begin + "".join(texts) + self.answer


def _ollama_template(tokenizer: Any) -> _OllamaTemplate | None:
    """Return the chat template in Ollama's template language, or None if this language cannot express it.

    Only templates that do no more than put fixed texts around messages can be translated.
    """
    try:
        parts = _infer_parts(tokenizer)
        if parts is None or not _is_expressible(parts):
            return None
        # Line ends and spaces, because templates often strip messages; with and without a system message.
        talk = [{"role": role, "content": f"{role} {number}: a\n b"} for number in range(2) for role in _ROLES[1:]]
        for messages in ([{"role": "system", "content": "be brief"}, *talk[:3]], talk[:3]):
            if parts.render(messages) != _render(tokenizer, messages, prompt=True):
                return None
        return parts
    except (InputError, ValueError, TypeError, KeyError):  # a template may reject a role or an order of roles
        return None


def _is_expressible(parts: _OllamaTemplate) -> bool:
    """Return whether the template's texts are free of Ollama's own syntax: {{ }}, triple quotes and escapes."""
    texts = [parts.answer, *(text for pair in parts.around.values() for text in pair)]
    is_closed_early = '"""' in parts.template or parts.template.endswith('"')
    are_plain = all(_quoted(stop) == f'"{stop}"' for stop in parts.stops)
    return are_plain and not is_closed_early and not any("{{" in text or text.endswith("{") for text in texts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # Ollama does not unescape what is between the quotes


def _infer_parts(tokenizer: Any) -> _OllamaTemplate | None:
    """Infer the template's parts by comparing rendered texts, or return None if this is impossible.

    The comparisons show what one more message adds, and what the prompt for an answer adds.
    """
    # system, user, assistant: pieces are (before system, system to user, user to assistant, after assistant)
    talk = [{"role": role, "content": _MARK} for role in _ROLES]
    whole = _render(tokenizer, talk, prompt=False)
    pieces = whole.split(_MARK)
    with_question = _render(tokenizer, [*talk, {"role": "user", "content": _MARK}], prompt=False)
    if len(pieces) != 4 or not with_question.startswith(whole):
        return None
    # The text between two messages is the end of the first and the start of the second. A second question, which
    # follows the complete text, shows where a user message starts.
    before_user, _, after_user = with_question.removeprefix(whole).partition(_MARK)
    answer = _render(tokenizer, [talk[0], talk[1]], prompt=True).removeprefix(
        _render(tokenizer, talk[:2], prompt=False)
    )
    if not pieces[1].endswith(before_user) or not pieces[2].startswith(after_user):
        return None
    begin = str(getattr(tokenizer, "bos_token", None) or "")
    begin = begin if begin and pieces[0].startswith(begin) else ""
    around = {
        "system": (pieces[0].removeprefix(begin), pieces[1].removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (pieces[2].removeprefix(after_user), pieces[3]),
    }
    stop = pieces[3].strip() or str(getattr(tokenizer, "eos_token", None) or "")
    cases = "".join(
        f'{{{{ {"if" if role == "system" else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for role, (before, after) in around.items()
    )
    # Ollama adds the begin-of-text token itself, so `begin` is not part of the template.
    template = f"{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{answer}"
    return _OllamaTemplate(template, (stop,) if stop else (), around, begin, answer)


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
    template_error = require("jinja2", extra="report").TemplateError
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    except template_error as error:
        raise ValueError(str(error)) from error


_DATA_FILES = {
    "conversations": "sessions, split into the contexts that a model saw: turns with text, calls and results",
    "sites": "failed calls with kind, blame, evidence and, if they can be trained on, a hint",
    "pairs": "preference pairs: the messages before a turn, the chosen and the rejected action",
}


def _run_card(run: RunDir) -> str:
    """Return a README that describes the data on which the weights were trained. The data itself stays in the run."""
    files = {name: run.path(name).name for name in _DATA_FILES if run.path(name).exists()}
    what = (
        "The data that the weights next to this card were trained on. It stays in the run directory, where each of the "
        "files below can be loaded."
    )
    fields = {file: _DATA_FILES[name] for name, file in files.items()}
    return data_card(run, name="Data", what=what, fields=fields, files=files)


def _evaluation_of(trained: Trained) -> Mapping[str, Any] | None:
    """Return the evaluation of these weights, or None if `crf evaluate` did not run or evaluated other weights."""
    run, folder = trained.run, trained.folder
    if run is None or folder is None or not run.path("evaluation").exists():
        return None
    evaluation = read_evaluation(run)
    return evaluation if evaluation["models"]["after"].get("files") == (hash_weight_files(folder) or "") else None
