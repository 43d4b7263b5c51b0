"""Where a row ends inside a block of several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import generation as hf

from .outputs import TokenRows
from .ranks import ALONE, Ranks
from .remembering import Watched, is_function, made_up_scores, row_of
from .sequences import Sequences


STATELESS = (hf.MaxTimeCriteria, hf.StopStringCriteria)


class OwnCriterion(Watched):
    """A stopping criterion of the user's own class, for several rows. A single row needs nothing like it."""

    def ask(self, prefixes: Tensor, scores: tuple[Tensor, ...] | None, rows: list[int]) -> Tensor:
        """Answers [R] that count for `rows` only."""
        if self.rows is None:
            answer = self.shared(prefixes, scores)
            if not self.has_changed():
                return answer
            self.part()
        assert self.rows is not None
        answers = torch.zeros(len(prefixes), dtype=torch.bool)
        for row in rows:
            answers[row] = bool(self.rows[row](prefixes[row : row + 1], row_of(scores, row)))
        return answers


class Stopping:
    """The stopping criteria of one `generate()` call, applied to every committed prefix.

    End-of-sequence ids are looked for on the device, lengths are bounded by `max_length`; all other criteria are asked
    about each prefix in turn, as plain decoding would ask them: with the whole batch, cut at one length; or, if they
    turn out to remember earlier calls, each row by itself.

    Args:
        criteria (list of `StoppingCriteria`): as transformers prepared them.
        prompts (`torch.Tensor` of shape [R, P]): to try out criteria of the user's own on.
        vocab_size (`int`, *optional*): the target's V, if criteria will be given the scores.
        ranks (`Ranks`): the processes that decode together, which may not agree on the time.
    """

    def __init__(self, criteria: Sequence, prompts: Tensor, vocab_size: int | None = None, ranks: Ranks = ALONE):
        self.ranks = ranks
        ends = [c.eos_token_id.flatten() for c in criteria if type(c) is hf.EosTokenCriteria]
        lengths = [c.max_length for c in criteria if type(c) is hf.MaxLengthCriteria]
        self.max_length = min(lengths, default=None)
        self.eos_token_ids = torch.cat(ends).to(prompts.device) if ends else None
        scores = None if vocab_size is None else (made_up_scores(prompts, vocab_size),)
        others = [c for c in criteria if type(c) not in (hf.EosTokenCriteria, hf.MaxLengthCriteria)]
        self.others: list[Callable[..., Any] | OwnCriterion] = [
            c if len(prompts) == 1 or is_function(c) or type(c) in STATELESS else OwnCriterion(c, prompts, scores)
            for c in others
        ]

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

    def cut_by_criteria(
        self, sequences: Sequences, count: Tensor, has_ended: Tensor, scores: TokenRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same for the criteria that only the host can ask.

        `count` and `has_ended` [B] are on the CPU; `scores` hold those of the `count` tokens too.
        """
        if not self.others:
            return count, has_ended
        count, has_ended = count.clone(), has_ended.clone()
        length, limit = sequences.length[sequences.rows], count.clone()
        is_open = torch.ones_like(has_ended)
        for columns in range(int(length.min()) + 1, int((length + limit).max()) + 1):
            is_asked = is_open & (length < columns) & (columns <= length + limit)
            if is_asked.any():
                so_far = None if scores is None else tuple(scores.tokens[: columns - sequences.prompt_length])
                asked = sequences.rows[is_asked]
                # Rows of other lengths hold drafts and remains of such there: in their places stands one of these rows
                shown = torch.full_like(sequences.length, int(asked[0])).index_put((asked,), asked)
                prefixes = sequences.tokens[shown.to(sequences.tokens.device), :columns]
                answers = self._ask(prefixes, so_far, asked.tolist())
                stops = answers[sequences.rows] & is_asked
                count = torch.where(stops, columns - length, count)
                has_ended |= stops
                is_open &= ~stops
        return count, has_ended

    def _ask(self, prefixes: Tensor, scores: tuple[Tensor, ...] | None, rows: list[int]) -> Tensor:
        """[R] on the CPU: whether any criterion stops a row of `prefixes` [R, columns]. Every one is asked."""
        answers = [
            torch.as_tensor(c.ask(prefixes, scores, rows) if isinstance(c, OwnCriterion) else c(prefixes, scores))
            for c in self.others
        ]
        return self.ranks.same(torch.stack([answer.cpu().bool().expand(len(prefixes)) for answer in answers]).any(0))
