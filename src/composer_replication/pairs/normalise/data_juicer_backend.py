"""The same steps run by data-juicer itself: its operators called one by one, in this process.

Its executor is not used: it writes a job folder, logs and caches, and takes a hundred times as long. Two things that an
executor would get wrong here are ours as well: each call has its own statistics (operators of one kind share a name for
theirs, so the one on `rejected` would be handed the numbers of `chosen`), and the text of a whole pair is made by us.
Importing data-juicer replaces the handlers of loguru's logger.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from composer_replication.errors import InputError, explain
from composer_replication.optional import available, require
from composer_replication.pairs.normalise.operators import Judge
from composer_replication.pairs.normalise.recipe import Step, refuse

EXTRA = "replaysim"
# Filters on text alone, without a model or a list that would have to be downloaded.
RUNNABLE = frozenset(
    {
        *("alphanumeric_filter", "average_line_length_filter", "character_repetition_filter"),
        *("maximum_line_length_filter", "special_characters_filter", "text_length_filter", "word_repetition_filter"),
        *("words_num_filter", "document_deduplicator"),
    }
)
# Without these two, importing data-juicer fails, or runs `pip install` inside the user's environment.
_UNDECLARED = ("aiohttp", "ray")


def data_juicer_judge(step: Step) -> Judge:
    """A judge for one pass over the pairs; MissingExtraError without data-juicer."""
    operator = _operator(step)
    return _deduplicator(operator, step) if step.operator == "document_deduplicator" else _filter(operator, step)


def _operator(step: Step) -> Any:
    for package in ("data_juicer", *_UNDECLARED):
        if not available(package):
            require(package, extra=EXTRA)
    if step.operator not in RUNNABLE:
        refuse(step.where, step.operator, RUNNABLE)
    operators = require("data_juicer.ops.base_op", extra=EXTRA).OPERATORS
    require("data_juicer.ops", extra=EXTRA)  # fills the registry
    operator_class = operators.modules[step.operator]
    own_parameters = {
        name for name in inspect.signature(operator_class.__init__).parameters if name not in ("self", "args", "kwargs")
    }
    known_parameters = own_parameters | set(cast("Mapping[str, object]", operator_class._BASE_PARAMS))
    for name in step.parameters:
        if name not in known_parameters:  # data-juicer itself would ignore it
            refuse(step.where, name, known_parameters)
    try:
        return operator_class(text_key=step.text_key, **step.parameters)
    except (TypeError, ValueError) as error:
        raise InputError(f"{step.where}: data-juicer refuses these parameters: {error}") from error


def _filter(operator: Any, step: Step) -> Judge:
    statistics = require("data_juicer.utils.constant", extra=EXTRA).Fields.stats

    def is_kept(text: str) -> bool:
        batch = {step.text_key: [text], statistics: [{}]}
        (decision,) = operator.process_batched(operator.compute_stats_batched(batch))
        return bool(decision)

    return is_kept


def _deduplicator(operator: Any, step: Step) -> Judge:
    hash_name = require("data_juicer.utils.constant", extra=EXTRA).HashKeys.hash
    seen_hashes: set[str] = set()

    def is_new(text: str) -> bool:
        before = len(seen_hashes)
        try:
            seen_hashes.add(operator.compute_hash({step.text_key: text})[hash_name])
        except UnicodeEncodeError as error:
            expected = "text that is valid Unicode"
            raise InputError(
                explain(step.where, got=f"a lone surrogate ({error.reason})", expected=expected)
            ) from error
        return len(seen_hashes) > before

    return is_new
