"""What a calibration found, and the answers that follow from it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..parameters import is_integer
from ..round_costs import RoundCosts
from . import files
from .rounds import FIELDS, LOSSLESS


RESAMPLES = 1000
# What a run reports as `.speculation.<name>`: numerator and denominator, or those of two factors
RATIOS = {
    "position_acceptance": ("accepted", "weight"),
    "accepted_length": ("accepted", "weight", "verified", "rounds"),
    "emitted_kl": ("kl", "weight"),
    "emitted_tv": ("tv", "weight"),
    "ball_kl": ("ball_kl", "weight"),
}


class Estimate(NamedTuple):
    """A figure with its standard error, from resampled prompts."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} +- {self.error:.2g}"


class Line(NamedTuple):
    """What a run with a rule is expected to report, by the names in `.speculation`."""

    label: str
    kind: str  # the rule's class, or "limit"
    delta: float | None
    position_acceptance: Estimate
    accepted_length: Estimate
    emitted_kl: Estimate
    emitted_tv: Estimate
    ball_kl: Estimate


class Answer(NamedTuple):
    """A delta and a draft length, and what a run with them is expected to report."""

    delta: float
    interval: tuple[float, float]  # of delta: 95 % of the resampled prompts give one inside
    num_assistant_tokens: int
    emitted_kl: Estimate  # nats a verified position
    position_acceptance: Estimate
    accepted_length: Estimate
    tokens_per_second: float | None = None  # of all rows together, where costs were given


