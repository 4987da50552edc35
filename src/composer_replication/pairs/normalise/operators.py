"""The operators that run natively, by data-juicer's names, with its parameters and its defaults."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.pairs.normalise.document_dedup import DocumentDeduplicator
from composer_replication.pairs.normalise.ranges import Judge
from composer_replication.pairs.normalise.recipe import Step, refuse
from composer_replication.pairs.normalise.special_characters import SpecialCharactersFilter
from composer_replication.pairs.normalise.text_length import TextLengthFilter
from composer_replication.pairs.normalise.words_num import WordsNumFilter

Native = TextLengthFilter | WordsNumFilter | SpecialCharactersFilter | DocumentDeduplicator

NATIVE: dict[str, type[Native]] = {
    "text_length_filter": TextLengthFilter,
    "words_num_filter": WordsNumFilter,
    "special_characters_filter": SpecialCharactersFilter,
    "document_deduplicator": DocumentDeduplicator,
}
# How data-juicer spreads an operator over processes and machines; what is kept does not depend on it.
WITHOUT_EFFECT = frozenset(
    {
        *("accelerator", "adaptive_batching", "auto_op_parallelism", "batch_mode", "batch_size", "num_proc", "turbo"),
        *("cpu_required", "gpu_required", "mem_required", "memory", "num_cpus", "num_gpus"),
        *("ray_execution_mode", "runtime_env"),
    }
)


def native_operator(step: Step) -> Native:
    """The operator of a step; InputError for a name or a parameter that is not known."""
    made = NATIVE.get(step.operator)
    if made is None:
        fix = 'data-juicer\'s other filters run with DJNormalizer(..., backend="data_juicer").'
        refuse(step.where, step.operator, NATIVE, fix)
    fields = {field.name: field.default for field in dataclasses.fields(made)}
    given: dict[str, Any] = {}
    for name, value in step.parameters.items():
        if name in fields:
            given[name] = _checked(value, fields[name], f"{step.where}, {name!r}")
        elif name not in WITHOUT_EFFECT:
            refuse(step.where, name, {*fields, "text_key"})
    return made(**given)


def native_judge(step: Step) -> Judge:
    """A judge for one pass over the pairs."""
    return native_operator(step).judge()


def _checked(value: object, default: object, where: str) -> object:
    """A value of the kind its default has; limits are numbers, or null for none."""
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            expected = "true or false" if isinstance(default, bool) else "text"
            raise InputError(explain(where, got=repr(value), expected=expected))
    elif value is not None and (type(value) not in (int, float) or math.isnan(float(str(value)))):
        raise InputError(explain(where, got=repr(value), expected="a number, or null for no limit"))
    return value
