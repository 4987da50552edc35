"""A known path: reference log-probs are computed in `sessions.reference`."""

from composer_replication.trainer.sessions.reference import ReferenceLogprobs, precompute_ref_logprobs

__all__ = ["ReferenceLogprobs", "precompute_ref_logprobs"]
