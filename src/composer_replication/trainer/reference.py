"""An alias of `sessions.reference`, where reference log-probs are computed, for a path that users import."""

from composer_replication.trainer.sessions.reference import ReferenceLogprobs, precompute_ref_logprobs

__all__ = ["ReferenceLogprobs", "precompute_ref_logprobs"]
