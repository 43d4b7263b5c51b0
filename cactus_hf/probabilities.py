"""Rows of logits as laws: what normalises them, the probabilities of a token or a row, and draws.

A block of logits [B, T, V] is large where V is (152,064 float32 numbers are 600 kB), so nothing here copies one: rows
are normalised a few at a time in a scratch of fixed size, and whole rows of probabilities are made for one position a
sequence only.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor


SCRATCH = 2**18  # float32 numbers that a CPU normalises at once: 1 MB, which stays in its cache
BLOCK = 512  # weights that a draw from a long row sums up at a time
MOST_AT_ONCE = 2**15  # weights of a row that is not long
ALMOST_1 = 1 - 2**-53
LEAST_EXPONENT = {torch.float32: -87.0, torch.float64: -708.0}  # of which exp is a normal number
LEAST_TOTAL = 2.0**-1000  # of weights to draw by: far from the numbers that float64 holds with fewer digits


class Normaliser(NamedTuple):
    """What turns the logits of each row into probabilities: exp(logit - peak) / total."""

    peak: Tensor  # [B, T] float64; finite just where the row is a law, see `are_laws`
    total: Tensor  # [B, T] float64

    def probability(self, logits: Tensor) -> Tensor:
        """Of one logit [B, T] a row, in float64: they are few, and float32 would round small ones to 0."""
        return (logits.double() - self.peak).exp_().div_(self.total)


def are_laws(peak: Tensor) -> Tensor:
    """Whether rows are laws, by their largest logits: these are finite, as NaN and +inf come through."""
    return peak.abs() < torch.inf  # `isfinite` takes twice as many operations


def normalise(logits: Tensor) -> Normaliser:
    """Sums in float32, float64 logits in float64."""
    rows = logits.flatten(0, -2)
    peak = rows.amax(-1, keepdim=True)
    # On a GPU launches cost more than the scratch
    step = max(1, SCRATCH // rows.shape[1]) if rows.is_cpu else len(rows)
    if step >= len(rows):
        total = _weights(rows, peak).sum(-1)
    else:
        total = torch.cat([_weights(*part).sum(-1) for part in zip(rows.split(step), peak.split(step), strict=True)])
    return Normaliser(peak.double().view(logits.shape[:-1]), total.double().view(logits.shape[:-1]))


def on_support(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the tokens that neither of them can draw at any position: behind a top-k hardly any are left.

    Only on a CPU, as a GPU would have to be asked how many there are.
    """
    if not target_logits.is_cpu or target_logits.shape != draft_logits.shape:
        return target_logits, draft_logits
    possible = ((target_logits > -torch.inf) | (draft_logits > -torch.inf)).flatten(0, -2).any(0)
    tokens = possible.nonzero().squeeze(-1)
    if len(tokens) > target_logits.shape[-1] // 2:
        return target_logits, draft_logits
    return target_logits[..., tokens], draft_logits[..., tokens]


