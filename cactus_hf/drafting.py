"""Sources of drafts: what proposes the tokens that the target then verifies."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .logits import BlockProcessor
from .probabilities import Normaliser, draw_from_logits, widened
from .ranks import ALONE, Ranks
from .reading import Reader
from .sequences import Sequences
from .verification import num_leading


class Drafts(NamedTuple):
    """Proposed tokens and the law they were drawn from."""

    tokens: Tensor  # [B, m]
    logits: Tensor | None  # [B, m, V], processed; None: the law of each token is one-hot
    lengths: Tensor  # [B], drafts of each row; what lies behind them is void
    normaliser: Normaliser | None = None  # [B, m] of the logits, if the draft has kept it


def no_drafts(sequences: Sequences) -> Drafts:
    tokens = sequences.read(0, 0)
    return Drafts(tokens, None, tokens.new_zeros(len(tokens)))


class DraftSource(Protocol):
    def propose(self, sequences: Sequences, lengths: Tensor, uniforms: Tensor) -> Drafts:
        """Draft `lengths` [B] (on the CPU) tokens a row.

        `uniforms` [B, m] draws them, m being the largest of the lengths. Where processors read the text, the drafts
        are written behind the committed tokens.
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
        num_drafts = max(lengths.tolist())
        num_passes = self.ranks.most(num_drafts)
        if num_passes == 0:
            return no_drafts(sequences)
        device = sequences.tokens.device
        reads_text = self.processors.reads_text
        draws = uniforms.split(1, dim=1)
        limits = lengths.to(device)  # [B], most drafts that each row will have
        steps: list[tuple[Tensor, Tensor, Normaliser]] = []  # tokens [B, 1] and their law [B, V]
        logits = self.reader.begin(sequences, lengths.clamp_min(1))
        for i in range(num_drafts):
            law = self.processors.on_step(self.reader.text.over_target(logits.to(device)), sequences, offset=i)
            tokens, normaliser = self._choose(law, draws[i])
            tokens = self.ranks.same(tokens)
            steps.append((tokens, law, normaliser))
            if reads_text:
                sequences.write(i, tokens)
            if self.confidence_threshold > 0:
                probability = widened(law).softmax(-1).gather(1, tokens)[:, 0]
                is_sure = self.ranks.same(probability >= self.confidence_threshold)
                limits = torch.where(is_sure, limits, limits.clamp_max(i + 1))
                if not (limits > i + 1).any():  # worth asking the device: it saves the steps that are left
                    break
            if i + 1 < num_drafts:
                logits = self.reader.go_on(tokens)
        if self.ranks.is_synced:
            for _ in range(num_passes - max(1, len(steps))):  # the other processes need all for each of theirs
                self.reader.repeat()
        return self._drafts(steps, limits) if steps else no_drafts(sequences)

    def _choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Normaliser]:
        if self.do_sample:
            return draw_from_logits(logits, uniforms)
        peak, tokens = logits.max(-1, keepdim=True)
        return tokens, Normaliser(peak, peak)  # of which the peak alone will be looked at

    def _drafts(self, steps: list[tuple[Tensor, Tensor, Normaliser]], limits: Tensor) -> Drafts:
        tokens = torch.cat([step[0] for step in steps], dim=1)
        peak, total = (torch.cat(fields, dim=1) for fields in zip(*(step[2] for step in steps), strict=True))
        # Processors may have removed every token that the draft has; then the row drafts no more
        lengths = torch.minimum(num_leading(peak != -torch.inf), limits)
        if not self.do_sample:
            return Drafts(tokens, None, lengths)
        return Drafts(tokens, torch.stack([step[1] for step in steps], dim=1), lengths, Normaliser(peak, total))

    def keep(self, index: Tensor) -> None:
        self.reader.keep(index)
