"""Pairs in, pairs worth training on out, and every drop counted under the operator that made it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from composer_replication.errors import InputError, explain
from composer_replication.pairs.normalise.data_juicer_backend import data_juicer_judge
from composer_replication.pairs.normalise.operators import Judge, native_judge
from composer_replication.pairs.normalise.pair_texts import check_pair, pair_text
from composer_replication.pairs.normalise.recipe import Recipe, Step, read_recipe
from composer_replication.types import DPOPair, Message

DEFAULT_RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "replaysim" / "default.yaml"
KEPT = "kept"

Backend = Literal["native", "data_juicer"]
_BACKENDS: dict[str, Callable[[Step], Judge]] = {"native": native_judge, "data_juicer": data_juicer_judge}
_FIELDS = frozenset({"state_id", "state_messages", "chosen", "rejected", "n_teachers_agreeing"})


@dataclass(slots=True)
class NormalizedDPOPair:
    """A pair with its answers as messages; `metadata` holds what else the pair carried, and what it went through."""

    state_id: str
    state_messages: list[Message]
    chosen_messages: list[Message]
    rejected_messages: list[Message]
    n_teachers_agreeing: int
    metadata: dict[str, Any]


class DJNormalizer:
    """Runs the operators of a data-juicer recipe over pairs, in order; `skip_dj` passes every pair through.

    `counts` is about the last call of `normalize`: "kept", and under each operator what it dropped. `DEFAULT_RECIPE` is
    the recipe that runs without a `recipe_path`.
    """

    DEFAULT_RECIPE: ClassVar[Path] = DEFAULT_RECIPE

    def __init__(
        self,
        recipe_path: str | os.PathLike[str] | None = None,
        *,
        skip_dj: bool = False,
        backend: Backend = "native",
    ) -> None:
        if backend not in _BACKENDS:
            raise InputError(explain("backend", got=repr(backend), expected=" or ".join(map(repr, _BACKENDS))))
        self.counts: dict[str, int] = {}
        self._judge_of = _BACKENDS[backend]
        self._recipe = (
            Recipe((), "") if skip_dj else read_recipe(self.DEFAULT_RECIPE if recipe_path is None else recipe_path)
        )
        self._judges()  # what is wrong in the recipe is said now, and not after the teachers were paid
        provenance = {"backend": backend, "recipe_sha256": self._recipe.sha256}
        self._mark: dict[str, Any] = {"skipped": True} if skip_dj else {"normalizer": provenance}

    def normalize(self, pairs: Iterable[DPOPair]) -> list[NormalizedDPOPair]:
        """The pairs that every operator keeps, in their order."""
        judges = self._judges()
        self.counts = dict.fromkeys([KEPT, *(step.reason for step, _ in judges)], 0)
        normalized_pairs: list[NormalizedDPOPair] = []
        for number, raw_pair in enumerate(pairs):
            pair = check_pair(raw_pair, number)
            reason = next((step.reason for step, keeps in judges if not keeps(pair_text(pair, step.text_key))), KEPT)
            self.counts[reason] += 1
            if reason == KEPT:
                normalized_pairs.append(self._normalized(pair))
        return normalized_pairs

    def _judges(self) -> list[tuple[Step, Judge]]:
        return [(step, self._judge_of(step)) for step in self._recipe.steps]

    def _normalized(self, pair: Mapping[str, Any]) -> NormalizedDPOPair:
        carried = {key: value for key, value in pair.items() if key not in _FIELDS}
        return NormalizedDPOPair(
            state_id=pair["state_id"],
            state_messages=list(pair["state_messages"]),
            chosen_messages=[{"role": "assistant", "content": pair["chosen"]}],
            rejected_messages=[{"role": "assistant", "content": pair["rejected"]}],
            n_teachers_agreeing=pair["n_teachers_agreeing"],
            metadata=carried | self._mark,
        )
