"""Sources of drafts: what proposes the tokens that the target then verifies."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .cached_model import CachedModel
from .logits import BlockProcessor, fit_vocabulary
from .sequences import Sequences
from .verification import draw


class Drafts(NamedTuple):
    """Proposed tokens and the law they were drawn from."""

    tokens: Tensor  # [B, m]
    logits: Tensor | None  # [B, m, V], processed; None: the law of each token is one-hot
    lengths: Tensor  # [B], drafts of each row; what lies behind them is void


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
    """A smaller model of the target's vocabulary.

    Args:
        model (`CachedModel`): holding the prompts.
        processors (`BlockProcessor`): the target's, so that both laws are processed alike.
        vocab_sizes (`tuple` of two `int`): the target's V, and the draft's.
        do_sample (`bool`): draw the drafts, or take the most likely token.
        confidence_threshold (`float`): a row stops drafting behind a token that the draft gave less probability.
            That token is kept, as dropping it would make the law of what is proposed another one. 0 never stops.
    """

    def __init__(
        self,
        model: CachedModel,
        processors: BlockProcessor,
        vocab_sizes: tuple[int, int],
        do_sample: bool,
        confidence_threshold: float = 0.0,
    ):
        self.model, self.processors = model, processors
        self.target_size, self.own_size = vocab_sizes
        self.do_sample, self.confidence_threshold = do_sample, confidence_threshold
        self.cached: Tensor | None = None  # [B] on the CPU: positions fed so far, drafts included

    def propose(self, sequences: Sequences, lengths: Tensor, uniforms: Tensor) -> Drafts:
        # Usually the last committed token is new to the draft; where all drafts were kept, so is the one before. Rows
        # that need fewer tokens than others see some again, which rewrites the same states: so all rows look alike.
        unseen = 1 if self.cached is None else max(1, int((sequences.slots() - self.cached).max()))
        num_drafts = int(lengths.max())
        tokens, laws, is_open = sequences.read(-unseen, unseen), [], lengths.to(uniforms.device) > 0
        num_drafted = torch.zeros_like(is_open, dtype=torch.long)
        for i in range(num_drafts):
            logits = self.model.score(known(tokens, self.own_size), sequences.slots(i) - tokens.shape[1])[:, -1:]
            logits = self.processors(fit_vocabulary(logits, self.target_size), sequences, offset=i)
            tokens = self._choose(logits[:, 0], uniforms[:, i])[:, None]
            sequences.write(i, tokens)
            laws.append(logits)
            num_drafted += is_open
            if self.confidence_threshold > 0:
                confidence = logits[:, 0].softmax(-1).gather(1, tokens)[:, 0]
                is_open = is_open & (confidence >= self.confidence_threshold)
                if not is_open.any():  # worth asking the device: it saves the steps that are left
                    break
        self.cached = sequences.slots(len(laws) - 1)
        drafted = torch.minimum(num_drafted, lengths.to(num_drafted.device))
        return Drafts(sequences.read(0, len(laws)), torch.cat(laws, dim=1) if self.do_sample else None, drafted)

    def _choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        return draw(logits.softmax(-1), uniforms) if self.do_sample else logits.argmax(-1)

    def keep(self, index: Tensor) -> None:
        self.model.keep(index)
        if self.cached is not None:
            self.cached = self.cached[index]


def known(tokens: Tensor, vocab_size: int) -> Tensor:
    """Tokens as a draft with a smaller vocabulary can read them: what it lacks is read as its last id."""
    return tokens.clamp_max(vocab_size - 1)
