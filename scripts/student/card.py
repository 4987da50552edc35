"""What the student does, measured on held-out tasks: success, failing calls by kind, and what hints change.

python scripts/student/card.py [--model FOLDER] [--write] [--easy N ...]

Without `--write` the figures are compared with the committed card, and a figure outside its interval there is an error.
Turns are sampled at temperature 1 with a seed an episode, in fp32: the same figures on the same machine, and on others
up to a turn that rounding decides.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from acting import Acting, Retrial, hinted_sites
from card_table import write_page
from decoding import Decoder, load_model
from transformers import AutoTokenizer

from composer_replication.envs.student import student_folder
from composer_replication.envs.workspace import Difficulty, TestRunner

CARD = "card.json"
# Tasks 0 to 149 and 500 to 649 were looked at while the student was made: what is stated is measured on others.
FIRST_SEED = 700
SIZES: dict[Difficulty, int] = {"easy": 150, "medium": 40, "hard": 20}
ROOM: dict[Difficulty, int] = {"easy": 1600, "medium": 2500, "hard": 3500}
TRIES = 1  # of each state and condition
CALLS = 3  # of a try: an error that is put off is not avoided
CONDITIONS = ("no hint", "own hint", "another kind's hint")
_DRAWS = 2000


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95% interval of a share."""
    if not total:
        return 0.0, 1.0
    z, share = 1.96, hits / total
    middle, spread = share + z * z / (2 * total), z * ((share * (1 - share) + z * z / (4 * total)) / total) ** 0.5
    return max(0.0, (middle - spread) / (1 + z * z / total)), min(1.0, (middle + spread) / (1 + z * z / total))


def over_episodes(values: Sequence[Sequence[Any]], figure: Callable[[list[Any]], float]) -> tuple[float, float]:
    """95% interval of a figure by drawing episodes again: calls of one episode are not independent."""
    draw = random.Random(0)
    drawn = sorted(figure([each for own in draw.choices(values, k=len(values)) for each in own]) for _ in range(_DRAWS))
    return drawn[int(0.025 * _DRAWS)], drawn[int(0.975 * _DRAWS)]


def act(model: torch.nn.Module, tokenizer: Any, runner: TestRunner, difficulty: Difficulty, count: int) -> list[Acting]:
    episodes = [
        Acting(tokenizer, runner, seed, difficulty, random.Random(f"card:{difficulty}:{seed}"))
        for seed in range(FIRST_SEED, FIRST_SEED + count)
    ]
    Decoder(model, end=tokenizer.eos_token_id, room=ROOM[difficulty]).run(episodes)
    return episodes


def figures_of(episodes: Sequence[Acting]) -> dict[str, Any]:
    """Success, calls that fail by kind, and sizes."""
    solved = [episode.workspace.reward().solved for episode in episodes]
    calls = [[step.outcome.kind or "" for step in episode.steps] for episode in episodes]
    num_calls = sum(map(len, calls))
    kinds = Counter(kind for own in calls for kind in own if kind)
    low, high = over_episodes(calls, lambda each: 100 * sum(map(bool, each)) / max(1, len(each)))
    return {
        "episodes": len(episodes),
        "success": _rounded(sum(solved) / len(solved), *wilson(sum(solved), len(solved))),
        "invalid_calls_per_100": _rounded(100 * sum(kinds.values()) / max(1, num_calls), low, high),
        "invalid_by_kind_per_100": {kind: round(100 * count / num_calls, 2) for kind, count in kinds.most_common()},
        "malformed_turns_per_100_episodes": round(100 * sum(each.is_malformed for each in episodes) / len(episodes), 2),
        "calls_per_episode": round(num_calls / len(episodes), 2),
        "tokens_per_episode": round(sum(len(each.prompt_ids) + len(each.ids) for each in episodes) / len(episodes)),
        "sampled_tokens_per_episode": round(sum(sum(each.sampled) for each in episodes) / len(episodes)),
    }


def hint_figures(model: torch.nn.Module, tokenizer: Any, episodes: Sequence[Acting]) -> dict[str, Any]:
    """How often a turn that erred errs in the same way when it is taken again, by the hint before it."""
    trials: list[tuple[int, str, str, Retrial]] = []
    for number, (episode, found) in enumerate(zip(episodes, hinted_sites(tokenizer, episodes), strict=True)):
        for taught in found.turns:
            if taught.wrong_ids is None:
                continue
            turn = int(taught.turn_id.rpartition("-")[2])
            contexts = (
                found.sequence.ids[: taught.start],
                taught.teacher_ids[: taught.teacher_start].tolist(),
                taught.wrong_ids[: taught.wrong_start].tolist(),
            )
            for condition, context in zip(CONDITIONS, contexts, strict=True):
                for attempt in range(TRIES):
                    draw = random.Random(f"{episode.difficulty}:{episode.seed}:{turn}:{condition}:{attempt}")
                    retrial = Retrial(tokenizer, context, episode.state_before(turn), draw, CALLS)
                    trials.append((number, taught.kind, condition, retrial))
    Decoder(model, end=tokenizer.eos_token_id, room=ROOM["easy"] + 900).run([each[3] for each in trials])
    by_episode: dict[int, list[Tried]] = defaultdict(list)
    for number, kind, condition, retrial in trials:
        first = retrial.kinds[0] if retrial.kinds else "malformed"  # no room left for a turn
        again = Tried(kind, condition, first == kind, first is not None, kind in retrial.kinds)
        by_episode[number].append(again)
    return _hint_table(list(by_episode.values()))


