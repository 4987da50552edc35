"""Rules of your own, tried before the built-in ones in every `find_error_sites` of this process."""

from __future__ import annotations

from composer_replication.errors import InputError, explain
from composer_replication.sites.rule import FailureRule

_registered: list[FailureRule] = []


def register_rule(rule: FailureRule) -> None:
    """Try this rule first from now on; the one registered first goes first."""
    if not isinstance(rule, FailureRule):
        raise InputError(explain("rule", got=type(rule).__name__, expected="a FailureRule, as `rule(...)` makes one"))
    _registered.append(rule)


def unregister_rule(rule: FailureRule) -> None:
    """Take back what `register_rule` was given."""
    if rule not in _registered:
        raise InputError(explain("rule", got=rule.kind, expected="a rule that was registered"))
    _registered.remove(rule)


def registered_rules() -> tuple[FailureRule, ...]:
    return tuple(_registered)
