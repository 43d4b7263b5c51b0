"""Where the time of rounds goes, from hooks on the two models while `generate()` runs."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, NamedTuple

import torch

from .measuring import synchronize
from .wrappers import unwrapped


class Pass(NamedTuple):
    """The beginning of a forward pass."""

    is_target: bool
    rows: int
    width: int  # tokens a row
    begin: float  # on the clock of `time.perf_counter`


class RoundSeconds(NamedTuple):
    draft: float  # from the draft's first pass to the target's
    verify: float  # from there to the next round


class RoundClock:
    """
    Notes when passes begin while it is entered.

    The clock is read when the device has done its work, at the beginning of a pass of the target, and of the first
    pass of the draft behind it.
    """

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module, device: torch.device):
        self.models, self.device = (unwrapped(target), unwrapped(draft)), device
        self.passes: list[Pass] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> RoundClock:
        for model in self.models:
            self.hooks.append(model.register_forward_pre_hook(self._note, with_kwargs=True))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, model: Any, args: tuple, inputs: dict[str, Any]) -> None:
        is_target = model is self.models[0]
        if is_target or (self.passes and self.passes[-1].is_target):
            synchronize(self.device)
        ids = inputs["input_ids"] if "input_ids" in inputs else args[0]
        rows, width = ids.shape
        self.passes.append(Pass(is_target, rows, width, time.perf_counter()))

    def rounds(self, num_rows: int, num_drafts: int) -> list[RoundSeconds]:
        """Those of `num_drafts` drafts for `num_rows` rows, between two others. (What comes before the first round are
        the prompts, and more passes of the draft than a round has.)
        """
        places = [i for i, each in enumerate(self.passes) if each.is_target]
        found = []
        for before, here in zip(places, places[1:], strict=False):
            each = self.passes[here]
            is_whole = here - before == num_drafts + 1 and (each.rows, each.width) == (num_rows, num_drafts + 1)
            if is_whole and here + 1 < len(self.passes):
                begin = self.passes[here - num_drafts].begin
                found.append(RoundSeconds(each.begin - begin, self.passes[here + 1].begin - each.begin))
        return found
