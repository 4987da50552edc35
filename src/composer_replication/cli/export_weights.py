"""`crf export`: sessions of a run as ATIF documents, one file per session; and weights for other programs to run."""

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

from composer_replication.atomic import atomic_write_text
from composer_replication.batch.model_folder import (
    load_adapter,
    load_config,
    load_model,
    load_tokenizer,
)
from composer_replication.errors import InputError, RunError, explain
from composer_replication.optional import require
from composer_replication.runs.directory import note_elsewhere, refuse_used
from composer_replication.runs.lineage import RECORD
from composer_replication.trainer.trained import Trained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from composer_replication.trainer.trained import Trained


# ---- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Where the folder is, how near the merged weights are to the adapter, what was made for others, what was sent."""

    folder: Path
    check: _MergeCheck
    made: tuple[Made, ...]
    pushed: str | None = None


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
    """Merged weights, the adapter, folders for vLLM and Ollama, and cards; the folder appears whole or not at all.

    `push` names a repository on the hub, to which the merged weights and their card go; `api` as for `push_folder`.
    """

    refuse_used(folder)
    if push is not None:
        _check_repository(push)
    trained = trained_weights(name, adapter)

    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    if trained.run is not None:
        note_elsewhere(trained.run, "exported weights", folder)
    try:
        check = merge_adapter(trained, making / "merged", precision=precision)
        exports = _for_others(trained, making, precision=check.precision, environment=environment)
        _write_cards(trained, making, folder, public_name=push)
        if folder.exists():  # empty, or it had been refused
            folder.rmdir()
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    exports = tuple(
        export._replace(path=export.path and folder / export.path.relative_to(making)) for export in exports
    )
    address = None if push is None else push_folder(folder / "merged", push, is_public=is_public, api=api)
    return ExportedWeights(folder=folder, check=check, made=exports, pushed=address)


def trained_weights(name: str, adapter: str | None = None) -> Trained:
    """What is to be handed out; a name that stands for nothing trained is refused."""
    from composer_replication.trainer.trained import find_trained

    trained = find_trained(name, adapter)
    if trained.folder is None:
        got = f"the model {trained.base} alone" if Path(name).is_dir() else f"{name!r}, no folder here"
        expected = "a run with trained weights, or an adapter's folder"
        raise InputError(explain("weights to export", got=got, expected=expected))
    return trained


def _for_others(trained: Trained, making: Path, *, precision: str, environment: Mapping[str, str]) -> tuple[Made, ...]:
    from composer_replication.batch.model_folder import load_config, load_tokenizer
    from composer_replication.trainer.trained import settle_base

    merged = making / "merged"
    tokenizer, config = load_tokenizer(str(merged)), load_config(str(merged), what=f"merged weights {merged}")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name in ("ollama", "vllm"):
        (making / name).mkdir()
    if trained.adapter is not None:
        shutil.copytree(
            trained.adapter, making / "adapter", ignore=shutil.ignore_patterns("README.md", "*.bin", "*.pt")
        )
        settle_base(making / "adapter")
    gguf = _write_gguf(merged, making / "ollama" / "model.gguf", precision=precision, environment=environment)
    weights = "./model.gguf" if gguf.path is not None else "../merged"
    ollama = write_ollama(making / "ollama", tokenizer, weights=weights, max_length=longest)
    return gguf, ollama, _write_vllm(making / "vllm", max_length=longest)


def _write_cards(trained: Trained, making: Path, folder: Path, *, public_name: str | None) -> None:
    """One beside each set of weights; that of what leaves the machine names no path of it."""
    from composer_replication.trainer.trained import evaluation_of, model_card, run_card

    run, evaluation = trained.run, evaluation_of(trained)
    is_public, merged_name = public_name is not None, public_name or str(folder.absolute() / "merged")
    card = model_card(trained, form="merged", name=merged_name, evaluation=evaluation, is_public=is_public)
    atomic_write_text(making / "merged" / "README.md", card)
    if trained.adapter is not None:
        name = str(folder.absolute() / "adapter")
        card = model_card(trained, form="adapter", name=name, evaluation=evaluation)
        atomic_write_text(making / "adapter" / "README.md", card)
    if run is not None:
        atomic_write_text(making / "DATA.md", run_card(run))


# Merged weights to the hub: only where somebody named a repository, private unless said otherwise, without data.

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SENT = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md")


def _check_repository(name: str) -> str:
    """`owner/name`, told before anything is merged."""
    if _REPOSITORY.fullmatch(name) is None:
        fix = "Name it as the hub does: your user name or organisation, a slash, and the repository."
        raise InputError(explain("--push", got=repr(name), expected="owner/name", fix=fix))
    return name


