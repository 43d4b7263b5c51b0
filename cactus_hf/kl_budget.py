"""Budgets of what is really emitted: at each position, the largest delta whose emitted law keeps within it.

With `q` the target's law, `p` the draft's and r = p / q, the law that Cactus emits (see `law.py`) is

    h(x) = min(p_x, gamma_x)                              where p_x > q_x
    h(x) = q_x (r_x + sum of w_n / Z_n (s_n - r_x)_+)     elsewhere

The sum goes over the n with w_n = p_n - gamma_n > 0, all of which have p_n > q_n; s_n = (1 - gamma_n) / (1 - q_n), and
Z_n is the sum over x of (s_n q_x - p_x)_+. So r is sorted once a position, with sums of q and p from the lowest r on.
Then a delta costs a look-up for each n that is left and a pass over the tokens. The divergence is summed as
q f(h / q - 1) with f(t) = (1 + t) log(1 + t) - t: no term is negative, so that a small sum does not drown in rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, Cactus, scale_of_others
from .parameters import Parameter, per_row
from .probabilities import laws_at, on_support


LEAST, LARGEST = -60.0, 200.0  # log2 of the deltas looked among: at both ends only rounding is left to change
CLOSE = 0.001  # in log2 as well: the delta found is at most .15 % below the largest
MOST_STEPS = 36  # deltas tried at a position; about ten do
SAFETY = 1e-9  # of the budget, kept back for what another order of summing would round otherwise


class Found(NamedTuple):
    """The delta of each position, and how far from the target the law is that it emits there."""

    delta: Tensor  # float64; inf where every delta keeps within the budget
    kl: Tensor  # float64, KL(h_alg || q) in nats
    tv: Tensor  # float64


# Of deltas [N], one a row: KL [N] and total variation [N]
Divergence = Callable[[Tensor], tuple[Tensor, Tensor]]


def has_budget(rule: AcceptanceRule | None) -> TypeGuard[Cactus]:
    """Whether the rule finds its delta at each position."""
    return isinstance(rule, Cactus) and rule.delta is None


def find_deltas(target_probs: Tensor, draft_probs: Tensor, rule: Cactus) -> Found:
    """[`Found`] of shape `[...]` for laws `[..., V]` in float64, each as if it were the first of its sequence."""
    shape = target_probs.shape[:-1]
    budget = _left(rule, target_probs[..., :1])
    target_probs, draft_probs = (x.reshape(-1, x.shape[-1]) for x in (target_probs, draft_probs))
    found = _largest(_of_laws(target_probs, draft_probs, rule), budget.reshape(-1))
    return Found(*(field.view(shape) for field in found))


def find_deltas_of_block(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    rule: Cactus,
    target_prob: Tensor,
    goes_on: Callable[[int, Tensor], Tensor] | None = None,
) -> Found:
    """
    Of the positions of a block, from left to right, as each spends of what the sequence may.

    Args:
        target_logits (`Tensor` of shape `[B, m or more, V]`):
            The target's, after processors.
        draft_logits (`Tensor` of shape `[B, m, V]`, or `None`):
            The draft's; `None` for drafts without probabilities.
        rule ([`Cactus`]):
            With `kl_budget` or `kl_total`.
        target_prob (`Tensor` of shape `[B, m]`, float64):
            The probabilities of the drafted tokens. They are all that counts for drafts without probabilities.
        goes_on (`Callable`, *optional*):
            Says by a position and its deltas [B] which rows go on behind it. A CPU looks no farther than one does.

    Returns:
        [`Found`] of shape `[B, m]`. What stands where a row is no law means nothing; zeros are where none was looked.
    """
    num_drafted = target_prob.shape[1]
    if draft_logits is not None:
        target_logits, draft_logits = on_support(target_logits[:, :num_drafted], draft_logits)
    positions: list[Found] = []
    are_left = torch.ones(len(target_prob), dtype=torch.bool, device=target_prob.device)
    for i in range(num_drafted):
        if draft_logits is None:
            divergence = _of_one_hot(target_prob[:, i], rule)
        else:
            divergence = _of_laws(*laws_at(target_logits, draft_logits, None, i), rule)
        positions.append(_largest(divergence, _left(rule, target_prob[:, i])))
        rule = spent(rule, positions[-1].kl)
        if goes_on is not None and target_prob.is_cpu:  # a GPU would have to be waited for
            are_left = are_left & goes_on(i, positions[-1].delta)
            if not are_left.any():
                break
    if not positions:
        return Found(target_prob, target_prob, target_prob)
    missing = (0, num_drafted - len(positions))
    fields = (torch.stack(values, dim=1) for values in zip(*positions, strict=True))
    return Found(*(torch.nn.functional.pad(field, missing) for field in fields))


def spent(rule: Cactus, kl: Tensor) -> Cactus:
    """The rule for what follows, once the sequences have emitted divergences `kl` [B] in nats."""
    if rule.kl_total is None:
        return rule
    # Not `dataclasses.replace`: it would check the values again, and so wait for the device
    changed = copy.copy(rule)
    object.__setattr__(changed, "kl_total", (per_row(rule.kl_total, kl) - kl).clamp(min=0))
    return changed


def _left(rule: Cactus, like: Tensor) -> Tensor:
    """What a position of each sequence may spend, shaped to broadcast against `like` [B, ...]."""
    limits: list[Parameter] = [limit for limit in (rule.kl_budget, rule.kl_total) if limit is not None]
    zeros = torch.zeros_like(like, dtype=torch.float64)
    first, *others = (zeros + per_row(limit, zeros) for limit in limits)
    return torch.minimum(first, others[0]) if others else first


def _of_one_hot(target_prob: Tensor, rule: Cactus) -> Divergence:
    """A token that was not drawn is kept with probability gamma: what is emitted is the law aimed at."""

    def divergence(delta: Tensor) -> tuple[Tensor, Tensor]:
        raised = rule.raise_to(target_prob, delta)
        return binary_kl(target_prob, raised), raised - target_prob

    return divergence


def binary_kl(target_prob: Tensor, raised_prob: Tensor) -> Tensor:
    """KL in nats of (gamma, 1 - gamma) from (q_n, 1 - q_n)."""
    smallest = torch.finfo(target_prob.dtype).tiny
    gain = raised_prob - target_prob
    # At q = 0 and q = 1 gamma is q, and both terms are 0. log1p, because gamma is near q when the budget is small.
    risen = torch.special.xlog1py(raised_prob, gain / target_prob.clamp(min=smallest))
    fallen = torch.special.xlog1py(1 - raised_prob, -gain / (1 - target_prob).clamp(min=smallest))
    return (risen + fallen).clamp(min=0)


def _of_laws(target_probs: Tensor, draft_probs: Tensor, rule: Cactus) -> Divergence:
    """By rows [N, C]; see the head of the module."""
    ratio = torch.where(target_probs > 0, draft_probs / target_probs, torch.inf)
    ratio, order = ratio.sort(-1)
    target_probs, draft_probs = target_probs.gather(-1, order), draft_probs.gather(-1, order)
    num_low, num_high = most_set(ratio < 1), most_set(ratio > 1)
    low, target_low, draft_low = (x[:, :num_low].contiguous() for x in (ratio.clamp(max=1), target_probs, draft_probs))
    target_below, draft_below = (
        torch.nn.functional.pad(x.cumsum(-1), (1, 0)) for x in (target_low, draft_low)
    )  # of the first 0, 1, ... tokens
    target_high = target_probs[:, ratio.shape[1] - num_high :]
    excess = (draft_probs[:, ratio.shape[1] - num_high :] - target_high).clamp(min=0)

    def divergence(delta: Tensor) -> tuple[Tensor, Tensor]:
        raised = rule.raise_to(target_high, delta[:, None])
        gain = torch.minimum(raised - target_high, excess)
        rejected = excess - gain
        scale = scale_of_others(raised, target_high)
        if rejected.is_cpu and len(rejected) == 1:  # few are left; a GPU would have to be asked where
            is_left = rejected > 0
            rejected, scale = rejected[is_left][None], scale[is_left][None]
        num_below = torch.searchsorted(low, scale)
        total = scale * target_below.gather(-1, num_below) - draft_below.gather(-1, num_below)
        # It is at least w_n, but for rounding. Where nothing is rejected it may be 0
        share = torch.where(rejected > 0, rejected / torch.maximum(total, rejected), 0.0)
        gained, lost = (_sums_above(x, num_below, num_low) for x in (share * scale, share))
        change = torch.minimum(low - 1 + gained - low * lost, torch.zeros_like(low)).clamp(min=-1)
        kl = _excess_of(target_high, gain).sum(-1) + (target_low * _convex(change)).sum(-1)
        return kl, gain.sum(-1)

    return divergence


def most_set(flags: Tensor) -> int:
    """How many flags [..., C] a row has at most, 0 without rows; C on a GPU, which is not asked."""
    if not flags.is_cpu:
        return flags.shape[-1]
    return int(flags.sum(-1).max()) if flags.numel() else 0


def _sums_above(values: Tensor, places: Tensor, count: int) -> Tensor:
    """[N, count]: at place i the sum of the values [N, c] whose place is above i."""
    at_place = values.new_zeros(len(values), count + 1).scatter_add_(-1, places, values)
    return at_place[:, 1:].flip(-1).cumsum_(-1).flip(-1)


def _excess_of(target_probs: Tensor, gain: Tensor) -> Tensor:
    """q f(gain / q), 0 where q is 0: there nothing is gained."""
    return target_probs * _convex(torch.where(target_probs > 0, gain / target_probs, 0.0))


def _convex(change: Tensor) -> Tensor:
    """f(t) = (1 + t) log(1 + t) - t, 1 at -1."""
    return (torch.special.xlog1py(1 + change, change) - change).clamp_(min=0)


def _largest(divergence: Divergence, budget: Tensor) -> Found:
    """
    The largest delta of each row whose divergence is within `budget` [N], by bracketing it in log2(delta).

    The divergence grows with delta, nearly in proportion as long as both are small. So steps go by the secant of the
    logarithms, at times by halves, and stop next to the bracket's ends so that both close in. What is returned is the
    lower end, whose own divergence was found to be within the budget; where none was, delta is 0.
    """
    limit = budget * (1 - SAFETY)
    unbounded = Found(torch.full_like(budget, torch.inf), *divergence(torch.full_like(budget, torch.inf)))
    is_free = (unbounded.kl <= limit) & (budget > 0)
    best = Found(*(torch.where(is_free, field, 0.0) for field in unbounded))
    low, high = torch.full_like(budget, LEAST), torch.full_like(budget, LARGEST)
    place = limit.log2().nan_to_num(LEAST).clamp(LEAST + 1, LARGEST - 1)
    last_place, last_error = place - 1, torch.full_like(budget, torch.nan)
    is_open = ~is_free & (budget > 0)
    for step in range(MOST_STEPS):
        if is_open.is_cpu and not (is_open & (high - low > 2 * CLOSE)).any():
            break
        delta = place.exp2()
        kl, tv = divergence(delta)
        is_within = is_open & (kl <= limit) & (place > low)
        best = Found(*(torch.where(is_within, new, old) for new, old in zip((delta, kl, tv), best, strict=True)))
        low, high = torch.where(kl <= limit, place, low), torch.where(kl <= limit, high, place)
        error = (kl / limit).log2()
        middle = (low + high) / 2
        slope = (error - last_error) / (place - last_place)
        slope = torch.where(slope > 0.01, slope, torch.nan if step else 1.0)  # at first none is known
        aim = place - error / slope
        last_place, last_error = place, error
        is_secant = aim.isfinite() & (step % 4 < 3)  # it has no end where the divergence has come to its largest
        place = torch.where(is_secant, aim, middle)
        place = torch.minimum(torch.maximum(place, low + CLOSE), high - CLOSE)
        place = torch.where(high - low > 2 * CLOSE, place, middle)
    return best
