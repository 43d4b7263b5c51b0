"""Passes of always the same shapes, to be compiled and replayed as CUDA graphs (`cache_implementation="static"`).

The cache gets all the room that the rows may come to need, every pass attends to the whole of it, and rows that have
ended stay where they are. That is more arithmetic than `RaggedModel` does, and one compiled form for each number of
tokens: a step of the draft, two tokens of it where a round kept all drafts, and a block of the target. Shorter blocks,
such as those at the end of a text, are filled up to one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .cached_model import RaggedModel
from .ragged_cache import Slots, row_numbers


SPARE = 32  # slots behind the longest row, for rows that are filled up to the drafts of others, and for ended ones
MOST_COLUMNS = 2**31  # a `max_length` beyond it means "no limit", and need not fit an int64
STEP = 256  # the room is a multiple of it, so that calls of like lengths share what was compiled


def check_static(names: Iterable[str], are_ragged: bool, max_length: int) -> None:
    """Raises `ValueError` where `cache_implementation="static"` cannot be had.

    Args:
        names (`str`s): of the models.
        are_ragged (`bool`): whether their rows can grow at different speeds in one cache.
        max_length (`int`): most columns of a row.
    """
    if not are_ragged:
        raise ValueError(
            '`cache_implementation="static"` is for models whose rows share a cache of ours, which '
            f"{', '.join(names)} with this attention implementation and source of drafts do not: leave it out."
        )
    if max_length >= MOST_COLUMNS:
        raise ValueError(
            '`cache_implementation="static"` makes room for the longest text that may come: set `max_new_tokens`.'
        )


class CompiledModel(RaggedModel):
    """
    Args:
        forward (`Callable`): the model's forward pass, compiled or not.
        others: as for `RaggedModel`.
    """

    def __init__(self, forward: Callable[..., ModelOutput], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.forward = forward
        self.num_rows = len(self.last_slot)
        self.rows = torch.arange(self.num_rows)  # [B] on the CPU, those still decoded
        self.widths: set[int] = set()  # tokens of the passes so far
        self.capacity = 0
        self._reserve(int(self.last_position.max()) + SPARE)

    def _reserve(self, num_slots: int) -> None:
        if num_slots <= self.capacity:
            return
        self.capacity = -(-num_slots // STEP) * STEP
        self.cache.reserve(self.capacity)
        for states in self.cache.states:  # or CUDA graphs would copy them for every pass
            torch._dynamo.mark_static_address(states)

    def score(self, tokens: Tensor, first: Tensor) -> Tensor:
        num_tokens = tokens.shape[1]
        width = min((each for each in self.widths if each >= num_tokens), default=num_tokens)
        self.widths.add(width)
        self._reserve(int(first.max()) + 2 * width)
        # Rows that have ended write behind all text, where nothing looks
        slots = torch.full((self.num_rows,), self.capacity - width).index_put((self.rows,), first)
        positions = (slots[:, None] + torch.arange(width)).to(tokens.device)
        rows = self.rows.to(tokens.device)
        filled = tokens.new_zeros(self.num_rows, width)  # of one memory layout, which compiled passes mind
        filled[rows, :num_tokens] = tokens
        # Bounds that say nothing of the rows, as whatever a compiled pass sees of them would compile it anew
        whole = Slots(row_numbers(self.num_rows, tokens.device), positions, width, 0, self.capacity - width)
        torch.compiler.cudagraph_mark_step_begin()
        logits = self._score_at(filled, whole, self.forward)
        # A copy: the next replay overwrites what the graph returned
        return logits[:, :num_tokens][self.rows.to(logits.device)]

    def keep(self, index: Tensor) -> None:
        self.rows = self.rows[index]

    def returned_cache(self, tokens: Tensor, first: Tensor, is_uneven: bool) -> Cache:
        if self.ranks.most(len(self.rows) < self.num_rows or is_uneven):
            self._score_at(tokens, Slots.from_host(first, tokens.shape[1], tokens.device))
        return self.cache.give_back(self.source, int(self.cache.padding[0] + first[0]) + tokens.shape[1])
