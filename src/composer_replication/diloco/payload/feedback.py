"""Error feedback: what rounding left out of a payload is added to the next one, so that nothing is lost for good."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from composer_replication.diloco.payload.formats import PayloadKind
from composer_replication.diloco.payload.vectors import rounded
from composer_replication.errors import ShapeError, explain


class ErrorFeedback:
    """The residual of one replica's payloads: about half a step of its block's integers for each number, at most.

    It lives in this process: a replica that is started again has lost it once, and such losses do not add up.
    `compress` changes nothing: a round may be aborted, and then what was sent counts for nothing. `keep` is called when
    the round was committed.
    """

    def __init__(self) -> None:
        self.residual: Tensor | None = None

    def compress(self, vector: Tensor, kind: PayloadKind) -> tuple[Tensor, Tensor]:
        """What to send, exactly as `decode_vector` will give it back, and the residual that is left to `keep`.

        Cut what to send at multiples of BLOCK_ELEMENTS, or the shards' blocks are others than the vector's.
        """
        compensated_vector = vector if self.residual is None else vector + self._fitting(self.residual, vector)
        sent = rounded(compensated_vector, kind)
        return sent, compensated_vector - sent

    def keep(self, residual: Tensor) -> None:
        """Send this with the next vector."""
        self.residual = residual

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.residual is None else {"residual": self.residual.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        residual = state.get("residual")
        self.residual = None if residual is None else residual.detach().to(torch.float32).clone()

    @staticmethod
    def _fitting(residual: Tensor, vector: Tensor) -> Tensor:
        if residual.shape != vector.shape:
            fix = "A residual belongs to one fragment of one model: keep an ErrorFeedback for each."
            raise ShapeError(
                explain("residual", got=tuple(residual.shape), expected=f"shape {tuple(vector.shape)}", fix=fix)
            )
        return residual.to(vector.device)
