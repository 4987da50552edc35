"""Provide the reference log-probs in `sessions.reference` under the path from which users import them."""

from composer_replication.trainer.sessions.reference import ReferenceLogprobs, precompute_ref_logprobs

__all__ = ["ReferenceLogprobs", "precompute_ref_logprobs"]
