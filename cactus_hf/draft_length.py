"""How many tokens to draft: `num_assistant_tokens` and its schedules, row by row and without state between calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .auto_length import LONGEST, AutoSchedule
from .parameters import is_integer
from .round_costs import RoundCosts


SCHEDULES = ("constant", "heuristic", "heuristic_transient", "auto")


@dataclass(frozen=True)
class DraftLength:
    """
    Args:
        num_tokens (`int`, *optional*, defaults to 5): drafts a round, at first.
        schedule (`str`, *optional*, defaults to `"constant"`): `"heuristic"` (or `"heuristic_transient"`, which is
            the same here) drafts two more after a round that kept them all, and one fewer after any other.
            `"auto"` drafts what promises the highest speed, see `AutoSchedule`.
        confidence_threshold (`float`, *optional*, defaults to 0): see `DraftModel`.
        costs (`RoundCosts`, *optional*): of rounds, for `"auto"`; timed if not given.
    """

    num_tokens: int = 5
    schedule: str = "constant"
    confidence_threshold: float = 0.0
    costs: RoundCosts | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.num_tokens) or self.num_tokens < 1:
            raise ValueError(
                "`num_assistant_tokens` (or `prompt_lookup_num_tokens`) must be an integer of at least 1, got "
                f"{self.num_tokens!r}."
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"`num_assistant_tokens_schedule` must be one of {', '.join(map(repr, SCHEDULES))}, "
                f"got {self.schedule!r}."
            )
        if not isinstance(self.confidence_threshold, (int, float)) or not 0 <= self.confidence_threshold <= 1:
            raise ValueError(
                f"`assistant_confidence_threshold` must lie between 0 and 1, got {self.confidence_threshold!r}."
            )

    def check_timing(self, has_several_processes: bool, has_seeds: bool) -> None:
        """Raises `ValueError` where the time that rounds take must not decide how much is drafted."""
        if self.schedule != "auto" or self.costs is not None:
            return
        remedy = "pass `speculation_costs` (`cactus-hf tune` measures them), or another schedule."
        if has_several_processes:
            raise ValueError(
                '`num_assistant_tokens_schedule="auto"` times its rounds, and the processes that share a model would '
                f"come to different draft lengths: {remedy}"
            )
        if has_seeds and self.confidence_threshold > 0:
            raise ValueError(
                "With `assistant_confidence_threshold` the time of a round tells what was drafted behind a rejection, "
                'which depends on random numbers that seeded rows meet again: with `generator` and "auto", '
                f"{remedy}"
            )


class Schedule(Protocol):
    """The draft lengths of R rows through one call."""

    def lengths(self, rows: Tensor, remaining: Tensor) -> Tensor:
        """[B] on the CPU: drafts of the active `rows`; a round yields one token more than it keeps of them."""
        ...

    def update(self, rows: Tensor, num_drafted: Tensor, num_accepted: Tensor) -> None:
        """Learn from a round: drafted and kept tokens [B] (on the CPU) of `rows`."""
        ...


def make_schedule(settings: DraftLength, num_rows: int, needs_drafts: bool) -> Schedule:
    """
    The schedule of a call with `num_rows` returned rows.

    Args:
        needs_drafts (`bool`): whether there must be drafts in every round, and no more than `num_tokens`: generators
            of transformers count on having seen each round, and compiled passes have one form for each width.
    """
    if settings.schedule != "auto":
        return LengthSchedule(settings, num_rows)
    start, costs = int(settings.num_tokens), settings.costs
    longest = start if needs_drafts else max(start, LONGEST)
    return AutoSchedule(
        num_rows,
        start,
        shortest=int(needs_drafts),
        longest=longest if costs is None else min(longest, costs.longest),
        costs=costs,
    )


class LengthSchedule:
    """Every row by itself."""

    def __init__(self, settings: DraftLength, num_rows: int):
        self.is_adaptive = settings.schedule != "constant"
        self.length = torch.full((num_rows,), int(settings.num_tokens))

    def lengths(self, rows: Tensor, remaining: Tensor) -> Tensor:
        return torch.minimum(self.length[rows], remaining - 1)

    def update(self, rows: Tensor, num_drafted: Tensor, num_accepted: Tensor) -> None:
        if self.is_adaptive:
            change = torch.where(num_accepted < num_drafted, -1, 2).masked_fill(num_drafted == 0, 0)
            self.length[rows] = (self.length[rows] + change).clamp_min(1)
