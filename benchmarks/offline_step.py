"""Measure a step of OfflineTrainer on one long session, compared with a plain SFT step on the same number of tokens.

python benchmarks/offline_step.py                 # Qwen2-1.5B shape, LoRA, 16,384 tokens, on a CUDA device
python benchmarks/offline_step.py --tiny          # anywhere, in seconds: shows that it runs, not how fast
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.offline_trainer import OfflineTrainer
from composer_replication.trainer.sessions.dataset import LoggedSessions, StoredWindow
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from session_step import Session, build_model


class Clock(TrainerCallback):
    """Callback that measures the seconds of each step and the peak memory since the first one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._wait()
        if len(self.seconds) == 1 and torch.cuda.is_available():  # the first step is a warm-up
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._wait()
        self.seconds.append(time.perf_counter() - self._began)

    def result(self) -> tuple[float, float]:
        """Return the median milliseconds without the warm-up step, and the peak in GiB."""
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return statistics.median(self.seconds[1:]) * 1e3, peak

    @staticmethod
    def _wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class PlainTrainer(Trainer):
    """A minimal SFT step: cross-entropy on the last tokens of one sequence, with the LM head applied in chunks."""

    def __init__(self, *args: Any, responses: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._responses = responses

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        ids, inner = inputs["input_ids"], model.get_base_model()
        with self.accelerator.autocast():
            hidden = inner.model(input_ids=ids, use_cache=False).last_hidden_state[0, -self._responses - 1 : -1]
            pieces = zip(hidden.split(1024), ids[0, -self._responses :].split(1024), strict=True)
            losses = [
                F.cross_entropy(inner.lm_head(rows).float(), targets, reduction="sum") for rows, targets in pieces
            ]
        return torch.stack(losses).sum() / self._responses


def sessions_of(session: Session) -> LoggedSessions:
    """Return the benchmark's session as a data set of the trainer, without a conversation, as its tokens are random."""
    batch = session.tree("cpu")
    window = StoredWindow.from_batch(
        batch, conversation_id="made", sequence=0, span=(0, len(session.trunk)), site_ids=(), state_ids=()
    )
    made = object.__new__(LoggedSessions)
    counts: Counter[str] = Counter(batch.counts())
    known = {"windows": [window], "counts": counts, "drops": Counter(), "proofs": None, "source": None}
    made.__dict__.update(known | {"renderer": None, "settings": None, "_only": None, "_pack": False})
    made._items = made._packed()
    assert set(CHANNELS) <= set(counts)
    return made


def arguments(args: argparse.Namespace, folder: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        max_steps=args.rounds + 1,
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-5,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="OfflineTrainer's step beside a plain SFT step.")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shape", default="1.5B", choices=["0.5B", "1.5B"])
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = (256, 16, 4, 8, 4, 64, 500) if args.tiny else (args.length, 16, 8, 256, 64, 4096, 151_936)
    session = Session(*numbers)
    base = build_model("tiny" if args.tiny else args.shape, numbers[-1], device, False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model: Any = get_peft_model(base, LoraConfig(r=16, target_modules=targets))
    tokens = len(session.tree("cpu").tree)
    ids = torch.randint(0, numbers[-1], (tokens,), generator=torch.Generator().manual_seed(0))
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"trunk {len(session.trunk)}, tree {tokens} tokens, {where}")
    print("| step | ms | x plain | peak GiB |\n|---|---|---|---|")
    plain_ms = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain SFT on as many tokens", "OfflineTrainer, live teacher", "OfflineTrainer, trust region"):
            clock = Clock()
            run(name, model, session, ids, arguments(args, folder), clock, numbers[5]).train()
            ms, peak = clock.result()
            plain_ms = plain_ms or ms
            print(f"| {name} | {ms:.0f} | {ms / plain_ms:.2f} | {peak:.1f} |", flush=True)


def run(
    name: str, model: Any, session: Session, ids: torch.Tensor, args: TrainingArguments, clock: Clock, responses: int
) -> Trainer:
    if name.startswith("plain"):
        rows = [{"input_ids": ids}] * (args.max_steps + 1)
        return PlainTrainer(model=model, args=args, train_dataset=rows, callbacks=[clock], responses=responses)  # pyright: ignore[reportArgumentType]
    kind = "trust_region" if "trust" in name else "live"
    settings = ChannelSettings(alpha_sdpo=0.1, beta_replay=0.05, sdpo_jsd_beta=1.0)
    keeper = TeacherKeeper(kind)
    return OfflineTrainer(model, args, sessions_of(session), settings=settings, teacher=keeper, callbacks=[clock])


if __name__ == "__main__":
    main()
