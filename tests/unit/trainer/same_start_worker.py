"""What each of two processes does in test_same_start.py: begin with what its rank has, and say what came of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def zeroed(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def adapted(seed: int, *, is_trained: bool) -> Any:
    import torch
    from offline_pieces import tiny
    from peft import LoraConfig, get_peft_model

    model = tiny()
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=not is_trained))


def on_meta(rank: int) -> Any:
    import torch
    from offline_pieces import tiny

    with torch.device("meta" if rank else "cpu"):
        return tiny()


def trainer_on(model: Any, folder: Path, sessions: Any = None, **options: Any) -> Any:
    from offline_pieces import sessions_of, trainer_of

    changes = {"ddp_backend": "gloo", "max_steps": 1}
    return trainer_of(folder, sessions or sessions_of(0, 1), model=model, arguments_changes=changes, **options)


def teacher_digest(kind: str, model: Any, folder: Path, *, by_hand: bool) -> str:
    """Of the start weights that the trainer's teacher copied, `by_hand` before the trainer is made."""
    from composer_replication.trainer.objective.fingerprint import weights_digest
    from composer_replication.trainer.teacher_keeper import TeacherKeeper

    keeper = TeacherKeeper(kind)  # pyright: ignore[reportArgumentType]
    if by_hand:
        keeper.attach(model)
    trainer_on(model, folder, teacher=keeper)
    assert keeper.model is not None
    return weights_digest(keeper.model)


def cases(rank: int, folder: Path) -> dict[str, Any]:
    """What each case returns, or the class and text of the error that it raises."""
    from offline_pieces import sessions_of, tiny

    from composer_replication.trainer.objective.fingerprint import weights_digest
    from composer_replication.trainer.same_start import share_start_weights

    def shared(model: Any, *, with_adapter: bool = False) -> str:
        share_start_weights(model)
        return weights_digest(model, with_adapter=with_adapter)

    def start() -> Any:
        return zeroed(tiny()) if rank else tiny()

    def references() -> list[float]:
        batches = trainer_on(start(), folder).train_dataset.batches()
        return [value for batch in batches for value in batch.pairs.chosen_reference.tolist()]

    return {
        "zeros": lambda: shared(start()),
        "zeros in bf16": lambda: shared(start().bfloat16()),
        "meta": lambda: shared(on_meta(rank)),
        "a fresh adapter": lambda: shared(adapted(rank, is_trained=False), with_adapter=True),
        "the same adapter": lambda: shared(adapted(0, is_trained=True), with_adapter=True),
        "frozen": lambda: teacher_digest("frozen", start(), folder, by_hand=False),
        "trust_region": lambda: teacher_digest("trust_region", start(), folder, by_hand=False),
        "ema": lambda: teacher_digest("ema", start(), folder, by_hand=False),
        "frozen, attached by hand": lambda: teacher_digest("frozen", start(), folder, by_hand=True),
        "references": references,
        "other weights": lambda: shared(tiny(rank)),
        "other dtype": lambda: shared(tiny().bfloat16() if rank else tiny()),
        "another adapter": lambda: shared(adapted(rank, is_trained=True)),
        "an adapter on one rank": lambda: shared(adapted(0, is_trained=bool(rank))),
        "no weights on rank 0": lambda: shared(tiny() if rank else zeroed(tiny())),
        "other sessions": lambda: trainer_on(tiny(), folder, sessions_of(rank, 2)),
        "references by hand": lambda: str(sessions_of(0).with_references(start()).reference_precision),
    }


def main(rank: int, port: int, folder: str) -> None:
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch.distributed as dist

    from composer_replication.errors import ComposerError

    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, case in cases(rank, Path(folder, f"out-{rank}")).items():
        try:
            value = case()
            found[name] = value if isinstance(value, str | list) else "done"
        except ComposerError as error:
            found[name] = [type(error).__name__, str(error)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
