"""The law nearest to the target, by any f-divergence, among those that accept as many drafts.

For a target's law q and a draft's p it is h = q clip(p / q, b, a), with b <= 1 <= a such that it sums to 1. The ratios
are sorted once. Then a, b and the divergence are known for every mass that h takes from what the draft prefers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .divergences import DIVERGENCES, Divergence


STEPS = 60  # halvings of the mass; what is left is below 2^-60


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
    limit = limit.expand(shape).reshape(-1)
    outside = torch.where(target > 0, 0.0, draft).sum(-1)
    ratios = _sort(target, torch.where(target > 0, draft, 0.0), kind)
    most = (draft - target).clamp(min=0).where(target > 0, 0.0).sum(-1)  # what a = 1 takes
    # `kept` is how much of it h keeps. The divergence grows with it
    low, high = torch.zeros_like(most), most
    fits = _divergence(ratios, kind, most - high, outside) <= limit
    for _ in range(STEPS):
        middle = (low + high) / 2
        is_low = _divergence(ratios, kind, most - middle, outside) <= limit
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    taken = torch.where(fits, 0.0, most - low)
    above, below, _ = _bounds(ratios, taken, outside)
    above = torch.where(fits, torch.inf, above)
    below = torch.where(fits & (outside == 0), 0.0, below)
    bounds = torch.stack([below, above], -1)
    return torch.where((limit > 0).unsqueeze(-1), bounds, 1.0).view(*shape, 2)


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


def _bounds(ratios: _Ratios, taken: Tensor, outside: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """a and b [N] for the mass that is taken, and the first place above a and the first not below b [N, 1]."""
    taken, lifted = taken.unsqueeze(-1), (taken + outside).unsqueeze(-1)
    top = torch.searchsorted(ratios.lowered, -taken, right=True)
    bottom = torch.searchsorted(ratios.raised, lifted)
    share = ratios.target_from.gather(-1, top)
    above = torch.where(share > 0, (ratios.draft_from.gather(-1, top) - taken) / share, ratios.ratio[:, -1:])
    share = ratios.target_before.gather(-1, bottom)
    below = torch.where(share > 0, (ratios.draft_before.gather(-1, bottom) + lifted) / share, ratios.ratio[:, :1])
    return above.clamp(min=1).squeeze(-1), below.clamp(max=1).squeeze(-1), (top, bottom)


def _divergence(ratios: _Ratios, kind: Divergence, taken: Tensor, outside: Tensor) -> Tensor:
    above, below, (top, bottom) = _bounds(ratios, taken, outside)
    between = ratios.terms_below.gather(-1, bottom) + ratios.terms_above.gather(-1, top)
    high, low = ratios.target_from.gather(-1, top).squeeze(-1), ratios.target_before.gather(-1, bottom).squeeze(-1)
    return between.squeeze(-1) + kind.terms(above * high, high) + kind.terms(below * low, low)


def _sums_before(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


def _sums_from(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.flip(-1).cumsum(-1).flip(-1), (0, 1))
