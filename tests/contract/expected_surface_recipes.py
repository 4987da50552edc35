"""The public names of the Monarch recipe, as they are without Monarch. Same notation as expected_surface.py."""

from __future__ import annotations

_ACTORS = ("GeneratorActor", "RewarderActor", "TeacherPoolActor", "TrainerActor")

NEW_RECIPES = {
    "recipes.monarch.actors": dict.fromkeys(_ACTORS, "(settings)"),
    "recipes.monarch.run": {
        "ActorRun": "(settings, rows, *, on_event=None)",
        "RunSettings": (
            "(*, model, folder, num_batches, prompts_per_batch, rewards, batch, loss=<factory>, trainer=<factory>, "
            "generator=<factory>, teachers=(), max_total_usd=5.0, agreement_threshold=2, max_deaths=3)"
        ),
    },
}

MEMBERS_RECIPES = {
    "TrainerActor": {"train_outer_step": "(batch_id)", "num_batches": "()"},
    "GeneratorActor": {"rollout": "(prompts, *, batch_id=None, version=None)"},
    "RewarderActor": {"score": "(completions, *, rows=None)"},
    "TeacherPoolActor": {"pairs": "(states)", "replay": "(states)", "spent": "()"},
    "ActorRun": {"actors": "property", "step": "(number)", "train": "()"},
}
