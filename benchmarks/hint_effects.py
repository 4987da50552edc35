"""Score prepared calls after each of their hints, and print tables of the hint effects.

Scoring needs torch and transformers only, and printing needs only Python. The prefix of an item is run once. Its
variants follow as one batch that is padded at the end, where no token attends to the padding.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

NO_HINT = "none"
ITEMS_SCHEMA = "hint_items 2"
"""The same as `hint_items.SCHEMA`, which cannot be imported where this package is not installed."""
MEASURES = {"name": "tool's name", "first": "first differing argument token", "arguments": "arguments"}
_EVERY = 25
Effect = tuple[str, float]
"""A session, and a change of log-prob at one of its calls."""


def score(
    items: Path,
    model_name: str,
    out: Path,
    *,
    adapter: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    limit: int | None = None,
    temperatures: Sequence[float] = (),
) -> None:
    """Score every item with every hint, and write the sums of log-probs over its spans.

    For each of `temperatures` the logits are divided by it, under the name `hint@temperature`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    rows = _read_lines(items)
    head = next(rows)
    if head.get("schema") != ITEMS_SCHEMA:
        raise SystemExit(f"{items}: got {head.get('schema')!r}, expected {ITEMS_SCHEMA!r}: prepare it again")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    precision = getattr(torch, dtype or ("bfloat16" if device == "cuda" else "float32"))
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_name, dtype=precision, trust_remote_code=False, use_safetensors=True
    )
    if adapter is not None:
        from peft import PeftModel

        if not Path(adapter, "adapter_model.safetensors").is_file():  # PEFT would load a pickle instead
            raise SystemExit(f"{adapter}: got no adapter_model.safetensors, expected one")
        loaded = PeftModel.from_pretrained(loaded, adapter)
    model = loaded.to(device).eval()
    started, scored = time.monotonic(), list[dict[str, Any]]()
    for number, item in enumerate(islice(rows, limit), start=1):
        with torch.inference_mode():
            sums = _score_item(model, item, device, temperatures)
        kept = {key: item[key] for key in ("id", "session", "kind", "tool", "role", "is_held_out")}
        scored.append({**kept, "num_tokens": _sizes(item), "log_probs": sums})
        if number % _EVERY == 0:
            print(f"{number} items, {time.monotonic() - started:.0f} s", flush=True)
    seconds = time.monotonic() - started
    about = {
        "model": Path(model_name).name,
        "adapter": adapter and Path(adapter).name,
        "device": device,
        "dtype": str(precision),
        "seconds": round(seconds, 1),
    }
    warmer = [f"{name}@{temperature:g}" for temperature in temperatures for name in head["hints"]]
    written = {**about, "placement": head.get("placement"), "hints": [*head["hints"], *warmer], "items": scored}
    out.write_text(json.dumps(written), encoding="utf-8")
    print(f"{out}: {len(scored)} items in {seconds:.0f} s")


