"""How a draft model reads the text of each row: which ids it sees, and how much of a long text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .cached_model import CachedModel
from .logits import fit_vocabulary
from .sequences import Sequences


class DraftText(Protocol):
    """The text in the draft's own token ids, the first id of each row at position 0."""

    def follow(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Take in what was committed. Returns, [B] on the CPU, each row's length, and how many of its ids the draft
        has met before, in the text or as drafts of its own.
        """
        ...

    def read(self, sequences: Sequences, first: Tensor, count: int) -> Tensor:
        """Ids [B, count] from position `first` [B] (on the CPU) on, with any ids outside a row's text."""
        ...

    def read_drafts(self, tokens: Tensor) -> Tensor:
        """Ids [B, 1] of the drafted tokens [B, 1]."""
        ...

    def over_target(self, logits: Tensor) -> Tensor:
        """The draft's logits [B, V'] as logits [B, V] over the target's ids; ids that the draft lacks get no mass."""
        ...


class SharedText:
    """The target's own ids, for a draft of the same tokenizer.

    Args:
        vocab_sizes (`tuple` of two `int`): the target's V, and the draft's.
        device (`torch.device`): the draft's.
    """

    def __init__(self, vocab_sizes: tuple[int, int], device: torch.device):
        self.target_size, self.own_size = vocab_sizes
        self.device = device

    def follow(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        length = sequences.slots()
        return length, length - 1

    def read(self, sequences: Sequences, first: Tensor, count: int) -> Tensor:
        return self.read_drafts(sequences.read_at(first, count))

    def read_drafts(self, tokens: Tensor) -> Tensor:
        """What a draft with a smaller vocabulary lacks is read as its last id."""
        if self.own_size < self.target_size:
            tokens = tokens.clamp_max(self.own_size - 1)
        return tokens.to(self.device)

    def over_target(self, logits: Tensor) -> Tensor:
        return fit_vocabulary(logits, self.target_size)


class Reader:
    """A draft model that reads along.

    Where a row outgrows the model's context, the model goes on with the last part of its text. That may make worse
    drafts, but the law they are drawn from is still the draft's own, so nothing else changes.

    Args:
        prefill (`Callable`): runs token ids [B, P], of which `padding` [B] (on the CPU) are padded on the left,
            through the draft; returns the logits [B, V'] behind them, and the model holding them.
        text (`DraftText`): what there is to read.
        sequences (`Sequences`): the prompts.
        context (`int`, *optional*): most ids that the model can hold.
        waits (`bool`): read the prompts with the first token behind them, once there are drafts to make: that spares
            a pass, and the first token does not wait for it.
    """

    model: CachedModel | None = None
    last_pass: tuple[Tensor, Tensor]  # ids [B, T], and slots [B] (on the CPU) of the first of them
    start: Tensor  # [B] on the CPU: position at which the model begins to read each row
    end: Tensor  # [B] on the CPU: positions read so far, drafts included

    def __init__(
        self,
        prefill: Callable[[Tensor, Tensor], tuple[Tensor, CachedModel]],
        text: DraftText,
        sequences: Sequences,
        context: int | None = None,
        waits: bool = False,
    ):
        self.prefill, self.text, self.context = prefill, text, context
        length, _ = text.follow(sequences)
        self._move(torch.zeros_like(length))
        if waits:
            self.end = torch.zeros_like(length)
        else:
            self._move(self._start(length))
            self._read_again(sequences, length)

    @property
    def step(self) -> int:
        """How far the start moves when a row outgrows the context, so that re-reading is rare."""
        return max(1, (self.context or 0) // 2)

    def fit(self, lengths: Tensor) -> Tensor:
        """Draft lengths [B] (on the CPU) that the model has room for."""
        return lengths if self.context is None else lengths.clamp_max(self.step)

    def begin(self, sequences: Sequences, lengths: Tensor) -> Tensor:
        """Logits [B, V'] behind the committed text, to go on with `lengths` [B] drafts."""
        length, met = self.text.follow(sequences)
        end = length + lengths - 1  # the last draft is not read
        if self.model is None or self.context is not None and max(self._slots(end).tolist()) > self.context:
            self._move(self._start(end))
            return self._read_again(sequences, length)
        # Rows that need fewer ids than others see some again, which rewrites the same states. A row that is too short
        # for that reads on behind its end, where the drafts will overwrite what it leaves.
        unseen = max(1, *(length - torch.minimum(met, self.end)).tolist())
        wanted = length - unseen
        first = torch.maximum(wanted, self.start)
        logits = self._score(self.text.read(sequences, first, unseen), self._slots(first))
        self.end = length
        if first.equal(wanted):
            return logits[:, -1]
        last = (length - 1 - first).to(logits.device)
        return logits[torch.arange(len(last), device=last.device), last]

    def go_on(self, tokens: Tensor) -> Tensor:
        """Logits [B, V'] behind one drafted token [B, 1] more."""
        logits = self._score(self.text.read_drafts(tokens), self._slots(self.end))
        self.end = self.end + 1
        return logits.select(1, 0)

    def repeat(self) -> None:
        """Make the last pass once more, which changes nothing."""
        self._score(*self.last_pass)

    def _score(self, ids: Tensor, first: Tensor) -> Tensor:
        assert self.model is not None
        self.last_pass = ids, first
        return self.model.score(ids, first)

    def keep(self, index: Tensor) -> None:
        """Go on with the rows `index` (on the CPU) only."""
        if self.model is not None:
            self.model.keep(index)
        self.start, self.end = self.start[index], self.end[index]

    def _move(self, start: Tensor) -> None:
        self.start = start
        self.is_cut = bool(start.any())

    def _slots(self, positions: Tensor) -> Tensor:
        """Where the model holds `positions` [B]."""
        return positions - self.start if self.is_cut else positions

    def _start(self, end: Tensor) -> Tensor:
        """Where to start so that positions up to `end` [B] fit: a matter of the row alone, whatever its neighbours."""
        if self.context is None:
            return self.start
        excess = (end - self.context).clamp_min(0)
        return torch.maximum(self.start, (excess + self.step - 1) // self.step * self.step)

    def _read_again(self, sequences: Sequences, length: Tensor) -> Tensor:
        count = self._slots(length)
        columns = int(count.max())
        self.end = length
        ids = self.text.read(sequences, length - columns, columns)
        self.last_pass = ids[:, -1:], count - 1
        logits, self.model = self.prefill(ids, columns - count)
        return logits
