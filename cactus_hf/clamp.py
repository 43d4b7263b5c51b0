"""The law nearest to the target, by any f-divergence, among those that accept as many drafts.

For a target's law q and a draft's p it is h = q clip(p / q, b, a), with b <= 1 <= a such that it sums to 1. The ratios
are sorted once. Then a, b and the divergence are known for every mass that h takes from what the draft prefers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .divergences import DIVERGENCES, PARTS, STEPS, Divergence


class _Ratios(NamedTuple):
    """The tokens of each row [N, V] by rising p / q. Sums [N, V + 1] are of those before a place, or from it on."""

    ratio: Tensor
    target_before: Tensor
    draft_before: Tensor
    target_from: Tensor
    draft_from: Tensor
    lowered: Tensor  # [N, V] mass that a = ratio takes from the tokens above it, negative: rising
    raised: Tensor  # [N, V] mass that b = ratio takes to lift those below it
    terms_below: Tensor  # of the divergence of the draft: from a place on, of ratios below 1
    terms_above: Tensor  # before a place, of the others


def clamp_bounds(target_probs: Tensor, draft_probs: Tensor, budget: float | Tensor, divergence: str) -> Tensor:
    """
    The bounds of the ratio p / q within which a law has at most the divergence `budget` from the target.

    Args:
        target_probs, draft_probs (`Tensor` of shape `[..., V]`, float64):
            Laws. Ratios have no bound where the target is 0: no h is positive there.
        budget (`float` or `Tensor` that broadcasts against `[...]`):
            0 or more; of D_f(h || q).
        divergence (`str`):
            Its name, as in [`gamma`].

    Returns:
        `Tensor` of shape `[..., 2]`: b in [0, 1] and a in [1, inf]. Both are 1 at budget 0. Where the draft itself is
        within the budget, they are 0 and `inf`, unless it needs to be lifted for what it has off the target's support.
    """
    shape, vocab_size = target_probs.shape[:-1], target_probs.shape[-1]
    rows = (probs.reshape(-1, vocab_size) for probs in (target_probs, draft_probs))
    target, draft = (probs / probs.sum(-1, keepdim=True) for probs in rows)
    kind = DIVERGENCES[divergence]
    limit = budget if isinstance(budget, Tensor) else target.new_full((), budget)
    limit = limit.expand(shape).reshape(-1, 1)
    outside = torch.where(target > 0, 0.0, draft).sum(-1, keepdim=True)
    ratios = _sort(target, torch.where(target > 0, draft, 0.0), kind)
    most = (draft - target).clamp(min=0).where(target > 0, 0.0).sum(-1, keepdim=True)  # what a = 1 takes
    inner = torch.arange(1, PARTS, dtype=target.dtype, device=target.device)

    def is_within(kept: Tensor) -> Tensor:
        return _divergence(ratios, kind, most - kept, outside) <= limit

    # How much of it h keeps: the more, the larger the divergence
    low, width = torch.zeros_like(most), most
    for _ in range(STEPS):
        width = width / PARTS
        low = low + width * is_within(low + width * inner).sum(-1, keepdim=True)
    fits = is_within(most)
    below, above, *_ = _bounds(ratios, torch.where(fits, 0.0, most - low), outside)
    above = torch.where(fits, torch.inf, above)
    below = torch.where(fits & (outside == 0), 0.0, below)
    return torch.where(limit > 0, torch.cat([below, above], -1), 1.0).view(*shape, 2)


def clamp_law(target_probs: Tensor, draft_probs: Tensor, bounds: Tensor) -> Tensor:
    """h = clip(p, b q, a q), 0 where the target is; `bounds` `[..., 2]` goes with rows `[..., V]`."""
    below, above = bounds.unbind(-1)
    return clip(target_probs, draft_probs, below.unsqueeze(-1), above.unsqueeze(-1))


def clip(target_prob: Tensor, draft_prob: Tensor, below: Tensor, above: Tensor) -> Tensor:
    clipped = torch.maximum(torch.minimum(draft_prob, above * target_prob), below * target_prob)
    return torch.where(target_prob > 0, clipped, 0.0)


def _sort(target: Tensor, draft: Tensor, kind: Divergence) -> _Ratios:
    # Where the target is 0 so is the draft, here: at ratio 1 they add nothing to any sum
    ratio = torch.where(target > 0, draft / target, 1.0).clamp(max=torch.finfo(target.dtype).max)
    ratio, order = ratio.sort(-1)
    target, draft = target.gather(-1, order), draft.gather(-1, order)
    target_before, draft_before = _sums_before(target), _sums_before(draft)
    target_from, draft_from = _sums_from(target), _sums_from(draft)
    terms = kind.terms(draft, target)
    return _Ratios(
        ratio,
        target_before,
        draft_before,
        target_from,
        draft_from,
        ratio * target_from[:, :-1] - draft_from[:, :-1],
        ratio * target_before[:, :-1] - draft_before[:, :-1],
        # From the middle outwards, as the terms can be infinite at the ends
        _sums_from(terms.where(ratio < 1, 0.0)),
        _sums_before(terms.where(ratio >= 1, 0.0)),
    )


def _bounds(ratios: _Ratios, taken: Tensor, outside: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b and a [N, K] for masses that are taken, and the first place not below b and the first above a."""
    lifted = taken + outside
    bottom = torch.searchsorted(ratios.raised, lifted)
    top = torch.searchsorted(ratios.lowered, -taken, right=True)
    share = ratios.target_before.gather(-1, bottom)
    below = torch.where(share > 0, (ratios.draft_before.gather(-1, bottom) + lifted) / share, ratios.ratio[:, :1])
    share = ratios.target_from.gather(-1, top)
    above = torch.where(share > 0, (ratios.draft_from.gather(-1, top) - taken) / share, ratios.ratio[:, -1:])
    return below.clamp(max=1), above.clamp(min=1), bottom, top


def _divergence(ratios: _Ratios, kind: Divergence, taken: Tensor, outside: Tensor) -> Tensor:
    below, above, bottom, top = _bounds(ratios, taken, outside)
    low, high = ratios.target_before.gather(-1, bottom), ratios.target_from.gather(-1, top)
    between = ratios.terms_below.gather(-1, bottom) + ratios.terms_above.gather(-1, top)
    return between + kind.terms(below * low, low) + kind.terms(above * high, high)


def _sums_before(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


def _sums_from(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.flip(-1).cumsum(-1).flip(-1), (0, 1))
