"""What rounds of a pair of models cost and yield here, by draft length and delta, and what follows for the speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .bench.prompts import Batch
from .counters import SpeculationStats, track
from .generation import enable
from .measuring import timed
from .round_clock import RoundClock, RoundSeconds
from .round_costs import RoundCosts
from .speed import expected_tokens


Progress = Callable[[str], None]
FIRST_GUESS = 0.6  # chance of being kept before anything is known; it counts like one draft
NEIGHBOUR_WEIGHT = 4.0  # drafts at a position that the estimate of the one before it is worth
# Of a round that drafts pay for in no case, so that none are made
NO_DRAFTS = {"1": {"draft": [1.0], "verify": [1.0, 1.0]}}


class Setting(NamedTuple):
    """A way to decode: `length` drafts a round at `delta` nats, or with the schedule "auto" and costs instead."""

    length: int | None
    delta: float


@dataclass
class Found:
    """
    What was measured at one batch size.

    Args:
        rounds (`dict`): by draft length, the medians of its rounds.
        acceptance (`dict`): by delta, the chance of a draft at each position to be kept if those before it were.
        plain (`float`): tokens a second of transformers' own `generate()`.
        measured (`dict`): tokens a second of the settings that were measured.
    """

    batch_size: int
    rounds: dict[int, RoundSeconds] = field(default_factory=dict)
    acceptance: dict[float, list[float]] = field(default_factory=dict)
    plain: float = 0.0
    measured: dict[Setting, float] = field(default_factory=dict)

    def predicted(self, setting: Setting) -> float:
        """Tokens a second of all rows together, prompts left out."""
        return self.batch_size * self.tokens(setting) / sum(self.rounds[setting.length or 0])

    def tokens(self, setting: Setting) -> float:
        """Expected tokens of a round of one row."""
        return expected_tokens(self.acceptance[setting.delta], setting.length or 0)

    def fastest(self) -> Setting:
        """Of the measured settings with a length, or by prediction where none were."""
        measured = {setting: rate for setting, rate in self.measured.items() if setting.length is not None}
        return max(measured, key=lambda each: measured[each]) if measured else self.ranked()[0]

    def ranked(self) -> list[Setting]:
        """The settings, the fastest one first, by prediction. Without drafts all deltas are the same one."""
        first = next(iter(self.acceptance))
        settings = [Setting(m, delta) for delta in self.acceptance for m in self.rounds if m > 0 or delta == first]
        return sorted(settings, key=self.predicted, reverse=True)

    def costs(self) -> dict[str, list[float]]:
        """The entry of this batch size in `speculation_costs`; lengths between measured ones lie on the line."""
        lengths = sorted(self.rounds)
        every = range(lengths[-1] + 1)
        draft, verify = (
            [_interpolated(lengths, [self.rounds[m][part] for m in lengths], m) for m in every] for part in (0, 1)
        )
        return {"draft": draft[1:], "verify": verify}


def _interpolated(places: Sequence[int], values: Sequence[float], place: int) -> float:
    above = next(i for i, each in enumerate(places) if each >= place)
    if places[above] == place:
        return values[above]
    share = (place - places[above - 1]) / (places[above] - places[above - 1])
    return values[above - 1] + share * (values[above] - values[above - 1])


class Tuner:
    """
    Args:
        target, draft (`PreTrainedModel`): the pair; the target gets enabled.
        options (`dict`): of every call of `generate()`.
        seed (`int`): of every call.
        progress (`Callable`): is told of each call that begins.
    """

    def __init__(self, target: Any, draft: Any, options: dict[str, Any], seed: int, progress: Progress):
        enable(target)
        self.target, self.draft, self.options = target, draft, options
        self.seed, self.progress = seed, progress

    def generate(self, batch: Batch, setting: Setting | None, costs: dict | None = None, **options: Any) -> Any:
        """Ids of one call; plain without a setting. Draft length 0 is our loop without drafts."""
        torch.manual_seed(self.seed)
        own: dict[str, Any] = {}
        if setting is not None:
            own = {"assistant_model": self.draft, "cactus_delta": setting.delta, "assistant_confidence_threshold": 0.0}
            own["num_assistant_tokens_schedule"] = "constant" if setting.length else "auto"
            if setting.length:
                own["num_assistant_tokens"] = setting.length
            else:
                own["speculation_costs"] = costs or NO_DRAFTS
        return self.target.generate(**batch._asdict(), **self.options | options, **own, do_sample=True)

    def explore(self, batches: Sequence[Batch], lengths: Sequence[int], deltas: Sequence[float]) -> Found:
        """Costs at all lengths at the first delta, and the acceptance at each; of other deltas at the longest one."""
        found = Found(len(batches[0].input_ids))
        for delta in deltas:
            counts: list[SpeculationStats] = []
            for length in lengths if delta == deltas[0] else [max(lengths)]:
                rounds = []
                for batch in batches:
                    self.progress(f"m {length}, delta {delta:g}")
                    with RoundClock(self.target, self.draft, self.target.device) as clock, track() as calls:
                        self.generate(batch, Setting(length, delta))
                    counts += calls
                    rounds += clock.rounds(found.batch_size, length)
                if delta == deltas[0]:
                    found.rounds[length] = _median(rounds, length)
            found.acceptance[delta] = acceptance(counts, max(lengths))
        return found

    def measure(self, found: Found, batches: Sequence[Batch], settings: Sequence[Setting], repeats: int) -> None:
        """The speed of plain decoding, of `settings`, and of the schedule "auto" at the delta of the first of them."""
        automatic = Setting(None, settings[0].delta)
        costs = {str(found.batch_size): found.costs()}
        rates: dict[Setting | None, list[float]] = {each: [] for each in (None, *settings, automatic)}
        for _ in range(repeats):
            for setting, its_rates in rates.items():
                self.progress("plain" if setting is None else f"m {setting.length or 'auto'}, delta {setting.delta:g}")
                its_rates.append(self.rate(batches, setting, costs if setting == automatic else None))
        medians = {setting: statistics.median(each) for setting, each in rates.items()}
        found.plain = medians.pop(None)
        found.measured = {setting: rate for setting, rate in medians.items() if setting is not None}

    def rate(self, batches: Sequence[Batch], setting: Setting | None, costs: dict | None = None) -> float:
        """Tokens a second behind the first of each row, in the time that they add to a call."""
        tokens = seconds = 0.0
        for batch in batches:
            for sign, num_tokens in ((-1, {"max_new_tokens": 1}), (1, {})):

                def call(batch: Batch = batch, num_tokens: dict[str, int] = num_tokens) -> Any:
                    return self.generate(batch, setting, costs, **num_tokens)

                ids, took = timed(call, self.target.device)
                seconds += sign * took
                new = ids[:, batch.input_ids.shape[1] :]  # no row ends before the others
                tokens += sign * new.numel()
        return tokens / seconds


def _median(rounds: list[RoundSeconds], length: int) -> RoundSeconds:
    if not rounds:
        raise ValueError(
            f"No round of {length} drafts was seen: the texts are too short. Give more --max-new-tokens, or other "
            "--prompts."
        )
    return RoundSeconds(*(statistics.median(part) for part in zip(*rounds, strict=True)))


def acceptance(counts: Sequence[SpeculationStats], num_positions: int) -> list[float]:
    """By position, the chance of a draft to be kept if all before it in its round were."""
    kept, tried = [0.0] * num_positions, [0.0] * num_positions
    for stats in counts:
        by_position = [float(stats.rounds.sum()), *stats.accepted_by_position.sum(0).tolist()]
        for i in range(len(by_position) - 1):
            tried[i] += by_position[i]
            kept[i] += by_position[i + 1]
    return chances(kept, tried)


def chances(kept: Sequence[float], tried: Sequence[float]) -> list[float]:
    """Chances [M] of a draft at each position, from how many [M] were tried there and kept; each estimate leans on the
    one before it, which knows more.
    """
    chance = (sum(kept) + FIRST_GUESS) / (sum(tried) + 1)
    result: list[float] = []
    for successes, trials in zip(kept, tried, strict=True):
        chance = (successes + NEIGHBOUR_WEIGHT * chance) / (trials + NEIGHBOUR_WEIGHT)
        result.append(chance)
    return result


def all_costs(found: Sequence[Found]) -> RoundCosts:
    """Of all batch sizes."""
    return RoundCosts.from_dict({str(each.batch_size): each.costs() for each in found})
