"""Alias of `sessions.reference`, which computes reference log-probs; users import from this path."""

from composer_replication.trainer.sessions.reference import ReferenceLogprobs, precompute_ref_logprobs

__all__ = ["ReferenceLogprobs", "precompute_ref_logprobs"]
