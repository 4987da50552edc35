"""An evaluation as `crf evaluate` writes it, drawn from a seed, for the tests of the report."""

from __future__ import annotations

import random
import re

from composer_replication.runs import RunDir
from composer_replication.runs.files import read_sites, write_evaluation
from composer_replication.runs.split import read_split_rows

SCRIPT = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">\'"--></style><svg/onload=hacked=1>'
_GAP = ("forced_gap", "good calls kept, erring calls avoided", "nats a token", "higher")
_RIGHT = ("forced_correction", "corrections preferred to erring calls", "nats a token", "higher")
_FAILING = ("sampled_failures", "predicted failures", "per 1,000 actions", "lower")
_FIGURES = (
    (*_GAP, "after", 0.412, 0.171),
    (*_GAP, "control", 0.031, 0.122),
    (*_GAP, "difference", 0.381, 0.19),
    (*_RIGHT, "after", 0.655, 0.24),
    (*_RIGHT, "control", -0.05, 0.2),
    ("forced_erring", "erring calls", "nats a token", "lower", "after", -0.351, 0.14),
    ("forced_good", "good calls", "nats a token", "higher", "after", 0.061, 0.09),
    (*_FAILING, "after", -38.2, 21.0),
    (*_FAILING, "control", 4.1, 24.5),
)
_FIRST = (
    "On {} held-out sessions the trained model is less likely to repeat the calls that failed, by 0.41 nats a token "
    "against good calls of the same sessions (95% interval 0.24 to 0.58).{}"
)
_SECOND = (
    "The same training with shuffled hints and pairs moves nothing (0.03, interval \N{MINUS SIGN}0.09 to 0.15), so "
    "what helped is what was taught."
)
_POWER = "With {} held-out failures in {} sessions, an effect below 0.15 nats a token could not be seen.{}"
_MOVES = {"erring": (-0.35, 0.0), "correction": (0.3, -0.05), "good": (0.06, 0.02)}


def evaluate(run: RunDir, drawn: random.Random, hostile: bool) -> None:
    """evaluation.json and the rows beside it."""
    mean = SCRIPT if hostile else ""
    sides = {row.conversation_id: row for row in read_split_rows(run) or ()}
    taught = [site for site, hint in read_sites(run) if hint is not None]
    judged = [site for site in taught if sides[site.conversation_id].side == "test"]
    write_evaluation(run, _record(judged, sides, mean))
    rows = {
        "evaluated": [row for site in judged for row in _decisions(site, sides, drawn)],
        "sampled": [row for site in judged[:40] for row in _samples(site, sides, mean)],
        "token_gaps": [_gaps(site, sides, drawn, mean) for site in taught[:200]],
    }
    for name, several in rows.items():
        run.write_jsonl(name, several, schema=name, version=1, sources=["conversations", "sites"])


def _record(judged, sides, mean: str) -> dict[str, object]:
    names = ("train", "validation", "test")
    count = {side: len({row.session for row in sides.values() if row.side == side}) for side in names}
    n, sessions = len(judged), count["test"]
    kinds = enumerate(sorted({site.kind for site in judged}))
    figures = [(*each, None) for each in _FIGURES]
    figures += [(*_GAP, "after", 0.5 - 0.22 * at, 0.31, kind) for at, kind in kinds]
    return {
        "created": "2026-11-01T11:00:00+00:00",
        "tool_version": "0.1.0",
        "models": {
            "before": {"name": f"tiny{mean}", "digest": "bf4ee2d84634d28f"},
            "after": {"name": "run/adapter", "digest": "77aa01c2ffe0191b"},
            "control": {"name": "run/control/adapter", "digest": "0c11", "what": "hints of another kind"},
        },
        "split": {
            "by": "time",
            "sessions": count,
            "sites": {**dict.fromkeys(names, 0), "test": n},
            "near_duplicates": 0,
        },
        "primary": "forced_gap",
        "settings": {},
        "verdict": {"word": "better", "sentences": [_FIRST.format(sessions, mean), _SECOND + mean]},
        "power": {
            "sites": n,
            "sessions": sessions,
            "smallest_effect": 0.15,
            "unit": "nats a token",
            "sentence": _POWER.format(n, sessions, mean),
        },
        "figures": [_figure(*each, n=n, sessions=sessions, mean=mean) for each in figures],
        "sampled": {"n_states": 40, "n_samples": 4, "temperature": 1.0, "by_arm": _arms(mean)},
        "not_run": {"gsm8k": f"no file was given{mean}"},
        "damage": [{"name": "loss_good_turns", "before": 1.52, "after": 1.49, "control": 1.5, "unit": f"nats{mean}"}],
        "drops": {f"near_duplicate{mean}": 2},
    }


