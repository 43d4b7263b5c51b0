"""From raw logits to the law tokens are drawn from: the user's logits processors, on blocks of positions.

Target and draft go through the same processors, so that acceptance compares like with like. Processors that look at
nothing but the logits run once on all rows of a block. The others run position by position on the exact prefixes, in
transformers' own layout: the whole batch of R rows, padding included, so that a processor finds each row where plain
decoding would show it. Rows of one length share a call.
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
    """

    def __init__(self, processors: Sequence[Processor]):
        self.processors = list(processors)

    def for_draft(self) -> BlockProcessor:
        """The same settings for the draft, which must not disturb what the target's processors remember."""
        return BlockProcessor([copy.deepcopy(processor) for processor in self.processors])

    def __call__(self, logits: Tensor, sequences: Sequences, offset: int = 0) -> Tensor:
        """Process `logits` [B, T, V], whose first position predicts the column `offset` behind the committed ones."""
        for processor in self.processors:
            if type(processor) in CONTEXT_FREE:
                logits = processor(sequences.tokens, logits.flatten(0, 1)).view_as(logits)
            else:
                logits = _on_prefixes(processor, logits, sequences, offset)
        return logits


def _on_prefixes(processor: Processor, logits: Tensor, sequences: Sequences, offset: int) -> Tensor:
    processed = torch.empty_like(logits)
    for length, index in sequences.by_length():
        rows = sequences.row_index[index.to(logits.device)]
        for t in range(logits.shape[1]):
            scores = logits.new_zeros(len(sequences.tokens), logits.shape[2])
            scores[rows] = logits[index, t]
            result = processor(sequences.tokens[:, : length + offset + t], scores)
            if result.shape != scores.shape:
                raise ValueError(
                    f"The logits processor {type(processor).__name__} was given scores of shape {list(scores.shape)} "
                    f"and returned {list(result.shape)}: it must keep the shape."
                )
            processed[index, t] = result[rows]
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
