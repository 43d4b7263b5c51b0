"""Logits processors that look at the logits of one row and at nothing else, run on many rows at once.

Behind a top-k only a few logits of each row are left. Whatever comes next (top-p sorts all V of them, which takes
15 ms a row at V = 152 k on a CPU) is then run by transformers' own processors on those few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .processor_kinds import ROW_WISE, is_among


SPARE = 16  # logits looked at beyond twice the top-k, for ties with the last of them
LEAST_GAIN = 32  # times fewer logits than V, or it is no gain


class Warpers:
    """
    Args:
        processors (list of `LogitsProcessor`): in order, all of them context-free.
    """

    def __init__(self, processors: list[Any]):
        self.processors = processors
        place = _top_k_place(processors)
        self.up_to_top_k = [] if place is None else processors[: place + 1]
        self.num_likeliest = None if place is None else 2 * processors[place].top_k + SPARE

    def __call__(self, rows: Tensor) -> Tensor:
        """Process logits [N, V]."""
        likeliest = self._on_likeliest(rows)
        return self._on_all(rows) if likeliest is None else likeliest

    def _on_all(self, rows: Tensor) -> Tensor:
        return _processed(self.processors, rows)

    def _on_likeliest(self, rows: Tensor) -> Tensor | None:
        """`None` where it is no gain; or on a GPU, which could not be asked about ties without waiting for it."""
        if self.num_likeliest is None or not rows.is_cpu or rows.shape[1] < LEAST_GAIN * self.num_likeliest:
            return None
        likeliest, ids = rows.topk(self.num_likeliest)
        if (_processed(self.up_to_top_k, likeliest)[:, -1] != -torch.inf).any():
            return None  # so many equal ones that some may lie outside
        logits = self._on_all(likeliest)
        is_kept = logits != -torch.inf
        if ((likeliest[:, 1:] == likeliest[:, :-1]) & (is_kept[:, 1:] != is_kept[:, :-1])).any():
            return None  # of equal ones some were kept: which, depends on how the others were sorted
        return torch.full_like(rows, -torch.inf).scatter_(1, ids, logits)


def _processed(processors: list[Any], rows: Tensor) -> Tensor:
    for processor in processors:
        rows = processor(None, rows)
    return rows


def _top_k_place(processors: list[Any]) -> int | None:
    """Where the top-k stands whose likeliest logits settle what becomes of a row; `None` if all logits matter."""
    for number, processor in enumerate(processors):
        if is_among(processor, frozenset({"TopKLogitsWarper"})):
            others = processors[number:]
            is_settled = all(
                is_among(each, ROW_WISE) and getattr(each, "filter_value", -torch.inf) == -torch.inf for each in others
            )
            return number if is_settled else None
        if not is_among(processor, frozenset({"TemperatureLogitsWarper"})):  # which keeps the order
            return None
    return None