class Tried(NamedTuple):
    """A turn taken again: with the same error, with any, with the same one now or in the calls that follow."""

    kind: str
    condition: str
    same: bool
    failed: bool
    soon: bool


def _rate(tries: Sequence[Tried], condition: str, column: str = "same", kind: str | None = None) -> float:
    own = [getattr(each, column) for each in tries if each.condition == condition and kind in (None, each.kind)]
    return sum(own) / len(own) if own else 0.0


def _times_rarer(tries: Sequence[Tried], column: str = "same") -> float:
    """Half an error is added on both sides, so that none at all is no infinity."""
    count = sum(each.condition == CONDITIONS[1] for each in tries) or 1
    own, others = (_rate(tries, condition, column) * count + 0.5 for condition in CONDITIONS[1:])
    return others / own


def _hint_table(values: list[list[Tried]]) -> dict[str, Any]:
    every = [each for own in values for each in own]

    def shown(figure: Callable[[list[Tried]], float]) -> dict[str, float]:
        return _rounded(figure(every), *over_episodes(values, figure))

    def rates(column: str) -> dict[str, Any]:
        return {name: shown(partial(_rate, condition=name, column=column)) for name in CONDITIONS}

    kinds = Counter(each.kind for each in every)
    return {
        "sites": len(every) // (TRIES * len(CONDITIONS)),
        "tries_each": TRIES,
        "calls_of_a_try": CALLS,
        "same_error": rates("same"),
        "any_error": {name: round(_rate(every, name, "failed"), 4) for name in CONDITIONS},
        "same_error_soon": rates("soon"),
        "times_rarer_than_with_another_kinds": shown(_times_rarer),
        "times_rarer_soon": shown(partial(_times_rarer, column="soon")),
        "same_error_by_kind": {
            kind: {"sites": count // (TRIES * len(CONDITIONS))}
            | {name: round(_rate(every, name, kind=kind), 4) for name in CONDITIONS}
            for kind, count in kinds.most_common()
        },
    }


def _rounded(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": round(value, 4), "low": round(low, 4), "high": round(high, 4)}


def measure(folder: Path, sizes: dict[Difficulty, int], device: str = "cpu") -> dict[str, Any]:
    model, tokenizer, runner = load_model(str(folder), device), AutoTokenizer.from_pretrained(folder), TestRunner()
    began = time.perf_counter()
    card: dict[str, Any] = {"weights_sha256": weights_hash(folder), "sizes": dict(sizes)}
    for difficulty, count in sizes.items():
        episodes = act(model, tokenizer, runner, difficulty, count) if count else []
        if episodes:
            card[difficulty] = figures_of(episodes)
        if difficulty == "easy":
            card["seconds_acting_easy"] = round(time.perf_counter() - began, 1)
            card["hints"] = hint_figures(model, tokenizer, episodes)
    card["seconds"] = round(time.perf_counter() - began, 1)
    return card


def weights_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def differences(measured: Any, committed: Any, path: str = "") -> list[str]:
    """Figures that are not in the committed card's interval; those without one may differ."""
    if isinstance(committed, dict) and "low" in committed:
        is_inside = committed["low"] - 1e-9 <= measured["value"] <= committed["high"] + 1e-9
        return [] if is_inside else [f"{path}: {measured['value']}, committed {committed}"]
    if isinstance(committed, dict):
        return [
            line
            for key, value in committed.items()
            if key in measured
            for line in differences(measured[key], value, f"{path}/{key}")
        ]
    return [f"{path}: another file"] if path.endswith("sha256") and measured != committed else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=student_folder())
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--device", default="cpu")
    for difficulty, count in SIZES.items():
        parser.add_argument(f"--{difficulty}", type=int, default=count)
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order: the same turns are sampled again
    card = measure(options.model, {difficulty: getattr(options, difficulty) for difficulty in SIZES}, options.device)
    print(json.dumps(card, indent=2))
    if options.write:
        (options.model / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        if options.model == student_folder():
            write_page(options.model.parent / "README.md", card)
        return
    committed = json.loads((options.model / CARD).read_text(encoding="utf-8"))
    wrong = differences(card, committed)
    print("\n".join(wrong) or f"the committed card holds; {_same(card, committed)}")
    raise SystemExit(bool(wrong))


def _same(card: dict[str, Any], committed: dict[str, Any]) -> str:
    keys = [key for key in committed if "seconds" not in key]
    return "every figure is the same" if all(card[key] == committed[key] for key in keys) else "within its intervals"


if __name__ == "__main__":
    main()
