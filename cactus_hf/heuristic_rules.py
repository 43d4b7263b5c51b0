"""Rules to compare Cactus with that judge a draft by the target's row alone: typical acceptance and top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, Drafted
from .parameters import Parameter, check_parameter, per_row


@dataclass(frozen=True, eq=False)
class TypicalAcceptance(AcceptanceRule):
    """
    Typical acceptance (arXiv 2401.10774): keep a token that is likely enough for how uncertain the target is.

    `n` is kept if q_n > min(epsilon, alpha exp(-H(q))), or if q_n = 1. The draft's probabilities play no part.

    Args:
        epsilon (`float` or `Tensor` of shape `[B]`, *optional*, defaults to 0.09):
            A probability above it is always enough.
        alpha (`float` or `Tensor` of shape `[B]`, *optional*, defaults to 0.3):
            Factor on exp(-H(q)), H in nats.
        recovery (`str`, *optional*, defaults to `"argmax"`):
            What replaces a rejected token: `"argmax"`, the target's most likely one (lowest id on ties), or
            `"sample"`, a draw from the target.
    """

    epsilon: Parameter = 0.09
    alpha: Parameter = 0.3
    recovery: str = "argmax"

    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    shares_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check_parameter("epsilon", self.epsilon, lambda x: x > 0, "above 0"))
        object.__setattr__(self, "alpha", check_parameter("alpha", self.alpha, lambda x: x > 0, "above 0"))
        if self.recovery not in ("argmax", "sample"):
            raise ValueError(f'`recovery` must be "argmax" or "sample"; got {self.recovery!r}.')

    def accept(self, drafted: Drafted) -> Tensor:
        target_prob = drafted.target_prob
        typical = per_row(self.alpha, target_prob) * torch.exp(-cast(Tensor, drafted.entropy))
        is_kept = (target_prob > typical.clamp(max=per_row(self.epsilon, target_prob))) | (target_prob == 1)
        return is_kept.to(target_prob.dtype)

    def residual_scales(self, drafted: Drafted) -> tuple[float, float] | None:
        return (1.0, 0.0) if self.recovery == "sample" else None

    def residual(self, target_probs: Tensor, draft_probs: Tensor, drafted: Drafted) -> Tensor:
        if self.recovery == "sample":
            return super().residual(target_probs, draft_probs, drafted)
        return torch.zeros_like(target_probs).scatter(-1, target_probs.argmax(-1, keepdim=True), 1.0)


@dataclass(frozen=True, eq=False)
class TopK(AcceptanceRule):
    """
    Keep a token that is among the target's `k` most likely; replace any other by a draw from the target.

    Args:
        k (`int` or integer `Tensor` of shape `[B]`, *optional*, defaults to 5):
            A token as likely as the k-th counts too; one that the target cannot emit never does.
    """

    k: Parameter = 5

    needs: ClassVar[frozenset[str]] = frozenset({"rank"})
    shares_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_parameter("k", self.k, lambda x: x >= 1, "above 0", is_integer=True))

    def accept(self, drafted: Drafted) -> Tensor:
        rank = cast(Tensor, drafted.rank)
        is_kept = (rank < per_row(self.k, rank)) & (drafted.target_prob > 0)
        return is_kept.to(drafted.target_prob.dtype)

    def residual_scales(self, drafted: Drafted) -> tuple[float, float]:
        return 1.0, 0.0
