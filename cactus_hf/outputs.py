"""What `generate()` returns: transformers' own output, with the statistics of speculation beside it."""

from __future__ import annotations

from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from .counters import SpeculationStats
from .probabilities import widened


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
    """Collects rows over the vocabulary round by round, for `scores` and `logits`.

    `tokens` has one tensor [R, V] a generated token; zeros where a row has not come so far.
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.tokens: list[Tensor] = []

    def add(self, rows: Tensor, offset: Tensor, count: Tensor, values: Tensor) -> None:
        """
        Args:
            rows (`torch.Tensor` of shape [B], on the CPU): where the values belong.
            offset (`torch.Tensor` of shape [B], on the CPU): tokens that each row had before.
            count (`torch.Tensor` of shape [B], on the CPU): leading positions of `values` that count.
            values (`torch.Tensor` of shape [B, T, V]), kept in float32 at least, as transformers does.
        """
        while len(self.tokens) < int((offset + count).max()):
            row = widened(values[0, 0])
            self.tokens.append(row.new_zeros(self.num_rows, len(row)))
        for token in range(int(offset.min()), int((offset + count).max())):
            index = ((offset <= token) & (token < offset + count)).nonzero()[:, 0]
            place = (token - offset)[index].to(values.device)
            self.tokens[token][rows[index].to(values.device)] = widened(values[index.to(values.device), place])

    def by_token(self, num_emitted: Tensor) -> tuple[Tensor, ...]:
        """One tensor [R, V] a token; zeros behind the first `num_emitted` [R] (on the CPU) of each row."""
        for token, values in enumerate(self.tokens):
            values[(num_emitted <= token).to(values.device)] = 0
        return tuple(self.tokens[: int(num_emitted.max())])
