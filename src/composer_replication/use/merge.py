"""An adapter folded into its start weights, and the proof that the folder on disk does what the adapter did.

Log-probs of a probe are taken with the adapter on its start weights, then from the merged folder as it was written.
Folding rounds to the weights' own precision, and bf16 keeps 8 bits: what is lost is measured against what the adapter
changes at all, and a merge that loses more than a part of it is refused.
"""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from composer_replication.batch.model_folder import load_adapter, load_config, load_model, load_tokenizer
from composer_replication.errors import InputError, explain
from composer_replication.runs.lineage import RECORD
from composer_replication.use.trained import Trained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

Precision = Literal["auto", "float32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = ("auto", "float32", "bfloat16", "float16")
_PROBE = "def mean(values):\n    return sum(values) / len(values)\n\nRead tests/test_stats.py, then run the tests. "
_PROBE_TOKENS, _RANDOM_TOKENS = 192, 64
_MOST_LOST, _EXACT = 0.25, 1e-4
_COPIED = (".json", ".jinja", ".safetensors", ".txt", ".model")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCheck:
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


def merge_adapter(trained: Trained, folder: Path, *, precision: Precision = "auto", device: str = "cpu") -> MergeCheck:
    """Write start weights and adapter as one model to `folder`, with tokenizer and template; refuse what differs.

    On "auto" a short training whose change would round away in the start weights' precision is written in float32.
    Without an adapter the trained weights are copied, and nothing is left to compare.
    """
    if trained.adapter is None:
        _copy_whole(trained, folder)
        return MergeCheck(difference=0.0, effect=0.0, num_tokens=0, precision="as trained")
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


def _merged(trained: Trained, adapter: Path, folder: Path, dtype: torch.dtype, device: str) -> MergeCheck:
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
    return MergeCheck(
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
