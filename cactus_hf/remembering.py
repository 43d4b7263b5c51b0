"""The user's own logits processors and stopping criteria, which may remember what they were called with.

Plain decoding calls each once on every prefix of the text, in order. Drafts break that order: prefixes are tried that
the text never comes to. So a processor that remembers is called on copies wherever drafts are in the prefix, and is
itself called on the committed prefixes only, as plain decoding would.

Whether one remembers is found out by looking for changes in what it holds: before the first forward pass, by calling
a copy of it on the prompts, and again whenever it has been called. Functions are taken for functions of their
arguments.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .object_state import Record, copied, name_of


def is_function(item: Any) -> bool:
    return isinstance(item, (types.FunctionType, types.BuiltinFunctionType))


def made_up_scores(prompts: Tensor, vocab_size: int) -> Tensor:
    """Scores [R, V] to try processors and criteria out on."""
    return torch.linspace(-1, 1, vocab_size, device=prompts.device).repeat(len(prompts), 1)


class Watched:
    """A processor or criterion of the user's, for R rows.

    Until a call changes it, a copy serves in its place, for all rows at once. From then on each row has a callable of
    its own, as rows of different lengths are at different places of their texts. A single row has the original.

    Args:
        original (`Callable`): takes ids [R, T] and the scores.
        prompts (`torch.Tensor` of shape [R, P]): to try it out on.
        scores (`torch.Tensor` of shape [R, V], `tuple` of them or `None`): made up, for the same end.
    """

    def __init__(self, original: Callable, prompts: Tensor, scores: Any):
        self.original, self.prompts, self.scores = original, prompts, scores
        self.rows: list[Any] | None = None
        self.shared = copied(original)
        before = Record(self.shared)
        self.shared(prompts, _repeated(scores, 1))
        self.record = Record(self.shared)
        if self.record != before:
            self.part()

    def has_changed(self) -> bool:
        """Whether the last calls have changed `shared`; then they count for nothing."""
        return Record(self.shared) != self.record

    def part(self) -> None:
        """Give each row a callable of its own. No call so far has made a difference."""
        num_rows = len(self.prompts)
        if num_rows == 1:
            self.rows = [self.original]
            return
        expected = self._expected()
        for width in (1, num_rows):
            if all(self._fits(row, width, expected) for row in range(num_rows)):
                self.rows = [OfRow(copied(self.original), row, width) for row in range(num_rows)]
                return
        raise self._error("gives a row something else where it is shown that row alone")

    def _expected(self) -> Any:
        return copied(self.original)(self.prompts, _repeated(self.scores, 1))

    def _fits(self, row: int, width: int, expected: Any) -> bool:
        """Whether a copy that is shown one row only, `width` times over, treats it as in the batch."""
        trial = OfRow(copied(self.original), row, width)
        try:
            result = trial(self.prompts[row : row + 1], row_of(self.scores, row))
        except Exception as error:
            raise self._error("takes no single row") from error
        if width == 1 and Record(trial).holds(len(self.prompts)):  # one value a row, perhaps: let it keep its place
            return False
        result, expected = torch.as_tensor(result), torch.as_tensor(expected)
        expected = expected[row : row + 1] if expected.dim() > 0 else expected
        # Sums may come out in another order
        return result.shape == expected.shape and torch.allclose(result.double(), expected.double(), atol=1e-3)

    def _error(self, cause: str) -> ValueError:
        return ValueError(
            f"{name_of(self.original)} remembers earlier calls, so that each of the {len(self.prompts)} rows needs a "
            f"copy of its own, but it {cause}: call `generate()` row by row."
        )


class OfRow:
    """A copy that serves one row.

    Args:
        inner (`Callable`): the copy.
        row (`int`): the row.
        width (`int`): how many rows it is shown, all of them with the text of that one.
    """

    def __init__(self, inner: Callable, row: int, width: int):
        self.inner, self.row, self.width = inner, row, width

    def __call__(self, ids: Tensor, scores: Any) -> Any:
        """`ids` [1, T] and `scores` are this row's."""
        if self.width == 1:
            return self.inner(ids, scores)
        try:
            result = torch.as_tensor(self.inner(ids.repeat(self.width, 1), _repeated(scores, self.width)))
        except Exception as error:
            raise ValueError(
                f"{name_of(self.inner)} remembers earlier calls and holds {self.width} values, as if one for each "
                "row. Shown one row's text in the place of the others' it failed: call `generate()` row by row."
            ) from error
        return result[self.row : self.row + 1] if result.dim() > 0 else result


def _repeated(scores: Any, times: int) -> Any:
    """A copy of `scores` [R, V], or of a tuple of such, with the rows `times` over."""
    if isinstance(scores, tuple):
        return tuple(_repeated(each, times) for each in scores)
    return scores if scores is None else scores.repeat(times, 1)


def row_of(scores: Any, row: int) -> Any:
    """A copy of one row of what stopping criteria and processors are given."""
    if isinstance(scores, tuple):
        return tuple(row_of(each, row) for each in scores)
    return scores if scores is None else scores[row : row + 1].clone()


class Rewindable:
    """A logits processor that remembers, serving one row.

    A round begins behind the committed text: its first prefix is one that plain decoding comes to, the others have
    drafts in them. These are tried on a copy, and made up for on the processor itself once the drafts are kept.

    Args:
        committed (`Callable`): has seen, or will see, every committed prefix once, in order.
    """

    def __init__(self, committed: Callable):
        self.committed = committed
        self.trial: Callable | None = None
        self.is_broken = False  # whether the trial has raised
        self.tried: list[tuple[int, Tensor]] = []  # the target's calls of a round: length of the prefix, scores

    def __call__(self, ids: Tensor, scores: Tensor, is_first: bool, is_draft: bool) -> Tensor:
        """
        Args:
            ids (`torch.Tensor` of shape [1, T]): the prefix.
            scores (`torch.Tensor` of shape [1, V]): may be written to.
            is_first (`bool`): whether the prefix has no drafts in it.
            is_draft (`bool`): whether the scores are the draft's.
        """
        if is_first:
            self.catch_up(ids)
            self.trial, self.is_broken = None, False
            if not is_draft:
                return self.committed(ids, scores)
        if self.trial is None:
            self.trial = copied(self.committed)
        if not is_draft:
            self.tried.append((ids.shape[1], scores.clone()))
        if not self.is_broken:
            try:
                return self.trial(ids, scores.clone())
            except Exception:
                # Drafts may be what it does not take, or stand behind an end. Should the text come to this prefix,
                # then the processor itself raises.
                self.is_broken = True
        return torch.full_like(scores, -torch.inf)

    def catch_up(self, ids: Tensor) -> None:
        """Make up for the calls on prefixes that the text `ids` [1, T] has come to."""
        tried, self.tried = self.tried, []
        for length, scores in tried:
            if length < ids.shape[1]:
                self.committed(ids[:, :length], scores)
