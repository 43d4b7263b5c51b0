"""From raw logits to the law tokens are drawn from: the user's logits processors, on blocks of positions.

Target and draft go through the same processors, so that acceptance compares like with like. Processors that look at
nothing but the logits run once on all rows of a block; the others run on the exact prefix of each row and position,
in transformers' own layout, padding included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import generation as hf

from .sequences import Sequences


CONTEXT_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
)

Processor = Callable[[Tensor, Tensor], Tensor]


class BlockProcessor:
    """The logits processors of one `generate()` call, made to run on blocks.

    Args:
        processors (list of `LogitsProcessor`): as transformers prepared them, in order.
        num_rows (`int`): rows of the batch, R.
        for_row (`Callable`): gives, for a processor and a row, one that treats a batch of one as that row.
    """

    def __init__(self, processors: Sequence[Processor], num_rows: int, for_row: Callable[[Processor, int], Processor]):
        self.processors = list(processors)
        self.by_row = {
            index: [for_row(processor, row) for row in range(num_rows)]
            for index, processor in enumerate(self.processors)
            if type(processor) not in CONTEXT_FREE
        }

    def for_draft(self) -> BlockProcessor:
        """The same settings for the draft, which must not disturb what the target's processors remember."""
        twin = copy.copy(self)
        twin.by_row = {index: copy.deepcopy(rows) for index, rows in self.by_row.items()}
        return twin

    def __call__(self, logits: Tensor, sequences: Sequences, offset: int = 0) -> Tensor:
        """Process `logits` [B, T, V], whose first position predicts the column `offset` behind the committed ones."""
        for index, processor in enumerate(self.processors):
            if index in self.by_row:
                logits = _on_prefixes(self.by_row[index], logits, sequences, offset)
            else:
                logits = processor(sequences.tokens, logits.flatten(0, 1)).view_as(logits)
        return logits


def _on_prefixes(by_row: list[Processor], logits: Tensor, sequences: Sequences, offset: int) -> Tensor:
    processed = torch.empty_like(logits)
    for b, row in enumerate(sequences.rows.tolist()):
        for t in range(logits.shape[1]):
            processed[b, t] = by_row[row](sequences.prefix(b, offset + t), logits[b, t][None])[0]
    return processed


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V'] of a draft over the target's `vocab_size` ids.

    Models of one family pad their vocabularies differently. Ids that the target lacks are dropped, so that the draft
    is drawn from its law over the common ids; ids that the draft lacks get no mass.
    """
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