@dataclass(frozen=True, eq=False)
class Calibration:
    """
    What [`calibrate`] found on P prompts, for S settings (each delta and rule) and draft lengths up to M.

    Figures are predictions of what `.speculation` reports of calls with `speculation_kl=True` on other prompts of the
    same kind: means over verified positions. Between the deltas that were tried, sums lie on a line over sqrt(delta).

    Args:
        header (`dict`): what it was made with, JSON throughout.
        rounds (`Tensor` of shape `[P, S, M, 7]`): for each prompt, setting and draft length the expected sums over
            rounds: `rounds`, `verified`, `weight`, `accepted`, `kl`, `tv`, `ball_kl`.
        positions (`Tensor` of shape `[P, S, 4]`): sums over all positions: their number, acceptance, KL and TV.
    """

    header: dict[str, Any]
    rounds: Tensor
    positions: Tensor

    @property
    def deltas(self) -> list[float]:
        """The deltas that were tried, in ascending order."""
        return self.header["deltas"]

    @property
    def num_prompts(self) -> int:
        return len(self.rounds)

    @cached_property
    def _resamples(self) -> Tensor:
        return resamples(self.num_prompts, self.header["seed"])

    def table(self, num_assistant_tokens: int | None = None) -> list[Line]:
        """A line for each delta and rule, and for points of the limit, at a draft length (default: the header's)."""
        m = self._length(num_assistant_tokens)
        lines = []
        for index, setting in enumerate(self.header["settings"]):
            figures = self._estimates(self.rounds[:, index, m - 1]).values()
            lines.append(Line(setting["label"], setting["kind"], setting["delta"], *figures))
        return lines

    def kl(self, delta: float, num_assistant_tokens: int | None = None) -> Estimate:
        """Mean emitted KL in nats a verified position."""
        return self._at(delta, num_assistant_tokens)["emitted_kl"]

    def acceptance(self, delta: float, num_assistant_tokens: int | None = None) -> Estimate:
        """Share of the verified drafts that are kept."""
        return self._at(delta, num_assistant_tokens)["position_acceptance"]

    def accepted_length(self, delta: float, num_assistant_tokens: int | None = None) -> Estimate:
        """AL: kept drafts a round."""
        return self._at(delta, num_assistant_tokens)["accepted_length"]

    def at(self, delta: float, num_assistant_tokens: int | None = None) -> Answer:
        """What a run with a delta is expected to report."""
        m = self._length(num_assistant_tokens)
        found = self._at(delta, m)
        figures = found["emitted_kl"], found["position_acceptance"], found["accepted_length"]
        return Answer(delta, (delta, delta), m, *figures)

    def delta_for(
        self, *, kl: float | None = None, acceptance: float | None = None, num_assistant_tokens: int | None = None
    ) -> Answer:
        """
        The delta with a mean emitted KL (nats a verified position) or an acceptance; exactly one is given.

        Raises:
            ValueError: for one that none of the deltas tried comes to.
        """
        if (kl is None) == (acceptance is None):
            raise ValueError("Give `kl` or `acceptance`, one of the two.")
        name, wanted = ("emitted_kl", kl) if acceptance is None else ("position_acceptance", acceptance)
        assert wanted is not None
        m = self._length(num_assistant_tokens)
        curves = self._curves(name, m)
        whole = curves.sum(0)
        lowest, highest = (float(whole[i, 0] / whole[i, 1]) for i in (0, -1))
        if not lowest - LOSSLESS <= wanted <= highest:
            raise ValueError(
                f"The {'KL' if acceptance is None else 'acceptance'} {wanted:g} is not reached: with {m} drafts a "
                f"round it is {lowest:.4g} at delta {self.deltas[0]:g} and {highest:.4g} at delta "
                f"{self.deltas[-1]:g}, and delta {self.deltas[-1]:g} is the largest that was tried."
            )
        delta = self._crossing(whole, wanted)
        resampled = torch.einsum("rp,pdk->rdk", self._resamples, curves)
        found = sorted(self._crossing(each, wanted) for each in resampled)
        low, high = (found[int(share * (len(found) - 1))] for share in (0.025, 0.975))
        return self.at(delta, m)._replace(interval=(low, high))

    def best(self, costs: RoundCosts | dict[str, Any], *, kl: float | None = None, batch_size: int = 1) -> Answer:
        """
        The delta and draft length with the most tokens a second.

        Args:
            costs ([`RoundCosts`] or `dict`): seconds of rounds, as in `speculation_costs`; `cactus-hf tune --output`
                measures them.
            kl (`float`, *optional*): the most mean emitted KL, in nats a verified position. Without it the largest
                delta that was tried is as good as any.
            batch_size (`int`, *optional*, defaults to 1): rows decoded together.

        Returns:
            [`Answer`] with `num_assistant_tokens` 0 where decoding without drafts is the fastest.
        """
        costs = costs if isinstance(costs, RoundCosts) else RoundCosts.from_dict(costs)
        if kl is not None and not kl >= 0:
            raise ValueError(f"`kl` must be a number of nats, 0 or more; got {kl!r}.")
        seconds = costs.seconds(batch_size)
        nothing = Estimate(0.0, 0.0)
        best = Answer(0.0, (0.0, 0.0), 0, nothing, nothing, nothing, batch_size / seconds[0])
        for m in range(1, min(self.header["longest"], costs.longest) + 1):
            largest = self.deltas[-1]
            if kl is None or self.kl(largest, m).value <= kl:
                answer = self.at(largest, m)
            else:
                answer = self.delta_for(kl=kl, num_assistant_tokens=m)
            speed = batch_size * (answer.accepted_length.value + 1) / seconds[m]
            if speed > (best.tokens_per_second or 0):
                best = answer._replace(tokens_per_second=speed)
        return best

    def save_generation_config(
        self, folder: str | os.PathLike, answer: Answer, config: Any = None, costs: RoundCosts | None = None
    ) -> None:
        """
        Writes what `GenerationConfig.from_pretrained` loads: sampling as calibrated, `cactus_delta` and
        `num_assistant_tokens`.

        Args:
            folder (`str` or path): where to.
            answer ([`Answer`]): of `delta_for` or `best`.
            config (`GenerationConfig`, *optional*): what else to keep, such as the target's own.
            costs ([`RoundCosts`], *optional*): to be saved as `speculation_costs`.
        """
        from .writing import save_generation_config

        save_generation_config(folder, answer, self.header["options"], config, costs)

    def plot(self, path: str | os.PathLike) -> None:
        """Acceptance against emitted KL for every rule with the limit, as a PNG picture. Needs matplotlib."""
        from .writing import plot

        plot(path, self)

    def to_json(self, path: str | os.PathLike) -> None:
        """Writes JSON lines that `from_json` reads, the same as `calibrate(resume=)` keeps."""
        prompts = zip(self.rounds, self.positions, strict=True)
        files.write(path, self.header, {i: files.Finished(*each) for i, each in enumerate(prompts)})

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> Calibration:
        """
        Raises:
            ValueError: for a file that holds something else, or not all prompts yet.
        """
        header, finished = files.read(path)
        missing = header["num_prompts"] - len(finished)
        if missing or not finished:
            raise ValueError(f"{path} lacks {missing} of {header['num_prompts']} prompts: finish it by `resume`.")
        return cls.of(header, finished)

    @classmethod
    def of(cls, header: dict[str, Any], finished: dict[int, files.Finished]) -> Calibration:
        ordered = [finished[number] for number in sorted(finished)]
        return cls(header, *(torch.stack(field) for field in zip(*ordered, strict=True)))

    def __str__(self) -> str:
        from .writing import text

        return text(self)

    def _length(self, num_assistant_tokens: int | None) -> int:
        m, longest = num_assistant_tokens, self.header["longest"]
        m = self.header["num_assistant_tokens"] if m is None else m
        if not is_integer(m) or not 1 <= m <= longest:
            raise ValueError(f"`num_assistant_tokens` must be an integer from 1 to {longest} (`longest`), got {m!r}.")
        return m

    def _estimates(self, sums: Tensor) -> dict[str, Estimate]:
        """Of sums [P, 7]."""
        return {
            name: ratio_estimate(sums[:, [FIELDS.index(part) for part in parts]], self._resamples)
            for name, parts in RATIOS.items()
        }

    def _curves(self, name: str, m: int) -> Tensor:
        """[P, D, 2]: numerator and denominator at each delta."""
        return self.rounds[:, : len(self.deltas), m - 1][..., [FIELDS.index(part) for part in RATIOS[name]]]

    def _crossing(self, curve: Tensor, wanted: float) -> float:
        """The smallest delta at which the ratio of a curve [D, 2] is `wanted`, or the largest delta if none is."""
        excess = (curve[:, 0] - wanted * curve[:, 1]).tolist()  # linear between two deltas, as both sums are
        above = next((i for i, each in enumerate(excess) if each >= 0), None)
        if above is None or above == 0:
            return self.deltas[-1 if above is None else 0]
        share = -excess[above - 1] / (excess[above] - excess[above - 1])
        low, high = (math.sqrt(self.deltas[i]) for i in (above - 1, above))
        return (low + share * (high - low)) ** 2

    def _at(self, delta: float, num_assistant_tokens: int | None) -> dict[str, Estimate]:
        m = self._length(num_assistant_tokens)
        if not self.deltas[0] <= delta <= self.deltas[-1]:
            raise ValueError(
                f"Delta {delta!r} is not between {self.deltas[0]:g} and {self.deltas[-1]:g}, the deltas that were "
                "tried: calibrate with others."
            )
        above = next(i for i, each in enumerate(self.deltas) if each >= delta)
        sums = self.rounds[:, above, m - 1]
        if self.deltas[above] > delta:
            low, place, high = map(math.sqrt, (self.deltas[above - 1], delta, self.deltas[above]))
            share = (place - low) / (high - low)
            sums = (1 - share) * self.rounds[:, above - 1, m - 1] + share * sums
        return self._estimates(sums)


def resamples(num_prompts: int, seed: int) -> Tensor:
    """[RESAMPLES, P] float64: how often each of P prompts is among P draws of them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num_prompts, (RESAMPLES, num_prompts), generator=generator)
    counts = torch.zeros(RESAMPLES, num_prompts, dtype=torch.float64)
    return counts.scatter_add_(1, drawn, torch.ones_like(counts))


def ratio_estimate(parts: Tensor, drawn: Tensor) -> Estimate:
    """
    The ratio of two sums over prompts, `parts` [P, 2], with its spread over the resamples `drawn`; of [P, 4], the
    product of two ratios.
    """
    whole, resampled = parts.sum(0), drawn @ parts  # where a sum is infinite, the error comes out as NaN
    value, values = ((sums[..., ::2] / sums[..., 1::2]).prod(-1) for sums in (whole, resampled))
    return Estimate(float(value), float(values.std()))
