"""What other programs need to run merged weights: a GGUF file, a Modelfile for Ollama, a command for vLLM.

vLLM and llama.cpp run the chat template that lies beside the weights. Ollama has a template language of its own:
what ours writes around a message is found by rendering marked ones, and a conversation has to come out the same from
both before a template is written. Tools have no place in it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.atomic import atomic_write_text
from composer_replication.errors import InputError
from composer_replication.optional import require

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


def find_converter(environment: Mapping[str, str]) -> Path | None:
    """llama.cpp's converter: in the folder that LLAMA_CPP names, or on the PATH."""
    named_paths = [Path(environment[name]) / CONVERTER for name in _PLACES if environment.get(name)]
    on_path = shutil.which(CONVERTER, path=environment.get("PATH"))
    candidates = [*named_paths, *([Path(on_path)] if on_path else [])]
    return next((path for path in candidates if path.is_file()), None)


def write_gguf(merged: Path, target: Path, *, precision: str, environment: Mapping[str, str] = os.environ) -> Made:
    """Merged weights as one GGUF file, where llama.cpp's converter is installed and knows the model."""
    converter = find_converter(environment)
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


def write_vllm(folder: Path, *, max_length: int | None) -> Made:
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
class OllamaTemplate:
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


def ollama_template(tokenizer: Any) -> OllamaTemplate | None:
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


def _can_be_written(parts: OllamaTemplate) -> bool:
    """Whether no text of ours would be read as Ollama's own: its actions, the end of the template, an escape."""
    texts = [parts.answer, *(text for pair in parts.around.values() for text in pair)]
    is_closed_early = '"""' in parts.template or parts.template.endswith('"')
    are_plain = all(_quoted(stop) == f'"{stop}"' for stop in parts.stops)
    return are_plain and not is_closed_early and not any("{{" in text or text.endswith("{") for text in texts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # Ollama takes what is between the quotes as it is


def _read_parts(tokenizer: Any) -> OllamaTemplate | None:
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
    return OllamaTemplate(template, (stop,) if stop else (), around, begin, answer)


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
    template_error = require("jinja2", extra="report").TemplateError
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    except template_error as error:
        raise ValueError(str(error)) from error
