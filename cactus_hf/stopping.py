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
    about each prefix of each row in turn, as plain decoding would ask them.

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
        for b in range(len(count)):
            for extra in range(1, int(count[b]) + 1):
                prefix = sequences.prefix(b, extra)
                # Every criterion is asked, as plain decoding would, also after one has said yes
                if any([bool(torch.as_tensor(c(prefix, None)).any()) for c in self.others]):
                    count[b], has_ended[b] = extra, True
                    break
        return count, has_ended
