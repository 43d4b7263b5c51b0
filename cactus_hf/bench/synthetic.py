"""An acceptance rule that is no rule: it accepts by lot, so that speed can be measured without trained weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, Drafted


@dataclass(frozen=True, eq=False)
class AcceptByLot(AcceptanceRule):
    """
    Keeps each drafted token with one probability, whatever the models say, and does otherwise the work of lossless
    speculative sampling. What comes out means nothing.

    Args:
        acceptance (`float`):
            The probability, between 0 and 1, of keeping a draft.
    """

    acceptance: float

    def accept(self, drafted: Drafted) -> Tensor:
        return torch.full_like(drafted.target_prob, self.acceptance)

    def residual_scales(self, drafted: Drafted) -> tuple[float, float]:
        return 1.0, 1.0
