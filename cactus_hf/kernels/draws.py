"""Second pass: the token that follows the drafts kept, by inverting a cumulative sum at one uniform.

At most one row a sequence is read, and the draft's row beside it: that of the first rejection, if the rule's residual
is max(a q - b p, 0) with b above 0, or the row behind the drafts, if none was rejected. Where the target's law itself
is drawn from, the first pass has summed the tiles already. `_next_tiles` sums the weights of each tile; `_draw` picks
a tile by these sums, then a token in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..verification import Verification
from .normalise import Block
from .tiles import NUM_WARPS, base_of, is_finite, load_row, merge, peak_of


def draw_next(
    target_logits: Tensor,
    tokens: Tensor,
    draft_logits: Tensor | None,
    scales: tuple[Tensor | float, Tensor | float],
    uniforms: Tensor,
    block: Block,
    result: Verification,
    tile: int,
) -> None:
    """Fills in `next_token`, and `bad_target` where no token can be drawn behind drafts that were all kept."""
    batch_size, num_drafted = tokens.shape
    vocab_size = target_logits.shape[2]
    num_tiles = triton.cdiv(vocab_size, tile)
    target_scale, draft_scale = (_spread(scale, block.drafted.target_prob) for scale in scales)
    draft_rows = target_logits if draft_logits is None else draft_logits
    normaliser = block.target if block.draft is None else block.draft
    sums = torch.empty(batch_size, num_tiles, dtype=torch.float64, device=tokens.device)
    rows = (
        target_logits, *target_logits.stride(), draft_rows, *draft_rows.stride(), vocab_size, tokens,
        target_scale, *target_scale.stride(), draft_scale, *draft_scale.stride(), *block.target, *normaliser,
        num_drafted, num_tiles, result.num_accepted, result.draft_lengths, *block.target_tiles, sums,
    )  # fmt: skip
    options = {"TILE": tile, "HAS_DRAFT": draft_logits is not None, "num_warps": NUM_WARPS}
    _next_tiles[(batch_size * num_tiles,)](*rows, **options)
    tiles = triton.next_power_of_2(num_tiles)
    _draw[(batch_size,)](*rows, uniforms, result.next_token, result.bad_target, TILES=tiles, **options)


def _spread(scale: Tensor | float, like: Tensor) -> Tensor:
    return (scale if isinstance(scale, Tensor) else like.new_full((), scale)).expand_as(like)


@triton.jit
def _residual(
    target_row, target_stride_v, target_peak, target_total, target_scale,
    draft_row, draft_stride_v, draft_peak, draft_total, draft_scale,
    index, vocab_size, token, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """max(a q - b p, 0) at `index`, in float32 as in the reference. Both kernels must get the very same numbers."""
    q = tl.exp(load_row(target_row, index, vocab_size, target_stride_v) - target_peak) / target_total
    is_token = index == token
    if HAS_DRAFT:
        p = tl.exp(load_row(draft_row, index, vocab_size, draft_stride_v) - draft_peak) / draft_total
    else:
        p = is_token.to(tl.float32)
    # The scalars that rejected n, which has p > q, are rounded otherwise; n must not be drawn again for that.
    p = tl.where(is_token, tl.maximum(p, q), p)
    # Asked for, as the compiler might fuse the two operations in one kernel only.
    return tl.maximum(tl.fma(q, target_scale, -(draft_scale * p)), 0.0)


@triton.jit
def _next_tiles(
    target, target_stride_b, target_stride_i, target_stride_v, draft, draft_stride_b, draft_stride_i, draft_stride_v,
    vocab_size, tokens, target_scales, target_scale_b, target_scale_i, draft_scales, draft_scale_b, draft_scale_i,
    target_peaks, target_totals, draft_peaks, draft_totals, num_drafted, num_tiles, num_accepted, lengths,
    peaks, totals, sums, TILE: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """One tile of the row that the next token comes from."""
    program = tl.program_id(0).to(tl.int64)
    b = program // num_tiles
    tile = program % num_tiles
    index = tile * TILE + tl.arange(0, TILE)
    i = tl.load(num_accepted + b)
    target_row = target + b * target_stride_b + i * target_stride_i
    start = (b * (num_drafted + 1) + i) * num_tiles
    if i >= tl.load(lengths + b):
        values = load_row(target_row, index, vocab_size, target_stride_v)
        peak = peak_of(values)
        tl.store(peaks + start + tile, peak)
        tl.store(totals + start + tile, tl.sum(tl.exp(values - base_of(peak)), axis=0))
        return
    draft_scale = tl.load(draft_scales + b * draft_scale_b + i * draft_scale_i).to(tl.float32)
    if draft_scale == 0:
        return
    target_scale = tl.load(target_scales + b * target_scale_b + i * target_scale_i).to(tl.float32)
    at = b * num_drafted + i
    token = tl.load(tokens + at).to(tl.int64)
    peak = tl.load(target_peaks + at)
    total = tl.load(target_totals + at)
    tile_peak = tl.load(peaks + start + tile).to(tl.float64)
    tile_prob = tl.exp(tile_peak - peak) * tl.load(totals + start + tile) / total
    is_read = tile_prob > 0
    if not HAS_DRAFT:
        is_read = token // TILE == tile
    # Of a tile in which p is 0, or q is. Below float32's range the weights in it are 0 as well.
    tile_sum = target_scale * tile_prob
    tile_sum = tl.where(tile_sum > 1e-30, tile_sum, 0.0)
    if is_read:
        weights = _residual(
            target_row, target_stride_v, peak.to(tl.float32), total.to(tl.float32), target_scale,
            draft + b * draft_stride_b + i * draft_stride_i, draft_stride_v, tl.load(draft_peaks + at).to(tl.float32),
            tl.load(draft_totals + at).to(tl.float32), draft_scale, index, vocab_size, token, HAS_DRAFT,
        )  # fmt: skip
        tile_sum = tl.sum(weights.to(tl.float64), axis=0)
    tl.store(sums + program, tile_sum)


@triton.jit
def _draw(
    target, target_stride_b, target_stride_i, target_stride_v, draft, draft_stride_b, draft_stride_i, draft_stride_v,
    vocab_size, tokens, target_scales, target_scale_b, target_scale_i, draft_scales, draft_scale_b, draft_scale_i,
    target_peaks, target_totals, draft_peaks, draft_totals, num_drafted, num_tiles, num_accepted, lengths,
    peaks, totals, sums, uniforms, next_token, bad_target,
    TILE: tl.constexpr, TILES: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """The next token of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.load(num_accepted + b)
    length = tl.load(lengths + b)
    u = tl.load(uniforms + b * (num_drafted + 1) + num_drafted).to(tl.float64)
    start = (b * (num_drafted + 1) + i) * num_tiles
    peak, total, factor, tile_peak, tile_total = merge(peaks, totals, start, num_tiles, TILES)
    if i >= length:
        first_bad = tl.load(bad_target + b)
        if (is_finite(peak) == 0) & (first_bad < 0):
            tl.store(bad_target + b, i)

    tile_index = tl.arange(0, TILES)
    tile_weights = factor * tile_total
    # Residuals that sum to 0 leave q, as do those that are q.
    is_residual = False
    target_scale = 1.0
    draft_scale = 0.0
    at = b * num_drafted + i
    if i < length:
        draft_scale = tl.load(draft_scales + b * draft_scale_b + i * draft_scale_i).to(tl.float32)
        if draft_scale != 0:
            target_scale = tl.load(target_scales + b * target_scale_b + i * target_scale_i).to(tl.float32)
            residual = tl.load(sums + b * num_tiles + tile_index, mask=tile_index < num_tiles, other=0.0)
            is_residual = tl.sum(residual, axis=0) > 0
            tile_weights = tl.where(is_residual, residual, tile_weights)

    tile, share = _invert(tile_weights, u, TILES)
    index = tile * TILE + tl.arange(0, TILE)
    target_row = target + b * target_stride_b + i * target_stride_i
    if is_residual:
        weights = _residual(
            target_row, target_stride_v, peak.to(tl.float32), total.to(tl.float32), target_scale,
            draft + b * draft_stride_b + i * draft_stride_i, draft_stride_v, tl.load(draft_peaks + at).to(tl.float32),
            tl.load(draft_totals + at).to(tl.float32), draft_scale, index, vocab_size, tl.load(tokens + at), HAS_DRAFT,
        )  # fmt: skip
    else:
        values = load_row(target_row, index, vocab_size, target_stride_v)
        weights = tl.exp(values - base_of(peak_of(values)))
    place, _ = _invert(weights.to(tl.float64), share, TILE)
    tl.store(next_token + b, tile * TILE + place)


@triton.jit
def _invert(weights, u, SIZE: tl.constexpr):
    """The index at which the running sum exceeds u times the total, and how far through its weight: both in [0, 1).

    An index of weight 0 is never taken, whatever rounding does to the running sum.
    """
    index = tl.arange(0, SIZE)
    running = tl.cumsum(weights, axis=0)
    threshold = u * tl.sum(tl.where(index == SIZE - 1, running, 0.0), axis=0)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)
    first = tl.min(tl.where((weights > 0) & (running > threshold), index, last), axis=0)
    weight = tl.sum(tl.where(index == first, weights, 0.0), axis=0)
    below = tl.sum(tl.where(index == first, running, 0.0), axis=0) - weight
    share = tl.where(weight > 0, (threshold - below) / tl.where(weight > 0, weight, 1.0), 0.0)
    return first, tl.minimum(tl.maximum(share, 0.0), 1.0)
