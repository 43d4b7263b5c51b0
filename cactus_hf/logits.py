"""From raw logits to the law tokens are drawn from: the user's logits processors, on blocks of positions.

Target and draft go through the same processors, so that acceptance compares like with like. Processors that look at
nothing but the logits run once on all rows of a block. The others run position by position on the exact prefixes, in
transformers' own layout: the whole batch of R rows, padding included, so that a processor finds each row where plain
decoding would show it. Rows of one length share a call. Those that remember earlier calls go row by row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import generation as hf

from .object_state import copied, name_of
from .probabilities import widened
from .processor_kinds import CONTEXT_FREE, PREFIX_ONLY, is_among
from .remembering import Rewindable, Watched, is_function, made_up_scores
from .sequences import Sequences
from .warpers import Warpers


Processor = Callable[[Tensor, Tensor], Tensor]


class OwnProcessor(Watched):
    """A logits processor of the user's own class, or one of transformers' that remembers.

    Args:
        original (`Callable`): the processor.
        prompts (`torch.Tensor` of shape [R, P])
        vocab_size (`int`): the target's V.
    """

    def __init__(self, original: Processor, prompts: Tensor, vocab_size: int):
        super().__init__(original, prompts, made_up_scores(prompts, vocab_size))

    def part(self) -> None:
        super().part()
        self.rows = [Rewindable(row) for row in self.rows or []]

    def on_block(self, logits: Tensor, sequences: Sequences, offset: int, is_draft: bool) -> Tensor:
        if self.rows is None:
            processed = _on_prefixes(self.shared, logits, sequences, offset)
            if not self.has_changed():
                return processed
            self.part()
        rows = self.rows
        assert rows is not None

        def process(row: int, ids: Tensor, scores: Tensor, num_drafts: int) -> Tensor:
            return _checked(self.original, rows[row](ids, scores, num_drafts == 0, is_draft), scores)

        return _row_by_row(process, logits, sequences, offset)

    def finish(self, sequences: Sequences) -> None:
        """Bring the user's own processor up to the end of its text; in a batch there is none, each row has copies."""
        if self.rows is not None and len(self.rows) == 1:
            self.rows[0].catch_up(sequences.tokens[:, : int(sequences.length[0])])


class RowProcessors:
    """A processor for each row, none of which remembers anything.

    Args:
        rows (list of `Callable`): take that row's ids [1, T] and scores [1, V].
    """

    def __init__(self, rows: Sequence[Processor]):
        self.rows = rows

    def on_block(self, logits: Tensor, sequences: Sequences, offset: int) -> Tensor:
        def process(row: int, ids: Tensor, scores: Tensor, num_drafts: int) -> Tensor:
            try:
                return self.rows[row](ids, scores)
            except Exception:
                if num_drafts == 0:
                    raise
                return torch.full_like(scores, -torch.inf)  # it does not take the drafts

        return _row_by_row(process, logits, sequences, offset)