def push_folder(folder: Path, repository: str, *, is_public: bool = False, api: Any = None) -> str:
    """Send a folder of weights to the hub, and return the address; `api` stands in for `huggingface_hub.HfApi`."""
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
            raise _would_be_public(repository)  # one that was there before stays as it was
        done = hub.upload_folder(
            folder_path=str(folder),
            repo_id=repository,
            repo_type="model",
            commit_message="Weights made by composer-replication",
            allow_patterns=list(_SENT),
        )
    except OfflineModeIsEnabled as error:
        raise _refused(repository, error, "HF_HUB_OFFLINE is set: unset it to send something.") from error
    except LocalTokenNotFoundError as error:
        raise _refused(repository, error, "`hf auth login`, or set HF_TOKEN to a token that may write.") from error
    except HfHubHTTPError as error:
        fix = "Look at the name, and whether your token may write there (`hf auth whoami`)."
        raise _refused(repository, error, fix) from error
    except ValueError as error:  # a name, or an address, that the client does not take
        raise _refused(repository, error, "Look at the name, and at HF_ENDPOINT.") from error
    except (HTTPError, OSError) as error:
        raise _refused(repository, error, "Look at the network; the same command can be run again.") from error
    return str(getattr(done, "commit_url", None) or done)


def _would_be_public(repository: str) -> RunError:
    fix = "Make it private on the hub, name another one, or say --public if everybody may have these weights."
    got = "a repository that is there already, and public"
    return RunError(explain(f"sending to {repository}", got=got, expected="a private one", fix=fix))


def _refused(repository: str, error: Exception, fix: str) -> RunError:
    lines = str(error).strip().splitlines()
    got = f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
    return RunError(explain(f"sending to {repository}", got=got, expected="a hub that takes it", fix=fix))


# An adapter folded into its start weights, and the proof that the folder on disk does what the adapter did.
#
# Log-probs of a probe are taken with the adapter on its start weights, then from the merged folder as it was written.
# Folding rounds to the weights' own precision, and bf16 keeps 8 bits: what is lost is measured against what the adapter
# changes at all, and a merge that loses more than a part of it is refused.

Precision = Literal["auto", "float32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = ("auto", "float32", "bfloat16", "float16")
_PROBE = "def mean(values):\n    return sum(values) / len(values)\n\nRead tests/test_stats.py, then run the tests. "
_PROBE_TOKENS, _RANDOM_TOKENS = 192, 64
_MOST_LOST, _EXACT = 0.25, 1e-4
_COPIED = (".json", ".jinja", ".safetensors", ".txt", ".model")


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergeCheck:
    """Over a probe, in nats: how far the merged folder's log-probs are from the adapter's, and the adapter's from the
    start weights', each a root mean square over tokens and vocabulary entries weighed by their probability."""

    difference: float
    effect: float
    num_tokens: int
    precision: str
    why: str = ""
    """Why it is not the precision of the start weights."""

    @property
    def holds(self) -> bool:
        return self.difference <= max(_EXACT, _MOST_LOST * self.effect)

    def __str__(self) -> str:
        lost = f", {self.difference / self.effect:.1%} of what the adapter changes" if self.effect else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.difference:.2g} nats from the adapter on its start weights{lost} ({self.precision}{why})"


def merge_adapter(trained: Trained, folder: Path, *, precision: Precision = "auto", device: str = "cpu") -> _MergeCheck:
    """Write start weights and adapter as one model to `folder`, with tokenizer and template; refuse what differs.

    On "auto" a short training whose change would round away in the start weights' precision is written in float32.
    Without an adapter the trained weights are copied, and nothing is left to compare.
    """
    if trained.adapter is None:
        _copy_whole(trained, folder)
        return _MergeCheck(difference=0.0, effect=0.0, num_tokens=0, precision="as trained")
    dtype = _wanted_dtype(trained.base, precision)
    check = _merged(trained, trained.adapter, folder, dtype, device)
    if not check.holds and precision == "auto" and dtype != torch.float32:
        shutil.rmtree(folder)  # of fewer bits there may be fewer files
        share = f"{check.difference / check.effect:.0%} of what the adapter changes"
        why = f"in {check.precision}, as the start weights are, rounding would lose {share}"
        check = replace(_merged(trained, trained.adapter, folder, torch.float32, device), why=why)
    if not check.holds:
        fix = "Take the adapter itself, or more bits: --precision float32."
        expected = f"at most {_MOST_LOST:.0%} of what the adapter changes"
        raise InputError(explain(f"merged weights in {folder}", got=str(check), expected=expected, fix=fix))
    return check


