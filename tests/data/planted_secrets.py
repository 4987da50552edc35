"""Fake secrets in realistic texts, and texts that hold none: what the scrubber is judged by (see README.md here).

Nothing here is a literal key: every secret is made from parts by a seeded generator, the same on every machine.
"""

from __future__ import annotations

from data.planted_secrets_cloud import cloud_cases
from data.planted_secrets_encoded import encoded_cases
from data.planted_secrets_labels import label_cases
from data.planted_secrets_negatives import negative_cases
from data.planted_secrets_types import PLACES, WINDOW, Maker, Negative, Planted, readings, survivors
from data.planted_secrets_vendors import vendor_cases

__all__ = ["PLACES", "WINDOW", "Negative", "Planted", "negatives", "planted", "readings", "survivors"]


def planted() -> list[Planted]:
    """Every planted secret, in a fixed order."""
    groups = {"vendors": vendor_cases, "cloud": cloud_cases, "labels": label_cases, "encoded": encoded_cases}
    return [case for name, cases in groups.items() for case in cases(Maker(f"planted secrets: {name}"))]


def negatives() -> list[Negative]:
    """Every text that has to come back unchanged, in a fixed order."""
    return list(negative_cases(Maker("planted secrets: negatives")))
