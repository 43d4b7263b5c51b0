"""What `generate()` returns: transformers' own output, with the statistics of speculation beside it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from .counters import SpeculationStats


class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """transformers' output with one attribute more, which is no item: who goes through the items finds tensors only.

    Attributes:
        speculation ([`SpeculationStats`]): what was drafted, kept and emitted.
    """

    speculation: SpeculationStats


class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same for encoder-decoder models."""

    speculation: SpeculationStats


class TokenRows:
    """Collects rows over the vocabulary round by round, for `scores` and `logits`: one tensor a generated token."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []  # row, number of its token, values; one entry a token

    def add(self, rows: Tensor, offset: Tensor, count: Tensor, values: Tensor) -> None:
        """
        Args:
            rows (`torch.Tensor` of shape [B], on the CPU): where the values belong.
            offset (`torch.Tensor` of shape [B], on the CPU): tokens that each row had before.
            count (`torch.Tensor` of shape [B], on the CPU): leading positions of `values` that count.
            values (`torch.Tensor` of shape [B, T, V]).
        """
        batch, place = (torch.arange(values.shape[1]) < count[:, None]).nonzero(as_tuple=True)
        self.parts.append(
            (rows[batch], offset[batch] + place, values[batch.to(values.device), place.to(values.device)])
        )

    def by_token(self) -> tuple[Tensor, ...]:
        """One tensor [R, V] a token; zeros where a row had ended."""
        rows, tokens, values = (torch.cat(part) for part in zip(*self.parts, strict=True))
        gathered = values.new_zeros(int(tokens.max()) + 1, self.num_rows, values.shape[-1])
        gathered[tokens.to(values.device), rows.to(values.device)] = values
        return gathered.unbind(0)
