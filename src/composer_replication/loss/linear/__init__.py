"""Losses straight from hidden rows and the LM-head weight: exact, in tiles, with no (N, V) tensor kept for backward."""

from composer_replication.loss.linear.head import LinearHead, TeacherTerm
from composer_replication.loss.linear.logprobs import linear_token_logprobs
from composer_replication.loss.linear.weighted import LinearLoss, linear_cross_entropy, linear_divergence

__all__ = [
    "LinearHead",
    "LinearLoss",
    "TeacherTerm",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_token_logprobs",
]
