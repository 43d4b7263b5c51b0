"""Where a row ends inside a block of several tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import generation as hf

from .sequences import Sequences


class Stopping:
    """The stopping criteria of one `generate()` call, applied to every committed prefix.

    End-of-sequence ids are looked for on the device, lengths are bounded by `max_length`; all other criteria are asked
    about each prefix in turn, as plain decoding would ask them: with the whole batch, cut at one length.

    Args:
        criteria (list of `StoppingCriteria`): as transformers prepared them.
    """

    def __init__(self, criteria: Sequence, device: torch.device):
        ends = [c.eos_token_id.flatten() for c in criteria if type(c) is hf.EosTokenCriteria]
        lengths = [c.max_length for c in criteria if type(c) is hf.MaxLengthCriteria]
        self.max_length = min(lengths, default=None)
        self.eos_token_ids = torch.cat(ends).to(device) if ends else None
        self.others = [c for c in criteria if type(c) not in (hf.EosTokenCriteria, hf.MaxLengthCriteria)]

    def cut(self, block: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Cut the first `count` [B] of the tokens `block` [B, T] behind an end of sequence.

        Returns:
            The tokens left of each row [B], and whether the row has ended [B].
        """
        if self.eos_token_ids is None:
            return count, torch.zeros_like(count, dtype=torch.bool)
        place = torch.arange(block.shape[1], device=block.device)
        is_end = torch.isin(block, self.eos_token_ids) & (place < count[:, None])
        first = torch.where(is_end, place, block.shape[1]).amin(1)
        return torch.minimum(count, first + 1), is_end.any(1)

    def cut_by_criteria(self, sequences: Sequences, count: Tensor, has_ended: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the criteria that only the host can ask; `count` and `has_ended` [B] are on the CPU."""
        if not self.others:
            return count, has_ended
        count, has_ended = count.clone(), has_ended.clone()
        length, limit = sequences.length[sequences.rows], count.clone()
        is_open = torch.ones_like(has_ended)
        for columns in range(int(length.min()) + 1, int((length + limit).max()) + 1):
            is_asked = is_open & (length < columns) & (columns <= length + limit)
            if is_asked.any():
                stops = self._ask(sequences.tokens[:, :columns])[sequences.rows] & is_asked
                count = torch.where(stops, columns - length, count)
                has_ended |= stops
                is_open &= ~stops
        return count, has_ended

    def _ask(self, prefixes: Tensor) -> Tensor:
        """[R] on the CPU: whether any criterion stops a row of `prefixes` [R, columns]. Every one is asked."""
        answers = [torch.as_tensor(criterion(prefixes, None)).cpu().bool() for criterion in self.others]
        return torch.stack([answer.expand(len(prefixes)) for answer in answers]).any(0)