class BlockProcessor:
    """The logits processors of one `generate()` call, made to run on blocks.

    Args:
        processors (list of `LogitsProcessor`): in order; those that may remember earlier calls as [`OwnProcessor`].
        is_draft (`bool`, *optional*, defaults to `False`): whether they are the draft's logits that come.
    """

    def __init__(self, processors: Sequence[Processor | OwnProcessor | RowProcessors], is_draft: bool = False):
        self.processors, self.is_draft = list(processors), is_draft
        self.steps: list[Any] = []
        for is_context_free, group in itertools.groupby(processors, lambda each: is_among(each, CONTEXT_FREE)):
            members = list(group)
            self.steps += [Warpers(members)] if is_context_free else members

    @property
    def reads_text(self) -> bool:
        """Whether any of them looks at the tokens so far."""
        return not all(isinstance(step, Warpers) for step in self.steps)

    @classmethod
    def of_call(cls, processors: Sequence[Processor], prompts: Tensor, vocab_size: int) -> BlockProcessor:
        """
        Args:
            processors (list of `LogitsProcessor`): as transformers prepared them.
            prompts (`torch.Tensor` of shape [R, P]): what those that may remember are tried out on.
            vocab_size (`int`): the target's V.

        Raises:
            ValueError: for processors that cannot be copied, or that remember and cannot serve one row of several.
        """
        known = CONTEXT_FREE | PREFIX_ONLY
        return cls(
            [
                each
                if isinstance(each, RowProcessors) or is_function(each) or is_among(each, known)
                else OwnProcessor(each, prompts, vocab_size)
                for each in processors
            ]
        )

    def for_draft(self) -> BlockProcessor:
        """The same for the draft's logits: what the processors remember is shared, and not moved on by drafting."""
        return BlockProcessor(self.processors, is_draft=True)

    def for_generators(self) -> hf.LogitsProcessorList:
        """Processors for candidate generators of transformers, which call them on drafts only: none that remembers."""
        processors = hf.LogitsProcessorList()
        for each in self.processors:
            if not isinstance(each, (OwnProcessor, RowProcessors)):
                processors.append(each)
            elif each.rows is None:
                processors.append(copied(each.original))
        return processors

    def __call__(self, logits: Tensor, sequences: Sequences, offset: int = 0) -> Tensor:
        """Process `logits` [B, T, V], whose first position predicts the column `offset` behind the committed ones.

        Behind drafts that a processor does not take, or lets nothing follow, all logits are -inf. Without processors
        the logits come back as they are; else in float32 or float64, possibly in place.
        """
        if not self.processors:
            return logits
        logits = widened(logits)
        is_void: Tensor | None = None
        for processor in self.steps:
            if isinstance(processor, Warpers):
                logits = processor(logits.flatten(0, 1)).view_as(logits)
                continue
            if isinstance(processor, OwnProcessor):
                logits = processor.on_block(logits, sequences, offset, self.is_draft)
            elif isinstance(processor, RowProcessors):
                logits = processor.on_block(logits, sequences, offset)
            else:
                logits = _on_prefixes(processor, logits, sequences, offset)
            is_empty = (logits == -torch.inf).all(-1)
            if offset == 0 and not self.is_draft:  # a prefix that plain decoding comes to
                is_empty[:, 0] = False
            is_void = is_empty if is_void is None else is_void | is_empty
            logits = logits.masked_fill(is_void[..., None], 0.0)  # the next processors take nothing but laws
        return logits if is_void is None else logits.masked_fill(is_void[..., None], -torch.inf)

    def on_step(self, logits: Tensor, sequences: Sequences, offset: int) -> Tensor:
        """The same for one position, `logits` [B, V]."""
        if len(self.steps) == 1 and isinstance(self.steps[0], Warpers):
            return self.steps[0](widened(logits))
        return self(logits.unsqueeze(1), sequences, offset).squeeze(1)

    def finish(self, sequences: Sequences) -> None:
        """Call the processors that remember on what was committed since, so that they end as after plain decoding."""
        for processor in self.processors:
            if isinstance(processor, OwnProcessor):
                processor.finish(sequences)


def _on_prefixes(processor: Processor, logits: Tensor, sequences: Sequences, offset: int) -> Tensor:
    processed = torch.full_like(logits, -torch.inf)
    for length, index in sequences.by_length():
        rows = sequences.row_index[index.to(logits.device)]
        # Rows of other lengths hold drafts and remains of such there: in their places stands one of these rows
        shown = torch.arange(len(sequences.tokens), device=rows.device)
        shown = torch.where(torch.isin(shown, rows), shown, rows[0])
        for t in range(logits.shape[1]):
            scores = logits.new_zeros(len(shown), logits.shape[2])
            scores[rows] = logits[index, t]
            try:
                result = processor(sequences.tokens[shown, : length + offset + t], scores)
            except Exception:
                if offset + t == 0:
                    raise
                break  # it does not take the drafts; should the text come to this prefix, then it raises
            processed[index, t] = _checked(processor, result, scores)[rows]
    return processed


def _row_by_row(
    process: Callable[[int, Tensor, Tensor, int], Tensor], logits: Tensor, sequences: Sequences, offset: int
) -> Tensor:
    """`process` takes row, ids [1, T], scores [1, V] and how many drafts stand at the end of the ids."""
    processed = torch.empty_like(logits)
    for b, row in enumerate(sequences.rows.tolist()):
        for t in range(logits.shape[1]):
            ids = sequences.tokens[row : row + 1, : int(sequences.length[row]) + offset + t]
            processed[b, t] = process(row, ids, logits[b, t : t + 1].clone(), offset + t)[0]
    return processed


def _checked(processor: Processor, result: Tensor, scores: Tensor) -> Tensor:
    if result.shape != scores.shape:
        raise ValueError(
            f"The logits processor {name_of(processor)} was given scores of shape {list(scores.shape)} and returned "
            f"{list(result.shape)}: it must keep the shape."
        )
    return result.to(scores.dtype)


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V'] of a draft over the target's `vocab_size` ids.

    Models of one family pad their vocabularies differently. Ids that the target lacks are dropped, so that the draft
    is drawn from its law over the common ids; ids that the draft lacks get no mass.
    """
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
