"""The accept scan: how many drafted tokens of each row are kept, from a few scalars a position."""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..acceptance import AcceptanceRule
from ..verification import Verification
from .normalise import Block
from .tiles import is_finite


def scan(block: Block, rule: AcceptanceRule, draft_lengths: Tensor, uniforms: Tensor) -> Verification:
    """All of the result but `next_token`, which is left empty, and a bad row behind drafts that were all kept."""
    drafted, raised_prob = block.drafted, cast(Tensor, block.drafted.raised_prob)
    batch_size, num_drafted = drafted.target_prob.shape
    device = draft_lengths.device
    result = Verification(
        num_accepted=torch.empty_like(draft_lengths),
        next_token=torch.empty_like(draft_lengths),
        is_boosted=torch.empty(batch_size, num_drafted, dtype=torch.bool, device=device),
        ball_kl=torch.empty(batch_size, num_drafted, dtype=torch.float64, device=device),
        num_verified=torch.empty_like(draft_lengths),
        draft_lengths=torch.empty_like(draft_lengths),
        bad_target=torch.empty_like(draft_lengths),
    )
    # Without a draft's logits its law is one-hot, of a peak that is finite.
    draft_peak = drafted.draft_prob if block.draft is None else block.draft.peak
    _scan[(batch_size,)](
        rule.accept(drafted).contiguous(), raised_prob.contiguous(), drafted.target_prob,
        drafted.draft_prob, block.target.peak, draft_peak, uniforms, draft_lengths, num_drafted,
        result.num_accepted, result.is_boosted, result.ball_kl, result.num_verified, result.draft_lengths,
        result.bad_target, SIZE=triton.next_power_of_2(max(num_drafted, 1)), num_warps=1,
    )  # fmt: skip
    return result


@triton.jit
def _scan(
    accept, raised_prob, target_prob, draft_prob, target_peak, draft_peak, uniforms, draft_lengths, num_drafted,
    num_accepted, is_boosted, ball_kl, num_verified, lengths, bad_target, SIZE: tl.constexpr,
):  # fmt: skip
    """One row of the batch, all its positions at once."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    at = b * num_drafted + i
    num_proposed = tl.load(draft_lengths + b).to(tl.int32)
    is_drafted = i < num_proposed
    q = tl.load(target_prob + at, mask=is_drafted, other=0.0)
    p = tl.load(draft_prob + at, mask=is_drafted, other=0.0)
    raised = tl.load(raised_prob + at, mask=is_drafted, other=0.0)
    peak = tl.load(target_peak + at, mask=is_drafted, other=0.0)
    u = tl.load(uniforms + b * (num_drafted + 1) + i, mask=is_drafted, other=1.0).to(tl.float64)

    is_law = is_drafted & is_finite(tl.load(draft_peak + at, mask=is_drafted, other=float("nan")))
    length = tl.min(tl.where(is_law, num_drafted, i), axis=0)
    is_kept = (i < length) & is_finite(peak) & (u < tl.load(accept + at, mask=is_drafted, other=0.0))
    accepted = tl.min(tl.where(is_kept, num_drafted, i), axis=0)
    verified = accepted + (accepted < length).to(tl.int32)
    tl.store(num_accepted + b, accepted)
    tl.store(num_verified + b, verified)
    tl.store(lengths + b, length)

    # Kept by lossless speculative sampling: u < min(1, q / p), and never where q is 0
    is_lossless = (q > 0) & ((q >= p) | (u < q / p))
    tl.store(is_boosted + at, (i < accepted) & (is_lossless == 0), mask=i < num_drafted)
    gain = raised - q
    risen = _xlog1py(raised, gain / tl.where(q > 0, q, 1.0))
    fallen = _xlog1py(1.0 - raised, -gain / tl.where(q < 1, 1.0 - q, 1.0))
    kl = tl.where(i < verified, tl.maximum(risen + fallen, 0.0), 0.0)
    tl.store(ball_kl + at, kl, mask=i < num_drafted)

    # An empty row behind a rejection is no fault; NaN and +inf are, wherever they are
    is_bad = is_drafted & (is_finite(peak) == 0) & ((i <= accepted) | (peak != float("-inf")))
    first_bad = tl.min(tl.where(is_bad, i, SIZE), axis=0)
    tl.store(bad_target + b, tl.where(first_bad < SIZE, first_bad, -1))


@triton.jit
def _xlog1py(x, y):
    """x log(1 + y), 0 where x is 0. Exact to rounding also for small y: the error of 1 + y cancels in the quotient."""
    above = 1.0 + y
    is_tiny = above == 1.0
    log = tl.where(is_tiny, y, tl.log(tl.where(is_tiny, 2.0, above)) * (y / tl.where(is_tiny, 1.0, above - 1.0)))
    return tl.where(x == 0, 0.0, x * log)
