"""GSM8K with GRPO and the composer preset: a question in, a reward of 1 for the right number after ####.

    python examples/gsm8k/run.py --tiny                                       # a random model built here; seconds
    python examples/gsm8k/run.py --data train.jsonl --model PATH_OR_HUB_NAME  # the data set's own file, any causal LM
    python examples/gsm8k/run.py --data openai/gsm8k                          # both from the hub

`gsm8k_prompts` and `right_number` can be named in a config of `crf train` too, as examples/gsm8k/README.md shows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from transformers.utils.logging import disable_progress_bar

from composer_replication.errors import ComposerError, InputError, explain
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.presets import composer_grpo_config
from composer_replication.trainer.watch.diagnosis import diagnose

DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
INSTRUCTION = "Think step by step. End with a line that is #### and the number alone."
_ANSWER = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
_SAMPLE = (
    ("A box holds 6 eggs. How many eggs are in 7 boxes?", "6 * 7 = <<6*7=42>>42 eggs.\n#### 42"),
    ("Ann had 20 nuts and ate 8. How many are left?", "20 - 8 = <<20-8=12>>12 nuts.\n#### 12"),
    ("A pen costs $3. How much do 1,000 pens cost?", "3 * 1000 = <<3*1000=3000>>3000.\n#### 3,000"),
    ("Half of the 30 seats are taken. How many are free?", "30 / 2 = <<30/2=15>>15 seats.\n#### 15"),
)


def number_of(text: str) -> str | None:
    """The last number after ####, without commas and trailing zeros; None where there is none."""
    found = _ANSWER.findall(text)
    if not found:
        return None
    plain = found[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def gsm8k_prompts(data: str | None = None) -> Dataset:
    """Rows with a conversation to answer and the number that is right; without `data`, four questions from here."""
    rows = [{"question": q, "answer": a} for q, a in _SAMPLE] if data is None else _rows(data)
    prompts = [
        {
            "prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}],
            "number": number_of(row["answer"]),
        }
        for row in rows
    ]
    if not prompts or any(row["number"] is None for row in prompts):
        got = "a row with no such number" if prompts else "no rows"
        expected = "answers that end in #### and a number"
        raise InputError(explain(f"GSM8K data {data}", got=got, expected=expected))
    return Dataset.from_list(prompts)


def right_number(completions: list[Any], number: list[str], **_columns: Any) -> list[float]:
    """1 for a completion whose number is the right one."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(number_of(text) == right) for text, right in zip(texts, number, strict=True)]


def share_of_digits(completions: list[Any], **_columns: Any) -> list[float]:
    """Something for a random model to climb: it solves nothing, and equal rewards teach nothing."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [sum(char.isdigit() for char in text) / max(len(text), 1) for text in texts]


def _rows(data: str) -> list[Any]:
    path = Path(data)
    if path.is_dir():
        path = path / "train.jsonl"
    if path.suffix == ".jsonl":
        rows: list[Any] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        rows = list(load_dataset(data, "main", split="train"))
    if rows and not {"question", "answer"} <= rows[0].keys():
        expected = "rows with question and answer"
        raise InputError(explain(f"GSM8K data {data}", got=f"the columns {sorted(rows[0])}", expected=expected))
    return rows


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.tiny:
        sys.path.append(str(Path(__file__).parents[1] / "qwen_05b_quickstart"))
        from tiny import tiny_model, tiny_tokenizer

        tokenizer = tiny_tokenizer()
        return tiny_model(tokenizer), tokenizer
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return AutoModelForCausalLM.from_pretrained(
        args.model, trust_remote_code=False, dtype=dtype
    ), AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on GSM8K with the composer preset.")
    parser.add_argument("--data", default=None, help="train.jsonl, its folder, or a hub name; default: 4 questions")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default=DEFAULT_MODEL, help="hub name or local folder (default: %(default)s)")
    which.add_argument("--tiny", action="store_true", help="build a small random model here instead of loading one")
    parser.add_argument("--steps", type=int, default=None, help="default: 200, with --tiny 6")
    parser.add_argument("--generations", type=int, default=8, help="rollouts of one question")
    parser.add_argument("--max-length", type=int, default=None, help="of a rollout; default: 400, with --tiny 24")
    parser.add_argument("--learning-rate", type=float, default=None, help="default: 1e-6, with --tiny 2e-2")
    parser.add_argument("--output", default=None, help="folder for checkpoints and metrics; default: a temporary one")
    return parser.parse_args(argv)


def make_trainer(args: argparse.Namespace, output: str) -> ComposerReplicationTrainer:
    model, tokenizer = load_model(args)
    config = composer_grpo_config(
        output,
        preset="composer",
        num_generations=args.generations,
        per_device_train_batch_size=args.generations,
        max_completion_length=args.max_length or (24 if args.tiny else 400),
        max_steps=args.steps or (6 if args.tiny else 200),
        learning_rate=args.learning_rate or (2e-2 if args.tiny else 1e-6),
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available() and not args.tiny,
        gradient_checkpointing=not args.tiny,
        save_strategy="no" if args.output is None else "steps",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=0,
    )
    return ComposerReplicationTrainer(
        model=model,
        args=config,
        reward_funcs=[right_number, share_of_digits] if args.tiny else [right_number],
        train_dataset=gsm8k_prompts(args.data),
        processing_class=tokenizer,
        alpha_sdpo=0.0,  # no tools, so no error sites: channel 2 has nothing to say here
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    disable_progress_bar()
    if args.tiny:
        torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            trainer = make_trainer(args, args.output or temporary)
            trainer.remove_callback(PrinterCallback)
            print(f"{len(trainer.train_dataset)} questions, {args.generations} rollouts each")
            trainer.train()
    except (ComposerError, OSError) as error:
        print(f"FAILED: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    history = trainer.state.log_history
    for line in history:
        if "reward" in line:
            parts = "  ".join(f"{name} {line[f'rewards/{name}/mean']:.3f}" for name in trainer.reward_func_names)
            print(f"step {line['step']:3d}  reward {line['reward']:.3f}  {parts}")
    for text in diagnose(history, max_completion_length=trainer.max_completion_length):
        print(f"diagnosis: {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
