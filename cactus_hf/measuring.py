"""Timing that is fair to each method: turns in one process, clocks read when the device is done, counts of tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar


if TYPE_CHECKING:
    import torch

    from .counters import SpeculationStats

Result = TypeVar("Result")


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all its work."""
    import torch

    torch.get_device_module(device).synchronize()


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What `call` returns, and the seconds until `device` had done its work."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def turns(repeats: int, time_limit: float | None = None) -> Iterator[int]:
    """0, 1, ..., `repeats` - 1, for methods that take turns, so that a machine whose speed changes treats them alike.

    With `time_limit` (seconds) no turn is begun that would end behind it, were it as long as those before.
    """
    start = time.perf_counter()
    for turn in range(repeats):
        yield turn
        elapsed = time.perf_counter() - start
        if time_limit is not None and elapsed * (turn + 2) / (turn + 1) > time_limit:
            return


class Speeds:
    """What the speeds of several runs come to; for classes that hold the tokens and seconds of each."""

    new_tokens: list[int]
    seconds: list[float]

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [tokens / seconds for tokens, seconds in zip(self.new_tokens, self.seconds, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Median over the runs."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Fastest minus slowest run, as a share of the median."""
        return (max(self.rates) - min(self.rates)) / self.tokens_per_second


class Counts(NamedTuple):
    """What happened to drafts, over all rounds of all rows; a round is a row's, rows of a batch have one each."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0  # up to and including each round's first rejection
    accepted: int = 0
    emitted: int = 0  # tokens that rounds yielded
    ball_kl_sum: float = 0.0  # nats

    @classmethod
    def of(cls, calls: Iterable[SpeculationStats]) -> Counts:
        """Those of some `generate()` calls."""
        total = cls()
        for stats in calls:
            emitted = stats.emitted - (stats.emitted > 0).long()  # the first token belongs to no round
            rounds, drafted, verified, accepted, num_emitted = (
                int(part.sum()) for part in (stats.rounds, stats.drafted, stats.verified, stats.accepted, emitted)
            )
            ball_kl_sum = float(stats.ball_kl_sum.sum())
            total = total.plus(cls(rounds, drafted, verified, accepted, num_emitted, ball_kl_sum))
        return total

    @classmethod
    def of_rounds(cls, rounds: Sequence[tuple[int, int]], emitted: int) -> Counts:
        """Those of rounds (drafted, kept), told by other means; their ball KL is not known, and 0."""
        drafted, accepted = sum(each[0] for each in rounds), sum(each[1] for each in rounds)
        num_rejections = sum(kept < num_drafts for num_drafts, kept in rounds)
        return cls(len(rounds), drafted, accepted + num_rejections, accepted, emitted)

    def plus(self, other: Counts) -> Counts:
        return Counts._make(own + its for own, its in zip(self, other, strict=True))

    # A text may end with its first token, before any round

    @property
    def tokens_per_round(self) -> float | None:
        return self.emitted / self.rounds if self.rounds else None

    @property
    def accepted_length(self) -> float | None:
        """AL, kept drafts a round."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> float | None:
        """Kept share of the drafts that were checked."""
        return self.accepted / self.verified if self.verified else None

    @property
    def ball_kl(self) -> float | None:
        """Mean KL(h || q) in nats a checked draft, h being the law that raises the drafted token."""
        return self.ball_kl_sum / self.verified if self.verified else None
