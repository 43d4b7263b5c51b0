"""Rows of logits as laws: what normalises them, the probabilities of a token or a row, and draws.

A block of logits [B, T, V] is large where V is (152,064 float32 numbers are 600 kB), so nothing here copies one: rows
are normalised a few at a time in a scratch of fixed size, and whole rows of probabilities are made for one position a
sequence only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


SCRATCH = 2**18  # float32 numbers that a CPU normalises at once: 1 MB, which stays in its cache
ZERO = torch.zeros((), dtype=torch.float64)


class Normaliser(NamedTuple):
    """What turns the logits of each row into probabilities: exp(logit - peak) / total."""

    peak: Tensor  # [B, T] float64; finite just where the row is a law, as NaN and +inf come through
    total: Tensor  # [B, T] float64

    def probability(self, logits: Tensor) -> Tensor:
        """Of one logit [B, T] a row, in float64: they are few, and float32 would round small ones to 0."""
        return (logits.double() - self.peak).exp_().div_(self.total)


def normalise(logits: Tensor) -> Normaliser:
    """Sums in float32, float64 logits in float64."""
    rows = logits.flatten(0, -2)
    peak = rows.amax(-1, keepdim=True)
    # On a GPU launches cost more than the scratch
    step = max(1, SCRATCH // rows.shape[1]) if rows.is_cpu else len(rows)
    if step >= len(rows):
        total = _weights(rows, peak).sum(-1)
    else:
        total = torch.cat(
            [_weights(*part).sum(-1) for part in zip(rows.split(step), peak.split(step), strict=True)]
        )
    return Normaliser(peak.double().view(logits.shape[:-1]), total.double().view(logits.shape[:-1]))


def token_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logits [B, T] of `tokens` [B, T] among `logits` [B, T or more, V]."""
    return logits[:, : tokens.shape[1]].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def row_probs(logits: Tensor, normaliser: Normaliser, at: Tensor) -> Tensor:
    """Probabilities [B, V] of the row at position `at` [B] of each sequence, in float32 or float64."""
    batch = torch.arange(len(at), device=at.device)
    row = widened(logits[batch, at])
    peak, total = (field[batch, at].unsqueeze(-1).to(row.dtype) for field in normaliser)
    return row.sub_(peak).exp_().div_(total)  # in place, as the indexing made a copy


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """
    Draws one index a row in proportion to the weights, by inverting their cumulative sum (in float64) at one uniform.

    Args:
        weights (`Tensor` of shape `[B, V]`):
            Weights, 0 or more, of any sum above 0. An index of weight 0 is never drawn.
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
    return _inverted(weights, uniforms)[0]


def draw_from_logits(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Normaliser]:
    """[`draw`] by logits `[B, V]`, with the normaliser `[B]` of their law, which comes out on the way.

    Where the logits are no law, any token comes out.
    """
    peak = logits.amax(-1, keepdim=True)
    tokens, total = _inverted(_weights(logits, peak), uniforms)
    return tokens, Normaliser(peak[:, 0].double(), total)


def _inverted(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The drawn index [B], and the sum of the weights [B]."""
    cumulative = weights.to(torch.float64, copy=True).cumsum_(-1)
    total = cumulative[:, -1]
    # `uniforms * total` may round up to the total, above which there is nothing
    threshold = torch.minimum(uniforms.double() * total, total.nextafter(ZERO))
    index = torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True)
    if not cumulative.is_cpu:
        # A parallel scan can round the sum up at an index of weight 0. Once in 10^15 draws or so, take the largest
        is_drawable = weights.gather(-1, index.clamp_(max=weights.shape[-1] - 1)) > 0
        index = torch.where(is_drawable, index, weights.argmax(-1, keepdim=True))
    return index.squeeze(-1), total


def _weights(logits: Tensor, peak: Tensor) -> Tensor:
    return (logits - widened(peak)).exp_()


def widened(values: Tensor) -> Tensor:
    """In at least float32, the precision of all probabilities here."""
    return values if values.dtype == torch.float64 else values.float()
