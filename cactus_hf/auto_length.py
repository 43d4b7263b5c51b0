"""`num_assistant_tokens_schedule="auto"`: each round drafts as many tokens as promise the highest speed.

All rows of a batch draft alike. A round takes as long as its longest row needs, so a row that drafted less than the
others would save nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .measured_costs import MeasuredCosts
from .round_costs import RoundCosts
from .running_acceptance import RunningAcceptance
from .speed import best_length


LONGEST = 20  # drafts a round, unless `num_assistant_tokens` asks for more or the costs given end before
HORIZON = 300  # tokens that trials may count on: the text may end or change before the row is full
LESSONS = 4  # rounds with drafts that tell which length is best
TIMED_LESSONS = 20  # the same, where costs have to be learnt too
LUCK = 0.003  # chance that a length is as fast as it might be after the few rounds it was timed in
LEAST_GAIN = 1.05  # times as fast as plain decoding, by measured costs: they are not exact enough for less
NEXT_LOOK = 4  # rounds after which drafts are thought of again, where there is reason for none
FIRST_CHECK = 8  # rounds after which plain decoding is timed again; then at double intervals
TEXT_A_DRAFT = 45  # tokens to come, for each draft more than one in the first round that has any


class AutoSchedule:
    """
    The draft lengths of R rows through one call.

    A round takes the length m with the most tokens expected, of all rows together, a second expected. Other lengths
    are tried where more time can be won with them in the rest of the text than the trial loses. Whatever m is, the
    round emits the law that it should, as m depends on the text before it and on nothing that is drawn in it.

    Args:
        num_rows (`int`): R.
        start (`int`): the most drafts of the first round that has any, if costs are measured.
        shortest, longest (`int`): lengths to choose from.
        costs (`RoundCosts`, *optional*): what rounds cost; then m is a function of what was kept before, and the same
            seed gives the same text. If not given, rounds are timed.
        clock (`Callable`): the time in seconds.
    """

    def __init__(
        self,
        num_rows: int,
        start: int,
        shortest: int = 0,
        longest: int = LONGEST,
        costs: RoundCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.start, self.shortest, self.longest, self.given, self.clock = start, shortest, longest, costs, clock
        self.measured = MeasuredCosts(longest)
        self.acceptance = RunningAcceptance(num_rows, longest)
        self.num_active = 0
        self.num_rounds, self.next_look, self.next_check = 0, 0, FIRST_CHECK

    def lengths(self, rows: Tensor, remaining: Tensor) -> Tensor:
        """[B] on the CPU: drafts of the active `rows`; a round yields one token more than it keeps of them."""
        self.asked = (remaining - 1).clip(max=self._choose(np.asarray(rows), int(remaining.max())))
        self.began = self.clock()
        return self.asked

    def update(self, rows: Tensor, num_drafted: Tensor, num_accepted: Tensor) -> None:
        """Learn from a round, of which the host has just got the results, so that all its work is done."""
        asked = np.asarray(self.asked)
        if self.given is None:
            self.measured.add(int(asked.max()), self.clock() - self.began)
        self.acceptance.update(np.asarray(rows), asked, np.asarray(num_accepted))
        self.num_rounds += 1

    def _choose(self, rows: NDArray, remaining: int) -> int:
        self._notice(len(rows))
        if remaining == 1 or self.num_rounds < self.next_look:
            return self.shortest
        first = self._first(remaining) if self.given is None else None
        if first is not None:
            return first
        if self.given is None:
            self._set_costs(self.measured.estimates())
        weights = self.acceptance.of_rows(rows)
        tokens = self.acceptance.tokens @ weights
        best = self._best(tokens, remaining)
        trial = self._trial(best, tokens, remaining) if self.given is None else None
        if trial is None and best == 0:
            trial = self._again(weights, remaining)
            self.next_look = self.num_rounds + NEXT_LOOK if trial is None else 0
        return best if trial is None else trial

    def _notice(self, num_active: int) -> None:
        """Where rows have left the batch, rounds cost less than they did."""
        if num_active != self.num_active:
            self.num_active = num_active
            if self.given is not None:
                self._set_costs(self.given.seconds(num_active))
            self.measured.fade()
            self.next_look = 0
            self.next_check = min(self.next_check, self.num_rounds + FIRST_CHECK)

    def _set_costs(self, seconds: list[float]) -> None:
        self.seconds = np.array(seconds[: self.longest + 1])
        self.best_paces = (self.seconds[:, None] / self.acceptance.tokens).min(0)

    def _first(self, remaining: int) -> int | None:
        """The length of the first rounds: plain decoding, then drafts that a text as short as this can afford."""
        plain, *others = self.measured.rounds
        if self.shortest == 0 and not plain:
            return 0
        if any(others):
            return None
        return self.start if self.shortest > 0 else min(self.start, 1 + remaining // TEXT_A_DRAFT)

    def _best(self, tokens: NDArray, remaining: int) -> int:
        """The fastest length, if costs are measured only one that is clearly faster than plain decoding."""
        best = best_length(tokens[:remaining].tolist(), self.seconds[:remaining].tolist(), self.shortest)
        if self.given is not None or self.shortest > 0:
            return best
        gain = tokens[best] / self.seconds[best] / (tokens[0] / self.seconds[0])
        return 0 if gain < LEAST_GAIN else best

    def _trial(self, best: int, tokens: NDArray, remaining: int) -> int | None:
        """A length that should be timed: plain decoding now and then, or one that with luck would be the fastest."""
        if self.shortest == 0 < best and self.num_rounds >= self.next_check:
            self.next_check = 2 * self.num_rounds
            return 0
        seconds = self.seconds
        pace = seconds[best] / tokens[best]
        lucky = np.array(self.measured.hopeful(seconds.tolist()))
        gain = LUCK * min(remaining, HORIZON) * (pace - lucky / tokens) - (seconds - pace * tokens)
        gain[best] = 0.0
        trial = self.shortest + int(gain[self.shortest : remaining].argmax())
        return trial if gain[trial] > 0 else None

    def _again(self, weights: NDArray, remaining: int) -> int | None:
        """Drafts where plain decoding is believed to be faster, if it pays to find out: a few rounds of them, and then
        what is best for the text that it turns out to be, take less time for the rest than plain decoding does.
        """
        num_rounds = LESSONS if self.given is not None else TIMED_LESSONS
        num_tokens = min(remaining, HORIZON)
        behind = np.maximum(0.0, num_tokens - num_rounds * self.acceptance.tokens)
        total = num_rounds * self.seconds + behind @ (weights * self.best_paces)
        trial = 1 + int(total[1:remaining].argmin())
        return trial if total[trial] < num_tokens * self.seconds[0] else None
