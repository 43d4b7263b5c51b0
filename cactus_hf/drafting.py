"""Sources of drafts: what proposes the tokens that the target then verifies."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .logits import BlockProcessor
from .ranks import ALONE, Ranks
from .reading import Reader
from .sequences import Sequences
from .probabilities import draw


class Drafts(NamedTuple):
    """Proposed tokens and the law they were drawn from."""

    tokens: Tensor  # [B, m]
    logits: Tensor | None  # [B, m, V], processed; None: the law of each token is one-hot
    lengths: Tensor  # [B], drafts of each row; what lies behind them is void


def no_drafts(sequences: Sequences) -> Drafts:
    tokens = sequences.read(0, 0)
    return Drafts(tokens, None, tokens.new_zeros(len(tokens)))


class DraftSource(Protocol):
    def propose(self, sequences: Sequences, lengths: Tensor, uniforms: Tensor) -> Drafts:
        """Draft `lengths` [B] (on the CPU) tokens a row and write them behind the committed ones.

        `uniforms` [B, m] draws them, m being the largest of the lengths.
        """
        ...

    def keep(self, index: Tensor) -> None:
        """Go on with the rows `index` (on the CPU) only."""
        ...


class DraftModel:
    """A smaller model.

    Args:
        reader (`Reader`): the model, which has read the prompts.
        processors (`BlockProcessor`): the target's, so that both laws are processed alike.
        do_sample (`bool`): draw the drafts, or take the most likely token.
        confidence_threshold (`float`): a row stops drafting behind a token that the draft gave less probability.
            That token is kept, as dropping it would make the law of what is proposed another one. 0 never stops.
        ranks (`Ranks`): the processes that decode together.
    """

    def __init__(
        self,
        reader: Reader,
        processors: BlockProcessor,
        do_sample: bool,
        confidence_threshold: float = 0.0,
        ranks: Ranks = ALONE,
    ):
        self.reader, self.processors, self.ranks = reader, processors, ranks
        self.do_sample, self.confidence_threshold = do_sample, confidence_threshold

    def propose(self, sequences: Sequences, lengths: Tensor, uniforms: Tensor) -> Drafts:
        lengths = self.reader.fit(lengths)
        num_drafts = int(lengths.max())
        num_passes = self.ranks.most(num_drafts)
        if num_passes == 0:
            return no_drafts(sequences)
        device = sequences.tokens.device
        laws, is_open = [], lengths.to(device) > 0
        num_drafted = torch.zeros_like(is_open, dtype=torch.long)
        logits = self.reader.begin(sequences, lengths.clamp_min(1))
        for i in range(num_drafts):
            law = self.processors(self.reader.text.over_target(logits.to(device))[:, None], sequences, offset=i)
            # Processors may have removed every token that the draft has; then the row drafts no more
            is_open = is_open & (law[:, 0] != -torch.inf).any(-1)
            tokens = self.ranks.same(self._choose(law[:, 0], uniforms[:, i]))[:, None]
            sequences.write(i, tokens)
            laws.append(law)
            num_drafted += is_open
            if self.confidence_threshold > 0:
                confidence = law[:, 0].softmax(-1).gather(1, tokens)[:, 0]
                is_open = self.ranks.same(is_open & (confidence >= self.confidence_threshold))
                if not is_open.any():  # worth asking the device: it saves the steps that are left
                    break
            if i + 1 < num_drafts:
                logits = self.reader.go_on(tokens)
        if self.ranks.is_synced:
            for _ in range(num_passes - max(1, len(laws))):  # the other processes need all for each of theirs
                self.reader.repeat()
        if not laws:
            return no_drafts(sequences)
        drafted = torch.minimum(num_drafted, lengths.to(device))
        return Drafts(sequences.read(0, len(laws)), torch.cat(laws, dim=1) if self.do_sample else None, drafted)

    def _choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        return draw(logits.softmax(-1), uniforms) if self.do_sample else logits.argmax(-1)

    def keep(self, index: Tensor) -> None:
        self.reader.keep(index)
