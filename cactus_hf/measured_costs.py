"""What the rounds of a call have taken, by draft length."""

from __future__ import annotations

import itertools
import statistics
from collections import deque


MEMORY = 9  # rounds of a length that count
DOUBT = 0.5  # share by which a round may have been slower than such rounds are


class MeasuredCosts:
    """
    Seconds of a round at each draft length m = 0 ... M, from rounds timed as they come.

    Widths differ irregularly in cost (on a CPU 4 tokens may take longer than 8), so each length has an estimate of its
    own: the median of its last rounds, of two the faster one, as what disturbs a round makes it slower. Lengths that
    were not tried lie on a line through the others, with the median of the slopes between any two of these; so a
    length that was tried once lies between its round and the line.
    """

    def __init__(self, longest: int):
        self.rounds: list[deque[float]] = [deque(maxlen=MEMORY) for _ in range(longest + 1)]

    def add(self, length: int, seconds: float) -> None:
        self.rounds[length].append(seconds)

    def fade(self) -> None:
        """Keep the last round of each length only, as costs have changed."""
        for rounds in self.rounds:
            while len(rounds) > 1:
                rounds.popleft()

    def estimates(self) -> list[float]:
        """[M + 1]; at least one length must have been tried."""
        known = [(m, sorted(rounds)[(len(rounds) - 1) // 2]) for m, rounds in enumerate(self.rounds) if rounds]
        slopes = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in itertools.combinations(known, 2)]
        slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
        level = statistics.median(cost - slope * m for m, cost in known)
        cheapest = min(cost for _, cost in known)
        result = [max(cheapest, level + slope * m) for m in range(len(self.rounds))]
        for m, cost in known:
            is_sure = m == 0 or len(self.rounds[m]) > 1  # plain decoding is what all else is compared with
            result[m] = cost if is_sure else (cost + result[m]) / 2
        return result

    def hopeful(self, estimates: list[float]) -> list[float]:
        """What each length may cost with luck: less doubt the more rounds it has had.

        One that was hardly tried may be as cheap as the cheapest of the others, for each draft.
        """
        slopes = [(estimates[m] - estimates[0]) / m for m in range(1, len(estimates)) if self.rounds[m]]
        slope = min(slopes, default=0.0)
        result = []
        for m, cost in enumerate(estimates):
            count = len(self.rounds[m])
            lucky = cost * (1 - DOUBT / max(1, count))
            if m > 0 and count < 2:
                lucky = max(estimates[0], min(lucky, estimates[0] + slope * m))
            result.append(lucky)
        return result
