"""`num_assistant_tokens_schedule="auto"`: each round drafts as many tokens as promise the highest speed.

All rows of a batch draft alike. A round takes as long as its longest row needs, so a row that drafted less than the
others would save nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .measured_costs import MeasuredCosts
from .round_costs import RoundCosts
from .running_acceptance import RunningAcceptance
from .speed import best_length


LONGEST = 20  # drafts a round, unless `num_assistant_tokens` asks for more or the costs given end before
TRIAL_SHARE = 0.02  # of the time, which rounds may lose that are made to learn something
CREDIT = 20  # rounds without drafts after which trials are paid for, at the start
LEAST_GAIN = 1.02  # times as fast as now, for a trial, or as plain decoding
GROWTH = 1.25  # of the intervals at which drafts are tried again, while none pay
FIRST_CHECK = 8  # rounds after which plain decoding is timed again; then at double intervals


class AutoSchedule:
    """
    The draft lengths of R rows through one call.

    A round takes the length m with the most tokens expected, of all rows together, a second expected. Other lengths
    are tried where they may turn out better, as long as the trials lose little time. Whatever m is, the round emits
    the law that it should, as m depends on the text before it and on nothing that is drawn in it.

    Args:
        num_rows (`int`): R.
        start (`int`): drafts of the first round, if costs are measured.
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
        self.shortest, self.longest, self.given, self.clock = shortest, longest, costs, clock
        self.measured = MeasuredCosts(longest)
        self.acceptance = RunningAcceptance(num_rows, longest)
        self.start = start
        self.first_lengths = [] if costs is not None else [start] if shortest > 0 else [start, 0]
        self.expected: dict[tuple[int, ...], list[float]] = {}  # tokens, as long as no drafts are made that tell more
        self.num_active = num_rows
        self.num_rounds, self.next_check = 0, FIRST_CHECK
        self.elapsed = self.lost = 0.0  # seconds of all rounds, and those that trials lost
        self.worth: float | None = None  # seconds in which the tokens of the trial going on would have come without it
        self.num_plain = 0  # rounds without drafts since the last trial
        self.patience = 1.0  # how many times longer to wait for the next one than for the first

    def lengths(self, rows: Tensor, remaining: Tensor) -> Tensor:
        """[B] on the CPU: drafts of the active `rows`; a round yields one token more than it keeps of them."""
        self.asked = torch.minimum(torch.tensor(self._choose(rows, remaining)), remaining - 1)
        self.began = self.clock()
        return self.asked

    def update(self, rows: Tensor, num_drafted: Tensor, num_accepted: Tensor) -> None:
        """Learn from a round, of which the host has just got the results, so that all its work is done."""
        length = int(self.asked.max())
        seconds = self.given.seconds(len(rows))[length] if self.given is not None else self.clock() - self.began
        self.measured.add(length, seconds)
        if length > 0:
            self.acceptance.update(rows, self.asked, num_accepted)
            self.expected.clear()
        self.num_rounds += 1
        self.elapsed += seconds
        if self.worth is not None:
            self.lost += max(0.0, seconds - self.worth)

    def _choose(self, rows: Tensor, remaining: Tensor) -> int:
        self.worth = None
        self._notice(len(rows))
        if self.first_lengths:
            return self.first_lengths.pop(0)
        seconds = self.measured.estimates() if self.given is None else self.given.seconds(len(rows))
        seconds = seconds[: self.longest + 1]
        tokens = self._tokens(rows, remaining)
        if self.num_rounds == 0:
            can_pay = max((m + 1) / each for m, each in enumerate(seconds)) > 1 / seconds[0]
            return best_length(tokens, seconds, max(1, self.shortest)) if can_pay else self.shortest
        best = self._best(tokens, seconds)
        self.num_plain = self.num_plain + 1 if best == 0 else 0
        self.patience = self.patience if best == 0 else 1.0
        rate = tokens[best] / seconds[best]
        if self.given is None and self.num_rounds == 2:  # the first round was a trial too, as can be told now
            self.lost = max(0.0, self.elapsed - (tokens[self.start] + tokens[0]) / rate)
        trial = self._check(best)
        if trial is None:
            trial = self._promising(best, rate, tokens, seconds, self._tokens(rows, remaining, is_hopeful=True))
        if trial is None and best == 0:
            trial = self._again(rate, tokens, seconds, len(rows))
        if trial is None:
            return best
        self.worth = tokens[trial] / rate
        return trial

    def _best(self, tokens: list[float], seconds: list[float]) -> int:
        """The fastest length; measured costs are not exact enough to draft for a gain that is next to none."""
        best = best_length(tokens, seconds, self.shortest)
        gain = tokens[best] / seconds[best] / (tokens[0] / seconds[0])
        return 0 if self.given is None and self.shortest == 0 and gain < LEAST_GAIN else best

    def _notice(self, num_active: int) -> None:
        """Where rows have left the batch, rounds cost less than they did."""
        if num_active != self.num_active:
            self.num_active = num_active
            self.measured.fade()
            self.next_check = min(self.next_check, self.num_rounds + FIRST_CHECK)

    def _tokens(self, rows: Tensor, remaining: Tensor, is_hopeful: bool = False) -> list[float]:
        """Expected tokens [M + 1] of all rows together; a row gets no more than it has left."""
        if int(remaining.min()) <= self.longest:
            return self._tokens_of(rows, is_hopeful, torch.arange(self.longest) < remaining[:, None] - 1)
        key = is_hopeful, *rows.tolist()
        if key not in self.expected:
            self.expected[key] = self._tokens_of(rows, is_hopeful, torch.tensor(True))
        return self.expected[key]

    def _tokens_of(self, rows: Tensor, is_hopeful: bool, has_room: Tensor) -> list[float]:
        kept = self.acceptance.of_rows(rows, is_hopeful).cumprod(1) * has_room
        return [float(len(rows)), *(len(rows) + kept.sum(0).cumsum(0)).tolist()]

    def _check(self, best: int) -> int | None:
        """Plain decoding, if it should be timed again."""
        if self.given is not None or self.shortest > 0 or best == 0 or self.num_rounds < self.next_check:
            return None
        self.next_check = 2 * self.num_rounds
        return 0

    def _promising(
        self, best: int, rate: float, tokens: list[float], seconds: list[float], hopeful: list[float]
    ) -> int | None:
        """The length that would be fastest with luck, of those that a trial can be paid of."""
        lucky = seconds if self.given is not None else self.measured.hopeful(seconds)
        means = TRIAL_SHARE * (self.elapsed + CREDIT * seconds[0]) - self.lost
        lengths = [
            m
            for m in range(self.shortest, self.longest + 1)
            if m != best
            and hopeful[m] / lucky[m] > LEAST_GAIN * rate
            and (seconds[m] + lucky[m]) / 2 - tokens[m] / rate <= means
        ]
        return max(lengths, key=lambda m: hopeful[m] / lucky[m], default=None)

    def _again(self, rate: float, tokens: list[float], seconds: list[float], num_rows: int) -> int | None:
        """Drafts after rounds without any, as the text may have changed; each time after more of them."""
        length = best_length(tokens, seconds, 1)
        can_pay = num_rows * (length + 1) / seconds[length] > rate
        loss = seconds[length] - tokens[length] / rate
        if not can_pay or TRIAL_SHARE * self.num_plain * seconds[0] < self.patience * loss:
            return None
        self.num_plain, self.patience = 0, GROWTH * self.patience
        return length
