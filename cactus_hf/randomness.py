"""Where random numbers come from: uniforms in [0, 1), 2 m + 1 a row and round.

The first m draw the drafts, the next m decide their acceptance and the last draws the token after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


NUM_STREAMS = 3  # drafts, accept tests, next tokens


class Uniforms(Protocol):
    def draws(self, rows: Tensor, position: Tensor, num_drafts: int) -> Tensor:
        """Float64 [B, 2 * num_drafts + 1] for the returned rows `rows` [B], whose next token is
        number `position` [B].
        """
        ...


class GlobalUniforms:
    """Torch's global generator of the device, as `torch.manual_seed` sets it."""

    def draws(self, rows: Tensor, position: Tensor, num_drafts: int) -> Tensor:
        return torch.rand(len(rows), 2 * num_drafts + 1, dtype=torch.float64, device=rows.device)


class NoUniforms:
    """Zeros, for greedy decoding: it draws nothing, and leaves the global generator as it was."""

    def draws(self, rows: Tensor, position: Tensor, num_drafts: int) -> Tensor:
        return torch.zeros(len(rows), 2 * num_drafts + 1, dtype=torch.float64, device=rows.device)


class SeededUniforms:
    """Uniforms that are functions of (seed of the row, position in the row) alone.

    So a row's text depends neither on its neighbours nor on the order of the batch or its padding. A position that is
    drafted again after a rejection meets the same numbers again; that is harmless, since nothing behind a rejection
    has had any influence on the text.
    """

    def __init__(self, seeds: Tensor):
        self.seeds = seeds  # int64, one a returned row

    def draws(self, rows: Tensor, position: Tensor, num_drafts: int) -> Tensor:
        ahead = torch.arange(num_drafts, device=rows.device)
        position = position[:, None]
        drafts = (position + ahead) * NUM_STREAMS
        counter = torch.cat([drafts, drafts + 1, position * NUM_STREAMS + 2], dim=1)
        bits = _mix(_mix(self.seeds[rows, None]) + counter * _signed(0x9E3779B97F4A7C15))
        return _shift_right(bits, 11).double() * 2.0**-53


def make_uniforms(
    generator: torch.Generator | Sequence[int] | None, num_rows: int, num_return_sequences: int, device: torch.device
) -> Uniforms:
    """The uniforms of one `generate()` call with `num_rows` returned rows.

    Args:
        generator (`torch.Generator` or list of `int`, *optional*):
            What yields the seeds of the rows in order, or the seeds: one a returned row, or one an input row, from
            which different ones are then made for its `num_return_sequences` returned rows.

    Raises:
        ValueError: if there are seeds for another number of rows.
    """
    if generator is None:
        return GlobalUniforms()
    if isinstance(generator, torch.Generator):
        seeds = torch.randint(2**62, (num_rows,), generator=generator, device=generator.device)
    else:
        seeds = torch.tensor([_signed(seed) for seed in generator])
        if len(seeds) * num_return_sequences == num_rows:
            number = torch.arange(num_return_sequences).repeat(len(seeds))
            seeds = seeds.repeat_interleave(num_return_sequences) + number * _signed(0x9E3779B97F4A7C15)
        if len(seeds) != num_rows:
            raise ValueError(f"`generator` has {len(seeds)} seeds for {num_rows} rows: give one seed a row.")
    return SeededUniforms(seeds.to(device))


def _signed(bits: int) -> int:
    """The low 64 bits of an integer as torch's int64 holds them."""
    return (bits + 2**63) % 2**64 - 2**63


def _shift_right(bits: Tensor, places: int) -> Tensor:
    return (bits >> places) & (2 ** (64 - places) - 1)  # torch shifts int64 arithmetically


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), on wrapping 64-bit integers."""
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)