def _score_item(
    model: Any, item: Mapping[str, Any], device: str, temperatures: Sequence[float] = ()
) -> dict[str, dict[str, float]]:
    """Return by hint the log-prob of every span, summed over its tokens."""
    import torch

    prefix = torch.tensor([item["prefix"]], device=device)
    names = list(item["hints"])
    suffixes = [torch.tensor(item["hints"][name] + item["tail"], device=device) for name in names]
    batch = torch.nn.utils.rnn.pad_sequence(suffixes, batch_first=True, padding_value=int(prefix[0, 0]))
    cache = model(input_ids=prefix, use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(len(names))
    logits = model(input_ids=batch, past_key_values=cache, use_cache=True).logits
    sums: dict[str, dict[str, float]] = {}
    for row, name in enumerate(names):
        offset = len(item["hints"][name])
        first = offset + min(start for start, _ in item["spans"].values())
        tokens = suffixes[row][first:]
        rows = logits[row, first - 1 : first - 1 + len(tokens)].float()
        spans = {each: (offset + a - first, offset + b - first) for each, (a, b) in item["spans"].items()}
        for temperature in (1.0, *temperatures):
            found = (rows / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            shown = name if temperature == 1.0 else f"{name}@{temperature:g}"
            sums[shown] = {each: float(found[a:b].sum()) for each, (a, b) in spans.items()}
    return sums


def _sizes(item: Mapping[str, Any]) -> dict[str, int]:
    return {name: end - start for name, (start, end) in item["spans"].items()}


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


# ---- the tables


def read_scores(path: Path) -> dict[str, Any]:
    """Return the content of a file that `score` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def print_tables(
    path: Path,
    *,
    rounds: int = 2000,
    held_out: bool = False,
    read: Callable[[Path], dict[str, Any]] = read_scores,
) -> None:
    """Print the effect of each hint on erring and good calls, and the effects of the sites' own hints by kind.

    With `held_out` only test sessions count, which no warm-up was trained on. `read` is a reader for other file
    formats.
    """
    result = read(path)
    if held_out and any(item.get("is_held_out") is None for item in result["items"]):
        raise SystemExit(f"{path}: got items that do not say who is held out, expected those of a run that is split")
    items = [item for item in result["items"] if not held_out or item["is_held_out"]]
    effects = Effects(items)
    names = [name for name in result["hints"] if name.partition("@")[0] != NO_HINT and effects.of("site", name, "name")]
    sessions = {item["session"] for item in items}
    print(f"## {result['model']}: {effects.count('site')} sites, {effects.count('good')} good calls", end="")
    print(f", {len(sessions)} sessions, {result['dtype']} on {result['device']}, {result['seconds']} s\n")
    print("Change of log-prob in nats, mean over calls [95% interval over sessions]. Below 0: less likely.\n")
    for measure, words in MEASURES.items():
        print(f"### {words.capitalize()}\n")
        _print_rows(_comparison(effects, names, measure, rounds), ("hint", "calls", "erring", "good", "erring - good",
                    "own - other kind", "lowers erring"))  # fmt: skip
    print("### By kind: the sites' own hints, and those of other kinds\n")
    _print_rows(_by_kind(effects, names, rounds), ("kind", "hint", "sites", *MEASURES.values(), "arguments, per token"))


class Effects:
    """The change of log-prob by each hint, compared with no hint."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        self._items = {(item["role"], item["id"]): item for item in items}

    def count(self, role: str) -> int:
        return sum(key[0] == role for key in self._items)

    def kinds(self) -> list[str]:
        return sorted({item["kind"] for item in self._items.values()})

    def of(
        self, role: str, hint: str, measure: str, *, kind: str | None = None, per_token: bool = False
    ) -> list[Effect]:
        """Return the effect of a hint on each call in a role."""
        items = (item for key, item in self._items.items() if key[0] == role and kind in (None, item["kind"]))
        found = ((item["session"], _effect(item, hint, measure, per_token)) for item in items)
        return [(session, effect) for session, effect in found if effect is not None]

    def difference(self, hint: str, measure: str) -> list[Effect]:
        """Return for each site the effect on the erring call minus the effect on its good call."""
        return self._paired(hint, measure, lambda site: (self._items.get(("good", site["id"])), hint))

    def beside_other(self, hint: str, measure: str, *, kind: str | None = None) -> list[Effect]:
        """Return for each site the effect of its own hint minus that of a hint of another kind."""
        return self._paired(hint, measure, lambda site: (site, "other_kind" + "".join(hint.partition("@")[1:])), kind)

    def _paired(
        self,
        hint: str,
        measure: str,
        beside: Callable[[Mapping[str, Any]], tuple[Mapping[str, Any] | None, str]],
        kind: str | None = None,
    ) -> list[Effect]:
        found: list[Effect] = []
        for (role, _), site in self._items.items():
            if role != "site" or kind not in (None, site["kind"]):
                continue
            item, other_hint = beside(site)
            mine = _effect(site, hint, measure)
            other = None if item is None else _effect(item, other_hint, measure)
            if mine is not None and other is not None:
                found.append((site["session"], mine - other))
        return found


def _effect(item: Mapping[str, Any], hint: str, measure: str, per_token: bool = False) -> float | None:
    log_probs = item["log_probs"]
    if measure not in item["num_tokens"] or hint not in log_probs:
        return None
    _, at, temperature = hint.partition("@")
    change = log_probs[hint][measure] - log_probs[NO_HINT + at + temperature][measure]
    return change / max(1, item["num_tokens"][measure]) if per_token else change


def _comparison(effects: Effects, names: Iterable[str], measure: str, rounds: int) -> Iterator[tuple[object, ...]]:
    for name in names:
        erring = effects.of("site", name, measure)
        others = [] if name.startswith("other_kind") else effects.beside_other(name, measure)
        lowered = sum(change < 0 for _, change in erring) / max(1, len(erring))
        columns = (erring, effects.of("good", name, measure), effects.difference(name, measure), others)
        yield name, len(erring), *(mean_with_interval(column, rounds) for column in columns), f"{lowered:.0%}"


def _by_kind(effects: Effects, names: Sequence[str], rounds: int) -> Iterator[tuple[object, ...]]:
    for kind in effects.kinds():
        for name in names:
            found = [effects.of("site", name, measure, kind=kind) for measure in MEASURES]
            if not found[0]:
                continue
            per_token = effects.of("site", name, "arguments", kind=kind, per_token=True)
            yield kind, name, len(found[0]), *(mean_with_interval(each, rounds) for each in (*found, per_token))


def mean_with_interval(effects: Sequence[Effect], rounds: int, *, seed: int = 0) -> str:
    """Return the mean over calls as text, with an interval from a bootstrap over sessions."""
    if not effects:
        return ""
    by_session: dict[str, list[float]] = defaultdict(list)
    for session, change in effects:
        by_session[session].append(change)
    groups = [(sum(each), len(each)) for each in by_session.values()]
    mean = sum(total for total, _ in groups) / len(effects)
    if len(groups) < 2:
        return f"{mean:+.2f}"
    draw, means = random.Random(seed), list[float]()
    for _ in range(rounds):
        drawn = draw.choices(groups, k=len(groups))
        means.append(sum(total for total, _ in drawn) / sum(number for _, number in drawn))
    means.sort()
    return f"{mean:+.2f} [{means[int(rounds * 0.025)]:+.2f}, {means[int(rounds * 0.975)]:+.2f}]"


def _print_rows(rows: Iterable[Sequence[object]], columns: Sequence[str]) -> None:
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()
