"""Arithmetic that several kernels share: a row of logits is cut into tiles, and each tile has a peak and a total.

`peak` is the largest logit, and `total` the sum of exp(logit - peak). As in `verification.py`, the peak is finite just
where the logits are a law: NaN and +inf come through, and nothing but -inf leaves -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Logits of a tile, one program each. It is the same for every batch, so that what a row gets does not depend on its
# neighbours even in the last bit.
TILE = 4096
NUM_WARPS = 8


@triton.jit
def load_row(row, index, size, stride):
    """The logits at `index` of the row, in float32; -inf behind its end."""
    return tl.load(row + index * stride, mask=index < size, other=float("-inf")).to(tl.float32)


@triton.jit
def peak_of(values):
    # A maximum on a GPU ignores NaN.
    is_nan = values != values
    peak = tl.max(tl.where(is_nan, float("-inf"), values), axis=0)
    return tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("nan"), peak)


@triton.jit
def base_of(peak):
    """What to subtract before the exponential: the peak, where there is one."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def merge(peaks, totals, start, num_tiles, TILES: tl.constexpr):
    """Peak and total of a row from those of its tiles, the factors on the tiles' totals, and these; all float64."""
    index = tl.arange(0, TILES)
    is_tile = index < num_tiles
    tile_peak = tl.load(peaks + start + index, mask=is_tile, other=float("-inf")).to(tl.float64)
    tile_total = tl.load(totals + start + index, mask=is_tile, other=0.0).to(tl.float64)
    peak = peak_of(tile_peak)
    factor = tl.exp(tile_peak - base_of(peak))
    return peak, tl.sum(factor * tile_total, axis=0), factor, tile_peak, tile_total


@triton.jit
def is_finite(values):
    return tl.abs(values) < float("inf")
