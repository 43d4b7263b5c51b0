"""Attention masks for rows of different lengths in a ragged cache, where a slot is a position."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ragged_cache import Slots


class Pattern(NamedTuple):
    """What a layer attends to: everything before, the last `size` positions, or its own chunk of `size`."""

    kind: str  # "full", "sliding" or "chunked"
    size: int = 0


def patterns_of(config: Any) -> dict[str, Pattern]:
    """The attention patterns of a model's layers, by the name transformers gives their layer type."""
    config = config.get_text_config(decoder=True)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    known = {"full_attention": Pattern("full")}
    if window is not None:
        known["sliding_attention"] = Pattern("sliding", window)
    if chunk is not None:
        known["chunked_attention"] = Pattern("chunked", chunk)
    unnamed = "sliding_attention" if window is not None else list(known)[-1]
    names = getattr(config, "layer_types", None) or [unnamed]
    return {name: known.get(name, Pattern("full")) for name in dict.fromkeys(names)}


def attention_mask(
    patterns: dict[str, Pattern], slots: Slots, dtype: torch.dtype, is_additive: bool
) -> Tensor | dict[str, Tensor]:
    """The mask of a forward pass over `slots`, in the form a transformers model takes ready-made masks.

    Args:
        dtype (`torch.dtype`): of the model; an additive mask must have it.
        is_additive (`bool`): eager attention adds the mask to the scores; the others take booleans.

    Returns:
        A mask [B, 1, T, width], or one for each layer type where these differ.
    """
    first, *others = patterns.values()
    if all(other == first for other in others):
        return _form(_visible(first, slots), dtype, is_additive)
    return {name: _form(_visible(pattern, slots), dtype, is_additive) for name, pattern in patterns.items()}


def _visible(pattern: Pattern, slots: Slots) -> Tensor:
    if slots.num_tokens == 1 and slots.rows is None and pattern.kind == "full":  # a step of drafting
        return slots.positions.new_ones((len(slots.positions), 1, 1, slots.width), dtype=torch.bool)
    query = slots.positions.view(-1, 1, slots.num_tokens, 1)
    slot = torch.arange(slots.width, device=query.device)
    visible = slot <= query
    if pattern.kind == "sliding":
        visible &= slot > query - pattern.size
    elif pattern.kind == "chunked":
        visible &= slot // pattern.size == query // pattern.size
    return visible


def _form(visible: Tensor, dtype: torch.dtype, is_additive: bool) -> Tensor:
    if not is_additive:
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )
