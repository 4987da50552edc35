"""From logs to a better model: ingest, error sites, hints, and a few steps of channels 2 and 3.

    python examples/sdpo_end_to_end/run.py                         # a small world built here; about a minute on a CPU
    python examples/sdpo_end_to_end/run.py --model PATH --run DIR  # your weights, and a run directory with sites

Printed for every kind of error: the log-prob of the erring call, *without* any hint, before and after, a token of those
that decide it (the tool's name, and the first argument token that is wrong). Exits with an error when it did not fall.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.render.renderer import Renderer
from composer_replication.cli.main import main as crf
from composer_replication.errors import ComposerError
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_conversations
from composer_replication.trainer.from_config.inputs import tools_of
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.hint_proof import HintProof
from composer_replication.trainer.offline_trainer import OfflineTrainer
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.teacher_keeper import TeacherKeeper


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach a model what its own hints say, and measure what it unlearned.")
    parser.add_argument("--model", default=None, help="folder or hub name of a causal LM; default: one built here")
    parser.add_argument("--run", default=None, help="run directory with sites in it; default: one built here")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=None, help="default: 1e-4, with the small world 2e-3")
    parser.add_argument("--budget", type=int, default=4096, help="most tokens of one tree")
    parser.add_argument("--keep", default=None, metavar="FOLDER", help="where to leave model, logs and run")
    parser.add_argument("--pretraining-steps", type=int, default=200, help="of the model that is built here")
    args = parser.parse_args(argv)
    if (args.model is None) != (args.run is None):
        parser.error("--model and --run go together")
    return args


def build_world(folder: Path, num_steps: int) -> tuple[str, str]:
    """A model and tokenizer, logs of it at work, and a run directory of those logs with sites, hints and pairs."""
    import world

    print("teaching a small model its habits, and to obey hints ...")
    tokenizer = world.build_tokenizer()
    model = world.new_model(tokenizer)
    world.teach(model, tokenizer, num_steps=num_steps)
    for part in (tokenizer, model):
        part.save_pretrained(folder / "model")
    (folder / "logs").mkdir()
    world.write_logs(folder / "logs")
    for command in (["ingest", str(folder / "logs"), "-o", str(folder / "run")], ["sites", str(folder / "run")]):
        if crf(command):
            raise SystemExit(1)
    run = RunDir.open(folder / "run")
    rows = world.right_calls(list(read_conversations(run)))
    run.write_jsonl("pairs", rows, schema="dpo_pair", version=2, sources=["conversations"])
    return str(folder / "model"), str(folder / "run")


def make_trainer(model: Any, sessions: LoggedSessions, output: Path, args: argparse.Namespace) -> OfflineTrainer:
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=args.steps,
        learning_rate=args.learning_rate or (1e-4 if args.model else 2e-3),
        lr_scheduler_type="constant",
        per_device_train_batch_size=1 if args.model else 4,
        save_strategy="no",
        report_to="none",
        logging_steps=max(args.steps // 5, 1),
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=0,
    )
    peft_config = None
    if args.model:
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    settings = ChannelSettings(alpha_sdpo=1.0, beta_replay=0.1, sdpo_jsd_beta=1.0)
    teacher = TeacherKeeper("trust_region")
    return OfflineTrainer(
        model, arguments, sessions, settings=settings, teacher=teacher, lm_weight=0.0, peft_config=peft_config
    )


def print_table(before: Sequence[HintProof], after: Sequence[HintProof], kinds: dict[str, str]) -> bool:
    """Means by kind of error; True where the erring call became less likely without a hint, for every kind."""
    rows: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for then, now in zip(before, after, strict=True):
        rows[kinds[then.site_id]].append((then.without_hint, then.with_hint, now.without_hint))
    print(f"\n{'log-prob of the erring call':<28} sites  before  with its hint   after")
    falls = []
    for kind, found in sorted(rows.items()):
        then, hinted, now = (sum(column) / len(found) for column in zip(*found, strict=True))
        print(f"{kind:<28} {len(found):5d} {then:7.2f} {hinted:14.2f} {now:7.2f}")
        falls.append(now < then)
    return bool(falls) and all(falls)


def train_and_measure(model_name: str, run_name: str, args: argparse.Namespace, output: Path) -> bool:
    run = RunDir.open(run_name)
    renderer = Renderer(load_tokenizer(model_name), tools=tools_of(run))
    model = AutoModelForCausalLM.from_pretrained(model_name, trust_remote_code=False, dtype=torch.float32)
    logged = LoggedSessions.from_run(run, renderer, budget=args.budget, responses="none")
    print("sessions:", {name: logged.counts[name] for name in ("conversations", "sites", "pairs", "tree_tokens")})
    sessions = logged.prove(model)
    kept = {proof.site_id for proof in sessions.proofs or () if proof.is_kept}
    print(f"hint proof: {len(kept)} of {len(sessions.proofs or ())} hints work")
    trainer = make_trainer(model, sessions, output, args)
    trainer.remove_callback(PrinterCallback)  # the figures are printed below
    trainer.train()
    for line in trainer.state.log_history:
        if "loss/sdpo_kl" in line:
            pairs = line.get("loss/trace_replay_dpo")
            shown = "" if pairs is None else f"  trace_replay_dpo {pairs:.4f}"
            print(f"step {line['step']:3d}  sdpo_jsd {line['loss/sdpo_kl']:.4f}{shown}")
    trained: Any = trainer.model
    before = [proof for proof in sessions.proofs or () if proof.site_id in kept]
    after = [proof for proof in logged.prove(trained.eval()).proofs or () if proof.site_id in kept]
    return print_table(before, after, _kinds(run))


def _kinds(run: RunDir) -> dict[str, str]:
    from composer_replication.runs.files import read_sites

    return {site.id: site.kind for site, _ in read_sites(run)}


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(args.keep or temporary)
            folder.mkdir(parents=True, exist_ok=True)
            if args.model is None:
                torch.set_num_threads(1)  # matrices this small only wait for each other
            names = (args.model, args.run) if args.model else build_world(folder, args.pretraining_steps)
            has_fallen = train_and_measure(*names, args, folder / "output")
    except (ComposerError, OSError) as error:
        print(f"FAILED: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    if not has_fallen:
        print("FAILED: an erring call is as likely as before", file=sys.stderr)
        return 1
    print("every kind of erring call is less likely now, with no hint in sight")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
