"""How many tokens rounds may yield: what the rounds of a call tell of it, row by row."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray


LEVELS = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.97)  # chances of a draft to be kept
STEP = 0.5  # prior weight of a level for the positions behind, for each step between it and that of the first one
NEARING = (0.0, 0.8)  # share that a position keeps of the difference that the one before it had to those far behind
CHANGE = 1000.0  # tokens in which a text is expected to change once; later in as many more as it already has


class RunningAcceptance:
    """
    What is believed of R rows: weights of H kinds of text.

    In a text of a kind, the chance that a draft is kept where all before it were goes from one level at the first
    position to another, or the same, at those behind. After each round the kinds are weighed by how likely they made
    what was kept (Bayes' rule); as the text may change, a little of the weights returns to the prior. Tokens are means
    over the kinds, not those of a mean chance, which would tell less of long rounds than good kinds promise.

    Only what happened up to the first rejection of a round counts: what was drafted behind it came of random numbers
    that seeded rows will meet again, and must decide nothing.

    Args:
        num_rows (`int`): R.
        longest (`int`): M, the most drafts of a round.

    Attributes:
        tokens (array of shape [M + 1, H]): expected tokens of a round of m = 0 ... M drafts in a text of each kind.
    """

    def __init__(self, num_rows: int, longest: int):
        levels = list(enumerate(LEVELS))
        kinds = [(*a, *b, near) for a, b, near in itertools.product(levels, levels, NEARING) if a != b or near == 0]
        place, first, other_place, behind, near = (np.array(each)[:, None] for each in zip(*kinds, strict=True))
        chances = behind + (first - behind) * near ** np.arange(longest)
        kept = np.hstack([np.ones_like(first), chances.cumprod(1)])
        self.tokens = kept.cumsum(1).T.copy()
        self.all_kept, self.rejected = kept.T.copy(), (kept[:, :-1] * (1 - chances)).T.copy()  # [M + 1, H], [M, H]
        prior = STEP ** np.abs(place - other_place)[:, 0]
        self.prior = prior / prior.sum()
        self.weights = np.tile(self.prior, (num_rows, 1))
        self.num_tokens = 0.0

    def update(self, rows: NDArray, lengths: NDArray, num_kept: NDArray) -> None:
        """Take in a round of the rows `rows` [B], which were to draft `lengths` [B] and kept `num_kept` [B].

        A source that stopped short has missed the position behind its last draft.
        """
        weights = self.weights[rows]
        if lengths.any():
            rejected = self.rejected[np.minimum(num_kept, len(self.rejected) - 1)]
            weights *= np.where((num_kept < lengths)[:, None], rejected, self.all_kept[num_kept])
            weights /= weights.sum(1, keepdims=True)
        new = 1 + int(num_kept.sum()) / len(rows)
        change = 1 - (1 - 1 / (CHANGE + self.num_tokens)) ** new
        self.weights[rows] = weights + change * (self.prior - weights)
        self.num_tokens += new

    def of_rows(self, rows: NDArray) -> NDArray:
        """[H], the mean over the `rows` [B]: rounds of all of them together yield what it tells, times B."""
        return np.asarray(self.weights[rows].sum(0) / len(rows))