def token_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logits [B, T] of `tokens` [B, T] among `logits` [B, T or more, V]."""
    return logits[:, : tokens.shape[1]].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def row_probs(logits: Tensor, normaliser: Normaliser, at: Tensor) -> Tensor:
    """Probabilities [B, V] of the row at position `at` [B] of each sequence, in float32 or float64."""
    batch = torch.arange(len(at), device=at.device)
    row = widened(logits[batch, at])
    place = at.unsqueeze(1)
    peak, total = (field.gather(1, place).to(row.dtype) for field in normaliser)
    return _weights(row, peak).div_(total)


def laws_at(
    target_logits: Tensor, draft_logits: Tensor | None, draft_tokens: Tensor | None, position: int
) -> tuple[Tensor, Tensor]:
    """The laws [B, V] of target and draft at one position, in float64; one-hot where the draft has no logits."""
    target_probs = target_logits[:, position].softmax(-1, dtype=torch.float64)
    if draft_logits is not None:
        return target_probs, draft_logits[:, position].softmax(-1, dtype=torch.float64)
    # Padding may be any id, as what comes of it is not used.
    token = cast(Tensor, draft_tokens)[:, position, None].long().clamp(0, target_logits.shape[2] - 1)
    return target_probs, torch.zeros_like(target_probs).scatter(-1, token, 1.0)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """
    Draws one index a row in proportion to the weights, by inverting their cumulative sum (in float64) at one uniform.

    Args:
        weights (`Tensor` of shape `[B, V]`):
            Weights, 0 or more, their sum at least `LEAST_TOTAL`. An index of weight 0 is never drawn.
        uniforms (`Tensor` of shape `[B]`):
            Numbers in [0, 1).

    Returns:
        `Tensor` of shape `[B]`, int64.

    Example:

    ```python
    >>> import torch
    >>> from cactus_hf.probabilities import draw
    >>> draw(torch.tensor([[0.0, 1.0, 3.0]]).expand(3, 3), torch.tensor([0.0, 0.24, 0.26]))
    tensor([1, 1, 2])

    ```
    """
    return _inverted(weights, uniforms.unsqueeze(1))[0].squeeze(1)


def draw_from_logits(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Normaliser]:
    """[`draw`] by logits `[B, V]` at `uniforms` `[B, 1]`.

    Returns:
        The tokens `[B, 1]`, any where the logits are no law; and the normaliser `[B, 1]`, which comes out on the way.
    """
    peak = logits.amax(-1, keepdim=True)
    tokens, total = _inverted(_weights(logits, peak), uniforms)
    return tokens, Normaliser(peak.double(), total)


def _inverted(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The index [B, 1] drawn at `uniforms` [B, 1], and the sum of the weights [B, 1].

    Cumulative sums are slow. Of long rows one is taken over the sums of blocks, and one within the block it hits.
    """
    uniforms = uniforms.double()
    vocab_size = weights.shape[-1]
    if vocab_size <= MOST_AT_ONCE:
        index, _, total = _inverted_at_once(weights, uniforms)
        return index, total
    sums = _block_sums(weights)
    block, cumulative, total = _inverted_at_once(sums, uniforms)
    # What is left of the uniform, as a share of the block
    share = (uniforms * total - cumulative.gather(-1, block)) / sums.gather(-1, block) + 1
    index = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(-1, index.clamp(max=vocab_size - 1)).masked_fill_(index >= vocab_size, 0)
    place, *_ = _inverted_at_once(inside, share.clamp_(0, ALMOST_1))
    return (block * BLOCK + place).clamp_(max=vocab_size - 1), total


def _inverted_at_once(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The index [B, 1], the cumulative sums, and the last of them [B, 1]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # The largest uniform, 1 - 2^-53, times a normal number is less than the number, rounded too
    index = torch.searchsorted(cumulative, uniforms * total, right=True)
    index.clamp_(max=weights.shape[-1] - 1)  # of weights that are no numbers
    if not cumulative.is_cpu:
        # A parallel scan can round the sum up at an index of weight 0. Once in 10^15 draws or so, take the largest
        is_drawable = weights.gather(-1, index) > 0
        index = torch.where(is_drawable, index, weights.argmax(-1, keepdim=True))
    return index, cumulative, total


def _block_sums(weights: Tensor) -> Tensor:
    """Sums [B, blocks] of `BLOCK` weights each, the last one of what is left; float64, rounded as the weights are."""
    num_whole = weights.shape[-1] // BLOCK
    whole = weights[:, : num_whole * BLOCK].unflatten(-1, (num_whole, BLOCK))
    rest = weights[:, num_whole * BLOCK :]
    return torch.cat([whole.sum(-1), rest.sum(-1, keepdim=True)], dim=-1).double()


def _weights(logits: Tensor, peak: Tensor) -> Tensor:
    """exp(logits - peak), but 0 where that is below the normal numbers of its dtype."""
    exponents = logits - widened(peak)
    if not exponents.is_cpu:
        return exponents.exp_()
    # There exp takes a CPU up to 30 times as long: at low temperatures, and a little longer for the exact 0 of a top-k
    least = LEAST_EXPONENT[exponents.dtype]
    return torch.threshold_(exponents.clamp_(min=least).exp_(), 1.001 * math.exp(least), 0.0)


def widened(values: Tensor) -> Tensor:
    """In at least float32, the precision of all probabilities here."""
    return values if values.dtype == torch.float64 else values.float()
