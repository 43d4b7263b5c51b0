"""First pass: the normalisers of the rows at drafted positions, and what else a rule reads of them.

Each row is read once, by one program a tile (`_tile_sums`); `_drafted` then merges the tiles of a position and gives
the probabilities of its drafted token. Positions behind a row's draft length are not looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..acceptance import AcceptanceRule, Drafted
from ..probabilities import Normaliser
from .tiles import NUM_WARPS, base_of, load_row, merge, peak_of


class Tiles(NamedTuple):
    """Peak and total of each tile. The row behind the drafts is left to the second pass."""

    peak: Tensor  # [B, m or m + 1, tiles] float32
    total: Tensor  # [B, m or m + 1, tiles] float32


class Block(NamedTuple):
    """What the first pass finds out."""

    drafted: Drafted  # [B, m] float64; at positions behind the drafts, zeros
    target: Normaliser  # [B, m] float64
    target_tiles: Tiles
    draft: Normaliser | None  # [B, m] float64


def read_block(
    target_logits: Tensor,
    tokens: Tensor,
    draft_logits: Tensor | None,
    rule: AcceptanceRule,
    draft_lengths: Tensor,
    draft_normaliser: Normaliser | None,
    tile: int,
) -> Block:
    """Arguments as of `verify_block`, with contiguous `tokens` `[B, m]`."""
    batch_size, num_positions, vocab_size = target_logits.shape
    num_drafted, num_tiles = num_positions - 1, triton.cdiv(vocab_size, tile)
    target = _new_tiles(target_logits, num_positions, num_tiles)
    moment, rank = torch.empty_like(target.peak), torch.empty_like(target.peak, dtype=torch.int32)
    needs = {"WITH_ENTROPY": "entropy" in rule.needs, "WITH_RANK": "rank" in rule.needs}
    grid = (batch_size * num_drafted * num_tiles,)
    _tile_sums[grid](
        target_logits, *target_logits.stride(), vocab_size, tokens, draft_lengths, num_drafted, num_positions,
        num_tiles, *target, moment, rank, TILE=tile, **needs, num_warps=NUM_WARPS,
    )  # fmt: skip
    draft = target
    if draft_logits is not None and draft_normaliser is None:
        draft = _new_tiles(draft_logits, num_drafted, num_tiles)
        _tile_sums[grid](
            draft_logits, *draft_logits.stride(), vocab_size, tokens, draft_lengths, num_drafted, num_drafted,
            num_tiles, *draft, moment, rank, TILE=tile, WITH_ENTROPY=False, WITH_RANK=False, num_warps=NUM_WARPS,
        )  # fmt: skip

    scalars = torch.empty(7, batch_size, num_drafted, dtype=torch.float64, device=tokens.device)
    target_peak, target_total, target_prob, draft_prob, entropy, draft_peak, draft_total = scalars
    ranks = torch.empty_like(tokens, dtype=torch.int64)
    if draft_normaliser is not None:
        draft_peak, draft_total = (field.double().contiguous() for field in draft_normaliser)
    draft_rows = target_logits if draft_logits is None else draft_logits
    _drafted[(batch_size * num_drafted,)](
        target_logits, *target_logits.stride(), draft_rows, *draft_rows.stride(), tokens, draft_lengths, num_drafted,
        num_tiles, *target, moment, rank, *draft, target_peak, target_total, target_prob, draft_prob,
        entropy, ranks, draft_peak, draft_total, TILES=triton.next_power_of_2(num_tiles),
        HAS_DRAFT=draft_logits is not None, IS_GIVEN=draft_normaliser is not None, **needs, num_warps=1,
    )  # fmt: skip
    return Block(
        Drafted(
            target_prob,
            draft_prob,
            entropy if "entropy" in rule.needs else None,
            ranks if "rank" in rule.needs else None,
        ),
        Normaliser(target_peak, target_total),
        target,
        None if draft_logits is None else Normaliser(draft_peak, draft_total),
    )


def _new_tiles(logits: Tensor, num_positions: int, num_tiles: int) -> Tiles:
    shape = (2, len(logits), num_positions, num_tiles)
    return Tiles(*torch.empty(shape, dtype=torch.float32, device=logits.device))


@triton.jit
def _tile_sums(
    logits, stride_b, stride_i, stride_v, vocab_size, tokens, draft_lengths, num_drafted, num_positions, num_tiles,
    peaks, totals, moments, ranks, TILE: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_RANK: tl.constexpr,
):  # fmt: skip
    """One tile of one row. All offsets are 64-bit: a block may hold more than 2^31 logits."""
    program = tl.program_id(0).to(tl.int64)
    tile = program % num_tiles
    i = program // num_tiles % num_drafted
    b = program // num_tiles // num_drafted
    if i >= tl.load(draft_lengths + b):
        return
    row = logits + b * stride_b + i * stride_i
    values = load_row(row, tile * TILE + tl.arange(0, TILE), vocab_size, stride_v)
    peak = peak_of(values)
    shifted = values - base_of(peak)
    weights = tl.exp(shifted)
    out = (b * num_positions + i) * num_tiles + tile
    tl.store(peaks + out, peak)
    tl.store(totals + out, tl.sum(weights, axis=0))
    if WITH_ENTROPY:
        tl.store(moments + out, tl.sum(tl.where(weights > 0, shifted * weights, 0.0), axis=0))
    if WITH_RANK:
        token_logit = tl.load(row + tl.load(tokens + b * num_drafted + i).to(tl.int64) * stride_v).to(tl.float32)
        tl.store(ranks + out, tl.sum((values > token_logit).to(tl.int32), axis=0))


@triton.jit
def _drafted(
    target, target_stride_b, target_stride_i, target_stride_v, draft, draft_stride_b, draft_stride_i, draft_stride_v,
    tokens, draft_lengths, num_drafted, num_tiles, peaks, totals, moments, tile_ranks, draft_peaks, draft_totals,
    out_peak, out_total, out_prob, out_draft_prob, out_entropy, out_rank, draft_peak, draft_total,
    TILES: tl.constexpr, HAS_DRAFT: tl.constexpr, IS_GIVEN: tl.constexpr,
    WITH_ENTROPY: tl.constexpr, WITH_RANK: tl.constexpr,
):  # fmt: skip
    """One drafted position."""
    out = tl.program_id(0).to(tl.int64)
    i = out % num_drafted
    b = out // num_drafted
    if i >= tl.load(draft_lengths + b):
        tl.store(out_peak + out, 0.0)
        tl.store(out_total + out, 1.0)
        tl.store(out_prob + out, 0.0)
        tl.store(out_draft_prob + out, 0.0)
        tl.store(out_entropy + out, 0.0)
        tl.store(out_rank + out, 0)
        return
    token = tl.load(tokens + out).to(tl.int64)
    start = (b * (num_drafted + 1) + i) * num_tiles
    peak, total, factor, tile_peak, tile_total = merge(peaks, totals, start, num_tiles, TILES)
    token_logit = tl.load(target + b * target_stride_b + i * target_stride_i + token * target_stride_v)
    tl.store(out_peak + out, peak)
    tl.store(out_total + out, total)
    tl.store(out_prob + out, tl.exp(token_logit.to(tl.float64) - peak) / total)
    index = tl.arange(0, TILES)
    if WITH_ENTROPY:
        # H = log(total) - sum of (logit - peak) exp(logit - peak) / total: both terms are 0 or more
        moment = tl.load(moments + start + index, mask=index < num_tiles, other=0.0).to(tl.float64)
        fall = tl.where(factor > 0, factor * (moment + (tile_peak - peak) * tile_total), 0.0)
        tl.store(out_entropy + out, tl.log(total) - tl.sum(fall, axis=0) / total)
    if WITH_RANK:
        tile_rank = tl.load(tile_ranks + start + index, mask=index < num_tiles, other=0)
        tl.store(out_rank + out, tl.sum(tile_rank, axis=0))

    draft_prob = 1.0
    if HAS_DRAFT:
        if IS_GIVEN:
            other_peak = tl.load(draft_peak + out)
            other_total = tl.load(draft_total + out)
        else:
            other_peak, other_total, _, _, _ = merge(draft_peaks, draft_totals, out * num_tiles, num_tiles, TILES)
            tl.store(draft_peak + out, other_peak)
            tl.store(draft_total + out, other_total)
        token_logit = tl.load(draft + b * draft_stride_b + i * draft_stride_i + token * draft_stride_v)
        draft_prob = tl.exp(token_logit.to(tl.float64) - other_peak) / other_total
    tl.store(out_draft_prob + out, draft_prob)