def _merged(trained: Trained, adapter: Path, folder: Path, dtype: torch.dtype, device: str) -> _MergeCheck:
    tokenizer = load_tokenizer(_home_of_tokenizer(trained))
    base = load_model(trained.base, what=f"start weights {trained.base!r}", dtype=torch.float32).to(device).eval()
    probe = probe_ids(tokenizer, base.config).to(device)
    before = _logprobs(base, probe)
    adapted = load_adapter(base, adapter, what="adapter")
    with_adapter = _logprobs(adapted, probe)
    merged = adapted.merge_and_unload(safe_merge=True)
    merged.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del base, adapted, merged
    gc.collect()
    written = load_model(str(folder), what=f"merged weights {str(folder)!r}", dtype=torch.float32).to(device).eval()
    return _MergeCheck(
        difference=_distance(with_adapter, _logprobs(written, probe)),
        effect=_distance(before, with_adapter),
        num_tokens=probe.numel(),
        precision=str(dtype).removeprefix("torch."),
    )


def _wanted_dtype(base: str, precision: Precision) -> torch.dtype:
    """As asked; on "auto" as the start weights are stored."""
    name = precision
    if precision == "auto":
        config = load_config(base, what=f"start weights {base!r}")
        name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(explain("precision", got=repr(name), expected=f"one of {', '.join(PRECISIONS)}"))
    return dtype


def probe_ids(tokenizer: Any, config: Any) -> Tensor:
    """One row of token ids: a little code and prose, then ids drawn at random, so that no row of a matrix is safe."""
    text = tokenizer(_PROBE * 8, add_special_tokens=False)["input_ids"][:_PROBE_TOKENS]
    size = int(config.get_text_config().vocab_size)
    drawn = torch.randint(0, min(size, len(tokenizer)), (_RANDOM_TOKENS,), generator=torch.Generator().manual_seed(0))
    return torch.tensor([[*text, *drawn.tolist()]])


def _logprobs(model: nn.Module, probe: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=probe, use_cache=False).logits[0].float().log_softmax(-1).cpu()


def _distance(one: Tensor, two: Tensor) -> float:
    """Root of the mean, over tokens, of the squared difference under the first's probabilities."""
    return float((one.exp() * (one - two).square()).sum(-1).mean().sqrt())


def _home_of_tokenizer(trained: Trained) -> str:
    """A template that a training was given is saved with the adapter."""
    folder = trained.folder
    return str(folder) if folder is not None and (folder / "tokenizer_config.json").is_file() else trained.base


def _copy_whole(trained: Trained, folder: Path) -> None:
    assert trained.model is not None
    folder.mkdir(parents=True, exist_ok=True)
    for path in _files_of(trained.model):
        shutil.copyfile(path, folder / path.name)


def _files_of(folder: Path) -> Iterator[Path]:
    """Weights, config and tokenizer; our record of the training names paths of this machine, and stays."""
    for path in sorted(folder.iterdir()):
        is_plain = path.is_file() and not path.is_symlink()
        if is_plain and path.suffix in _COPIED and path.name != RECORD:
            yield path


# What other programs need to run merged weights: a GGUF file, a Modelfile for Ollama, a command for vLLM.
#
# vLLM and llama.cpp run the chat template that lies beside the weights. Ollama has a template language of its own:
# what ours writes around a message is found by rendering marked ones, and a conversation has to come out the same from
# both before a template is written. Tools have no place in it.

CONVERTER = "convert_hf_to_gguf.py"
_PLACES = ("LLAMA_CPP", "LLAMA_CPP_DIR")
_SECONDS = 3600
_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_ROLES = ("system", "user", "assistant")
_MARK = "MARKEDTEXT"


class Made(NamedTuple):
    """Something for another program: where it is, or a sentence why it is not there."""

    what: str
    path: Path | None
    sentence: str


def _find_converter(environment: Mapping[str, str]) -> Path | None:
    """llama.cpp's converter: in the folder that LLAMA_CPP names, or on the PATH."""
    named_paths = [Path(environment[name]) / CONVERTER for name in _PLACES if environment.get(name)]
    on_path = shutil.which(CONVERTER, path=environment.get("PATH"))
    candidates = [*named_paths, *([Path(on_path)] if on_path else [])]
    return next((path for path in candidates if path.is_file()), None)


