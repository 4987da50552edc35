"""What must hold in every world of the model, whatever happened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer_replication.diloco.rounds.records import RoundOutcome

if TYPE_CHECKING:
    from round_model import World


def violations(world: World) -> Iterator[str]:
    """What must never be, whatever happened."""
    for step, each in enumerate(world.rounds):
        if len(each.commits) > 1:
            yield f"round {step} was committed in {len(each.commits)} ways"
        for attempt, outcome in each.commits:
            seal = each.seals[attempt]
            if seal is None or seal.members != outcome.members:
                yield f"round {step} was committed with others than those who were sealed"
            yield from wrong_members(world, step, outcome)
            shards = max(offer.num_shards for offer in each.offers)
            if any((attempt, shard) not in each.means for shard in range(shards)):
                yield f"round {step} was committed without all of its mean"
    for replica in world.replicas:
        for step, outcome in enumerate(replica.followed, start=replica.step - len(replica.followed)):
            if world.rounds[step].commit != outcome:
                yield f"rank {replica.rank} followed another commit of round {step}"
    bases: dict[int, set[str]] = {}
    for replica in world.replicas:
        bases.setdefault(replica.step, set()).add(replica.base)
    yield from (f"two histories at step {step}: {each}" for step, each in bases.items() if len(each) > 1)


def wrong_members(world: World, step: int, outcome: RoundOutcome) -> Iterator[str]:
    offers = {offer.id: offer for offer in world.rounds[step].offers}
    ranks = [member.id.rank for member in outcome.members]
    if ranks != sorted(set(ranks)):
        yield f"round {step} counts a rank twice or out of order: {ranks}"
    if not any(member.weight for member in outcome.members):
        yield f"round {step} averages nothing"
    sizes = sorted(offers[member.id].largest for member in outcome.members if offers[member.id].weight)
    for member in outcome.members:
        if offers[member.id].base != outcome.base:
            yield f"round {step} averages old weights: {member.id}"
        is_wild = offers[member.id].largest > max(1000 * sizes[(len(sizes) - 1) // 2], 10)
        if member.weight != (0 if is_wild else offers[member.id].weight):
            yield f"round {step} gives {member.id} another weight"