def _figure(name, label, unit, better, arm, estimate, half, kind, *, n, sessions, mean):
    return {
        "name": name,
        "arm": arm,
        "label": label + mean,
        "unit": unit,
        "estimate": estimate,
        "low": estimate - half,
        "high": estimate + half,
        "n": n,
        "sessions": sessions,
        "better": better,
        "is_primary": name == "forced_gap" and kind is None,
        "kind": kind,
    }


def _arms(mean: str) -> dict[str, object]:
    counts = {"unparsed": 3, "unknown_tool": 1, "mean_tokens": 41.5}
    return {
        arm: {
            "failures": failing,
            **counts,
            "verdicts": {"fails": 3, f"ok{mean}": 9},
            "calls": {f"Bash{mean}": 60, "Read": 30, "Edit": edits},
        }
        for arm, failing, edits in (("before", 121.4, 10), ("after", 83.2, 14), ("control", 125.5, 9))
    }


def _decisions(site, sides, drawn: random.Random):
    for role, (after, control) in _MOVES.items():
        before = -1.0 + drawn.gauss(0, 0.4)
        yield {
            "id": f"{site.id}-{role}",
            "conversation_id": site.conversation_id,
            "session": sides[site.conversation_id].session,
            "turn": 0,
            "turn_id": site.turn_id,
            "site_id": site.id,
            "kind": site.kind,
            "role": role,
            "basis": "tool_name",
            "num_tokens": 6,
            "before": before,
            "after": before + after + drawn.gauss(0, 0.3),
            "control": before + control + drawn.gauss(0, 0.2),
        }


def _samples(site, sides, mean: str):
    for arm, verdict in (("before", "fails"), ("after", "ok"), ("control", "fails")):
        yield {
            "id": f"{site.id}-{arm}-0",
            "conversation_id": site.conversation_id,
            "session": sides[site.conversation_id].session,
            "turn": 0,
            "turn_id": site.turn_id,
            "state": "erring",
            "arm": arm,
            "sample": 0,
            "text": f'Edit {{"file_path": "src/invoice.py"}}{mean}',
            "action": None,
            "tool": "Edit",
            "parsed": True,
            "known_tool": True,
            "verdict": verdict,
            "rule": mean or "no_match",
            "kind": site.kind,
            "same_as_logged": arm == "before",
            "same_as_correction": arm == "after",
            "tokens": 31,
        }


def _gaps(site, sides, drawn: random.Random, mean: str) -> dict[str, object]:
    call = (
        f'{{"name": "{site.tool}", "arguments": {{"command": "pyhton -m pytest -q", "description": "run the tests"}}}}'
    )
    tokens = re.findall(r"\s?\w+|\W", f"<tool_call>\n{call}\n</tool_call>{mean}")
    before = [drawn.choice((0.0, 0.0, 0.02, -0.1, -0.6, -2.1, -4.2, 0.4, 1.3)) for _ in tokens]
    return {
        "site_id": site.id,
        "conversation_id": site.conversation_id,
        "turn": 0,
        "side": sides[site.conversation_id].side,
        "tokens": tokens,
        "before": before,
        "after": [0.3 * each for each in before],
    }