def _write_gguf(merged: Path, target: Path, *, precision: str, environment: Mapping[str, str] = os.environ) -> Made:
    """Merged weights as one GGUF file, where llama.cpp's converter is installed and knows the model."""
    converter = _find_converter(environment)
    if converter is None:
        return Made(
            "gguf", None, f"not made: {CONVERTER} of llama.cpp is not on the PATH (or set LLAMA_CPP to its folder)"
        )
    out_type = _TYPES.get(precision, "auto")
    command = [sys.executable, str(converter), str(merged), "--outfile", str(target), "--outtype", out_type]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return Made("gguf", None, f"not made: {CONVERTER} did not run ({error})")
    if done.returncode or not target.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines()
        target.unlink(missing_ok=True)
        return Made("gguf", None, f"not made: {CONVERTER} said: {lines[-1] if lines else 'nothing'}")
    return Made("gguf", target, f"by {CONVERTER}, {out_type}")


def _write_vllm(folder: Path, *, max_length: int | None) -> Made:
    """A script that serves the merged weights beside it with their own template."""
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
    return Made("vllm", path, "runs `vllm serve` on the merged weights, with their template")


def write_ollama(folder: Path, tokenizer: Any, *, weights: str, max_length: int | None) -> Made:
    """A Modelfile; with a template where one could be found that renders the same."""
    parts = ollama_template(tokenizer)
    lines = [f"FROM {weights}"]
    if parts is not None:
        lines += [f'TEMPLATE """{parts.template}"""', *(f"PARAMETER stop {_quoted(stop)}" for stop in parts.stops)]
    lines += [f"PARAMETER num_ctx {max_length}"] if max_length else []
    path = folder / "Modelfile"
    atomic_write_text(path, "\n".join(lines) + "\n")
    if parts is None:
        return Made("ollama", path, "without a template: this one cannot be said in Ollama's language")
    return Made("ollama", path, "with the template for text; tools have no place in it (vLLM and llama-server have)")


@dataclass(frozen=True, slots=True)
class _OllamaTemplate:
    """Ollama's template and the texts that end an answer; `around` is what stands before and behind a message."""

    template: str
    stops: tuple[str, ...]
    around: Mapping[str, tuple[str, str]]
    begin: str
    answer: str

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """What Ollama makes of the template."""
        texts = (
            self.around[message["role"]][0] + message["content"] + self.around[message["role"]][1]
            for message in messages
        )
        return self.begin + "".join(texts) + self.answer


def ollama_template(tokenizer: Any) -> _OllamaTemplate | None:
    """The chat template in Ollama's language, or None where it does more than put texts around messages."""
    try:
        parts = _read_parts(tokenizer)
        if parts is None or not _can_be_written(parts):
            return None
        talk = [{"role": role, "content": f"{role} {number}: a\n b"} for number in range(2) for role in _ROLES[1:]]
        for messages in ([{"role": "system", "content": "be brief"}, *talk[:3]], talk[:3]):
            if parts.render(messages) != _render(tokenizer, messages, prompt=True):
                return None
        return parts
    except (InputError, ValueError, TypeError, KeyError):  # a template may refuse a role, or an order of roles
        return None


def _can_be_written(parts: _OllamaTemplate) -> bool:
    """Whether no text of ours would be read as Ollama's own: its actions, the end of the template, an escape."""
    texts = [parts.answer, *(text for pair in parts.around.values() for text in pair)]
    is_closed_early = '"""' in parts.template or parts.template.endswith('"')
    are_plain = all(_quoted(stop) == f'"{stop}"' for stop in parts.stops)
    return are_plain and not is_closed_early and not any("{{" in text or text.endswith("{") for text in texts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # Ollama takes what is between the quotes as it is


def _read_parts(tokenizer: Any) -> _OllamaTemplate | None:
    """By differences: what a further marked message adds to the text, and what the prompt for an answer adds."""
    talk = [{"role": role, "content": _MARK} for role in _ROLES]
    whole = _render(tokenizer, talk, prompt=False)
    pieces = whole.split(_MARK)
    with_question = _render(tokenizer, [*talk, {"role": "user", "content": _MARK}], prompt=False)
    if len(pieces) != 4 or not with_question.startswith(whole):
        return None
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
    # Ollama puts the begin-of-text token in front by itself.
    template = f"{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{answer}"
    return _OllamaTemplate(template, (stop,) if stop else (), around, begin, answer)


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
    template_error = require("jinja2", extra="report").TemplateError
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    except template_error as error:
        raise ValueError(str(error)) from error
