"""How often drafts have been kept of late, by position and by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


FIRST_GUESS = 0.6  # chance of being kept before anything is known
GUESS_WEIGHT = 1.0  # drafts that this guess is worth
NEIGHBOUR_WEIGHT = 4.0  # drafts at a position that the estimate of the one before it is worth
POOL_WEIGHT = 10.0  # drafts of a row that the estimate from all rows is worth
HOPE = 0.9  # chance that may be hoped for at a position not seen yet
MEMORY = 100.0  # rounds after which a round counts 1 / e


def chances(kept: Sequence[float], tried: Sequence[float], is_hopeful: bool = False) -> list[float]:
    """Chances [M] of a draft at each position, from how many [M] were tried there and kept."""
    chance = (sum(kept) + GUESS_WEIGHT * FIRST_GUESS) / (sum(tried) + GUESS_WEIGHT)
    result: list[float] = []
    for successes, trials in zip(kept, tried, strict=True):
        chance = (successes + NEIGHBOUR_WEIGHT * chance) / (trials + NEIGHBOUR_WEIGHT)
        if is_hopeful and result:
            chance = max(chance, (successes + NEIGHBOUR_WEIGHT * HOPE) / (trials + NEIGHBOUR_WEIGHT))
        result.append(chance)
    return result


class RunningAcceptance:
    """
    Chances that a draft is kept where all before it in its round were, for R rows and M positions.

    Counts fade, so that the text may change. An estimate leans on the position before it, which knows more, and that
    of a row on all rows together. Only what happened up to the first rejection of a round counts: what was
    drafted behind it came of random numbers that seeded rows will meet again, and must decide nothing.
    """

    def __init__(self, num_rows: int, num_positions: int):
        shape = num_rows, num_positions
        self.kept, self.tried = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        self.all_kept, self.all_tried = (torch.zeros(num_positions, dtype=torch.float64) for _ in range(2))
        self.place = torch.arange(num_positions)

    def update(self, rows: Tensor, lengths: Tensor, num_kept: Tensor) -> None:
        """Take in a round of the rows `rows` [B], which were to draft `lengths` [B] and kept `num_kept` [B].

        A source that stopped short has missed the position behind its last draft.
        """
        is_kept = (self.place < num_kept[:, None]).double()
        is_tried = (self.place < torch.minimum(num_kept + 1, lengths)[:, None]).double()
        fading = 1 - 1 / MEMORY
        for own, every, new in ((self.kept, self.all_kept, is_kept), (self.tried, self.all_tried, is_tried)):
            own[rows] = own[rows] * fading + new
            every.mul_(fading).add_(new.sum(0))

    def of_all(self, is_hopeful: bool = False) -> list[float]:
        """M chances, of all rows together; if hopeful, with better ones at positions seldom seen, behind the first."""
        return chances(self.all_kept.tolist(), self.all_tried.tolist(), is_hopeful)

    def of_rows(self, rows: Tensor, is_hopeful: bool = False) -> Tensor:
        """[B, M]."""
        pool = torch.tensor(self.of_all(is_hopeful), dtype=torch.float64)
        return (self.kept[rows] + POOL_WEIGHT * pool) / (self.tried[rows] + POOL_WEIGHT)
