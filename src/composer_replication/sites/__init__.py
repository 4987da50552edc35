"""Which turn erred, how, and whose doing it was. Only what the model did wrong may be taught."""

from composer_replication.sites.classify import classify
from composer_replication.sites.find import MIN_CONFIDENCE, find_error_sites
from composer_replication.sites.registry import register_rule, unregister_rule
from composer_replication.sites.rule import FailureRule, rule
from composer_replication.sites.taxonomy import BLAMES, KINDS, USUAL_BLAME, Verdict

__all__ = [
    "BLAMES",
    "KINDS",
    "MIN_CONFIDENCE",
    "USUAL_BLAME",
    "FailureRule",
    "Verdict",
    "classify",
    "find_error_sites",
    "register_rule",
    "rule",
    "unregister_rule",
]
