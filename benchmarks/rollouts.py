"""Measure multi-turn rollouts in groups: tokens per second of transformers' own loop and of RolloutGenerator.

python benchmarks/rollouts.py                          # Qwen2.5-1.5B shape in bf16 on a CUDA device
python benchmarks/rollouts.py --shape 5M               # on two CPU cores
python benchmarks/rollouts.py --shape 135M --processes 1 4   # several runs at once on one device
python benchmarks/rollouts.py --shape 0.5B --batch 256 --only "TRL|static|continuous|kept keys$|vLLM"   # with vLLM
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from composer_replication.trainer.rollouts.generation import row_cache
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator

SHAPES = {  # hidden, layers, heads, key heads, intermediate, vocabulary
    "1.5B": (1536, 28, 12, 2, 8960, 151_936),
    "0.5B": (896, 24, 14, 2, 4864, 151_936),
    "135M": (576, 30, 9, 3, 1536, 49_152),
    "5M": (256, 5, 4, 2, 768, 4096),
    "tiny": (32, 2, 4, 2, 48, 97),
}
Generate = Callable[..., torch.Tensor]


def build_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    hidden, layers, heads, key_heads, intermediate, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        model: Any = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.to(dtype).eval()


def rollouts(args: argparse.Namespace, vocabulary: int) -> list[list[list[int]]]:
    """Return the prompts of the batch, equal within a group, then for each turn the tool results of each row."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, vocabulary, (count,), generator=draw).tolist()

    prompts = [tokens(args.prompt) for _ in range(args.batch // args.group)]
    said = [
        [tokens(int(torch.randint(args.tool // 2, 2 * args.tool, (1,), generator=draw))) for _ in range(args.batch)]
        for _ in range(args.turns - 1)
    ]
    return [[list(prompts[row // args.group]) for row in range(args.batch)], *said]


def run_turns(generate: Generate, batches: list[list[list[int]]], config: GenerationConfig, device: Any) -> Any:
    """Generate every turn from the whole conversation so far, as TRL does, and return the ids of all rows."""
    rows: list[list[int]] = [[] for _ in batches[0]]
    for said in batches:
        rows = [row + more for row, more in zip(rows, said, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        new = generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        rows = [row + more for row, more in zip(rows, new, strict=True)]
    return rows


@contextlib.contextmanager
def unrecorded(is_off: bool):
    """Context manager that turns CUDA graphs off, to measure their effect."""
    usual = row_cache.NextTokens.__init__
    if is_off:
        row_cache.NextTokens.__init__ = lambda self, model, cache, **_: usual(self, model, cache, record=False)
    yield
    row_cache.NextTokens.__init__ = usual


def variants(model: Any, batches: Any, args: argparse.Namespace, device: Any) -> dict[str, Callable[[], Any]]:
    usual = GenerationConfig(
        max_new_tokens=args.new, do_sample=not args.greedy, pad_token_id=0, top_k=0, disable_compile=True
    )
    static = GenerationConfig(**{**usual.to_dict(), "cache_implementation": "static"})

    def kept(*, keep: bool = True, record: bool = True) -> Any:
        maker = RolloutGenerator()
        with maker.rollout(keep=keep), unrecorded(not record):
            found = run_turns(lambda **inputs: maker.generate(model, **inputs), batches, usual, device)
        assert not maker.left_because, maker.left_because
        return found

    made = {
        "transformers, as TRL calls it": lambda: run_turns(model.generate, batches, usual, device),
        "transformers, static cache": lambda: run_turns(model.generate, batches, static, device),
        "kept keys": kept,
        "kept keys, every turn read anew": lambda: kept(keep=False),
    }
    if device.type == "cuda":
        made["kept keys, steps not recorded"] = lambda: kept(record=False)
        made["transformers, continuous batching"] = lambda: run_turns(paged(model), batches, usual, device)
        if importlib.util.find_spec("vllm") and not args.greedy:
            engine = vllm_engine(model, args)
            made["vLLM"] = lambda: run_turns(engine, batches, usual, device)
    return {name: step for name, step in made.items() if re.search(args.only, name)}


def paged(model: Any) -> Generate:
    """Return a `generate` that runs transformers' continuous batching on the rows without their padding."""

    def generate(*, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any) -> torch.Tensor:
        rows = unpadded(input_ids, attention_mask)
        outputs = model.generate_batch(inputs=rows, generation_config=generation_config, progress_bar=False)
        # The results are keyed by request; requests are numbered in the order of the inputs.
        by_number = sorted(outputs.values(), key=lambda output: int(str(output.request_id).rpartition("_")[2]))
        return joined(input_ids, [output.generated_tokens for output in by_number])

    return generate


def vllm_engine(model: Any, args: argparse.Namespace) -> Generate:
    """Return a `generate` that runs vLLM on the same weights, which are stored in a temporary folder to be loaded."""
    vllm = importlib.import_module("vllm")
    longest = args.prompt + args.turns * (args.new + 2 * args.tool)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=longest,
            gpu_memory_utilization=0.4,
            max_num_seqs=args.batch,
        )
    params = vllm.SamplingParams(max_tokens=args.new, temperature=1.0, ignore_eos=True, detokenize=False)

    def generate(*, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        prompts = [{"prompt_token_ids": row} for row in unpadded(input_ids, attention_mask)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return joined(input_ids, [list(output.outputs[0].token_ids) for output in outputs])

    return generate


def unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Return the ids of each row without its padding."""
    return [row[keep.bool()].tolist() for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]


def joined(ids: torch.Tensor, new: list[list[int]]) -> torch.Tensor:
    """Return `ids` followed by the new tokens, like `generate`. No row ends early, so all have equally many."""
    return torch.cat([ids, torch.tensor(new, device=ids.device)], dim=1)


def timed(step: Callable[[], Any], device: Any) -> tuple[float, Any]:
    """Return the seconds (with one CPU thread, processor time, which load hardly affects) and the result of a step."""
    is_cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if is_cuda else (lambda: None)
    clock = time.process_time if not is_cuda and torch.get_num_threads() == 1 else time.perf_counter
    wait()
    began = clock()
    found = step()
    wait()
    return clock() - began, found


def measure(args: argparse.Namespace) -> None:
    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    check(device)
    model = build_model(args.shape, device, dtype)
    batches = rollouts(args, model.config.vocab_size)
    tokens = args.batch * args.new * args.turns
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{args.shape} shape, {size:.0f}M parameters, {where}, batch {args.batch} in groups of {args.group},")
    between = f"{args.tool // 2} to {2 * args.tool} between them"
    print(f"prompts of {args.prompt}, {args.turns} turns of {args.new} new tokens, {between}\n")
    print("| variant | s | tokens/s | x first | ms a step | peak GiB |\n|---|---|---|---|---|---|")
    steps = variants(model, batches, args, device)
    peaks = {name: warmed(step, device) for name, step in steps.items()}
    rounds = [{name: timed(step, device)[0] for name, step in steps.items()} for _ in range(args.rounds)]
    for name in steps:
        seconds = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each[next(iter(steps))] / each[name] for each in rounds)
        per_step = 1e3 * seconds / (args.new * args.turns)
        print(f"| {name} | {seconds:.2f} | {tokens / seconds:.0f} | {ratio:.2f} | {per_step:.1f} | {peaks[name]} |")


def warmed(step: Callable[[], Any], device: Any) -> str:
    """Run a step without timing it, and return its peak memory in GiB as text."""
    if device.type != "cuda":
        return "-"
    torch.cuda.reset_peak_memory_stats()
    timed(step, device)
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"


def check(device: torch.device) -> None:
    """Check that in single precision both loops choose the same tokens, with and without CUDA graphs."""
    args = argparse.Namespace(batch=12, group=4, prompt=40, turns=3, new=40, tool=9, greedy=True, only="")
    model = build_model("tiny", device, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    # On a GPU continuous batching has kernels of its own, and its tokens differ from those of the plain loop.
    args.only = r"^(?!.*continuous)"
    found = {name: step() for name, step in variants(model, rollouts(args, 97), args, device).items()}
    expected = found.pop("transformers, as TRL calls it")
    assert {name: rows == expected for name, rows in found.items()} == dict.fromkeys(found, True)


def measure_processes(args: argparse.Namespace) -> None:
    """Measure several processes at once, each with a model: the tokens per second of all while all are running."""
    print("| processes | tokens/s together | tokens/s of each |\n|---|---|---|")
    tokens = args.batch * args.new * args.turns
    for count in args.processes:
        start = time.time() + 20 + 2 * count
        command = [sys.executable, *sys.argv, "--worker", str(start)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        seconds = [float(each.communicate()[0].split()[-1]) for each in running]
        rates = [args.rounds * tokens / second for second in seconds]
        print(f"| {count} | {sum(rates):.0f} | {', '.join(f'{rate:.0f}' for rate in rates)} |", flush=True)


def work(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    model = build_model(args.shape, device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    step = variants(model, rollouts(args, model.config.vocab_size), args, device)["kept keys"]
    timed(step, device)
    time.sleep(max(0.0, args.worker - time.time()))
    print(timed(lambda: [step() for _ in range(args.rounds)], device)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts from transformers' own loop and from kept keys.")
    parser.add_argument("--shape", default="1.5B", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, usual in {
        "batch": 64,
        "group": 8,
        "prompt": 512,
        "new": 128,
        "turns": 3,
        "tool": 64,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--only", default="", help="variants whose name this pattern is found in")
    parser.add_argument("--processes", type=int, nargs="+")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    (work if args.worker else measure_processes if args.processes else measure)(args)


if __name__ == "__main__":
    main()
