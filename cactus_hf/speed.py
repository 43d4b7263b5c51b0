"""How fast speculation is: tokens and seconds of a round, from how often drafts are kept and what passes cost."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence


def expected_tokens(acceptance: Sequence[float], num_drafts: int) -> float:
    """
    Mean number of tokens that a round of `num_drafts` drafts yields: the kept ones, and one more.

    Args:
        acceptance (sequence of `float`): by position, the chance that a draft is kept where all before it were. The
            last one holds for the positions behind it.
        num_drafts (`int`): m, 0 or more.

    Raises:
        ValueError: for drafts without any chances.
    """
    if num_drafts > 0 and not acceptance:
        raise ValueError(f"`acceptance` is empty, but there are {num_drafts} drafts: give at least one chance.")
    behind = itertools.repeat(acceptance[-1] if acceptance else 0.0)
    chances = itertools.islice(itertools.chain(acceptance, behind), num_drafts)
    return 1.0 + sum(itertools.accumulate(chances, operator.mul))


def tokens_per_second(acceptance: Sequence[float], seconds: Sequence[float], batch_size: int = 1) -> list[float]:
    """The predicted speed of a batch at each draft length m = 0, 1, ...; `seconds` [M + 1] are those of a round."""
    return [batch_size * expected_tokens(acceptance, m) / each for m, each in enumerate(seconds)]


def best_length(tokens: Sequence[float], seconds: Sequence[float], shortest: int = 0) -> int:
    """The draft length m, at least `shortest`, with the most tokens a second; the shorter one of equals.

    Args:
        tokens, seconds (sequences of M + 1 `float`): of a round at each m = 0 ... M.
    """
    return max(range(shortest, len(seconds)), key=lambda m: (tokens[m] / seconds[m], -m))
