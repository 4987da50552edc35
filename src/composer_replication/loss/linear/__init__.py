"""Compute losses from hidden rows and the LM head: exact, in tiles, with no (N, V) tensor kept for backward.

head            the LM head, weighted sums of teachers' heads, matrix products, and sizes of tiles
weighted        a divergence or cross-entropy as a weighted sum over rows, with gradients from the forward pass
logprobs        log-probs of given tokens, differentiable per row; the statistics that row weights need
tile_losses     the values and gradients of one tile of logits
gradients       the loop over all tiles, the products of their gradients, and deferred checks
kernels         the calls of Triton kernels, and the choice between Triton and torch
triton_kernels  the kernels, imported only if they are used
"""

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
