"""Compute exact losses in tiles from hidden states and the LM head; no (N, V) tensor is kept for backward.

head            the LM head, terms of the teacher logits, matrix products, and tile sizes
weighted        weighted sums of a divergence or cross-entropy over rows; gradients in the forward pass
logprobs        log-probs of given tokens, differentiable per row; row statistics
tile_losses     the values and gradients of one tile of logits
gradients       the loop over tiles, the gradients of hidden states and head, and deferred checks
kernels         the choice between Triton and torch, and the calls of Triton kernels
triton_kernels  the Triton kernels, imported only if they are used
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
