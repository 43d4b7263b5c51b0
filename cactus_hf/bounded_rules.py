"""Rules to compare Cactus with whose emitted law has a known bound: lenience, and the best law within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor

from .acceptance import AcceptanceRule, Drafted, keep_at_most
from .clamp import clamp_bounds, clip
from .divergences import check_divergence
from .parameters import Parameter, check_delta, check_parameter, per_row


@dataclass(frozen=True, eq=False)
class Lenience(AcceptanceRule):
    """
    Speculative sampling with drafts judged by q / leniency instead of q (arXiv 2211.17192, appendix A.5).

    The law emitted lies between the draft's and the target's at every token, and is nowhere above q / leniency: so
    KL(h || q) is at most -ln(leniency) nats.

    Args:
        leniency (`float` or `Tensor` of shape `[B]`):
            Above 0 and at most 1, which is speculative sampling.
    """

    leniency: Parameter

    shares_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        need = "above 0 and at most 1 (which is lossless)"
        checked = check_parameter("leniency", self.leniency, lambda x: (x > 0) & (x <= 1), need)
        object.__setattr__(self, "leniency", checked)

    def accept(self, drafted: Drafted) -> Tensor:
        target_prob = drafted.target_prob
        return keep_at_most(target_prob / per_row(self.leniency, target_prob), drafted.draft_prob)

    def residual_scales(self, drafted: Drafted) -> tuple[float, float]:
        return 1.0, 1.0


@dataclass(frozen=True, eq=False)
class Mentored(AcceptanceRule):
    """
    The law with the highest acceptance within a budget of the target (mentored decoding, arXiv 2609.30474).

    It is h = clip(p, b q, a q) with b <= 1 <= a, or the draft's law where that is within the budget and the target can
    emit all of it. As h does not depend on the drafted token, it is emitted exactly, and D(h || q) is at most `budget`
    at every position. It reads, and sorts, the whole rows of every drafted position. Drafts without probabilities
    count as laws of one token.

    Args:
        budget (`float` or `Tensor` of shape `[B]`):
            Of D(h || q), 0 (speculative sampling) or more, `inf` allowed; in nats for `"kl"`, `"reverse_kl"`, `"js"`.
        divergence (`str`, *optional*, defaults to `"kl"`):
            D, as in [`gamma`].
    """

    budget: Parameter
    divergence: str = "kl"

    needs: ClassVar[frozenset[str]] = frozenset({"rows"})
    shares_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_delta(self.budget, "budget"))
        check_divergence(self.divergence)

    def read_rows(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        budget = per_row(self.budget, target_probs[..., 0])
        return clamp_bounds(target_probs, draft_probs, budget, self.divergence)

    def accept(self, drafted: Drafted) -> Tensor:
        below, above = cast(Tensor, drafted.from_rows).unbind(-1)
        law_prob = clip(drafted.target_prob, drafted.draft_prob, below, above)
        return keep_at_most(law_prob, drafted.draft_prob)

    def residual_scales(self, drafted: Drafted) -> tuple[Tensor, float]:
        # (h - p)_+: h is above p just where it is b q
        return cast(Tensor, drafted.from_rows)[..., 0], 1.0
