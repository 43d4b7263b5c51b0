"""How many tokens to draft: `num_assistant_tokens` and its schedules, row by row and without state between calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .parameters import is_integer


SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclass(frozen=True)
class DraftLength:
    """
    Args:
        num_tokens (`int`, *optional*, defaults to 5): drafts a round, at first.
        schedule (`str`, *optional*, defaults to `"constant"`): `"heuristic"` (or `"heuristic_transient"`, which is
            the same here) drafts two more after a round that kept them all, and one fewer after any other.
        confidence_threshold (`float`, *optional*, defaults to 0): see `DraftModel`.
    """

    num_tokens: int = 5
    schedule: str = "constant"
    confidence_threshold: float = 0.0

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


class LengthSchedule:
    """The draft lengths of R rows through one call."""

    def __init__(self, settings: DraftLength, num_rows: int):
        self.is_adaptive = settings.schedule != "constant"
        self.length = torch.full((num_rows,), int(settings.num_tokens))

    def lengths(self, rows: Tensor, remaining: Tensor) -> Tensor:
        """[B] on the CPU: drafts of the active `rows`; a round yields one token more than it keeps of them."""
        return torch.minimum(self.length[rows], remaining - 1)

    def update(self, rows: Tensor, num_drafted: Tensor, num_accepted: Tensor) -> None:
        if self.is_adaptive:
            change = torch.where(num_accepted < num_drafted, -1, 2).masked_fill(num_drafted == 0, 0)
            self.length[rows] = (self.length[rows] + change).clamp_min(1)
