"""Losses straight from hidden rows and the LM-head weight: exact, in tiles, with no (N, V) tensor kept for backward.

head           the LM head and sums of teachers' heads
weighted       a divergence or cross-entropy as a weighted sum over rows, gradients made in the forward pass
logprobs       log-probs of chosen tokens, differentiable per row
row_stats      what a row weight needs to know about student and teacher
tile_losses    one tile of logits in, the rows' values and gradients out
gradients      the walk over all tiles, and the products of their gradients
products       the three matrix products, in the right precision
tiles          how many rows are worked on at once
deferred       checks on GPU results that do not make the host wait
kernels        how a Triton kernel is called, where there is one
triton_rows    kernels of the divergences
triton_tokens  kernels of chosen tokens
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
