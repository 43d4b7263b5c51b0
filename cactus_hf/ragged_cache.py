"""One key/value cache for rows of different lengths.

The tokens of a row lie at slots 0, 1, ... of the cache, so that a slot is a position and no padding is carried along.
Every forward pass writes the new tokens of each row at that row's own next slots and reads the slots up to the longest
row; the attention mask (`cactus_hf.masks`) hides what lies beyond a row's own end. Rolling a row back therefore costs
nothing: the next pass simply writes at an earlier slot, and what is left behind is masked until it is overwritten.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)


GROWTH = 1.5  # a full cache is reallocated this much larger, so that copying costs O(1) a token


class Slots(NamedTuple):
    """Where the next `num_tokens` tokens of every row go.

    `lowest` and `highest` are the extremes of the first of them, known to the host so that no pass has to ask the
    device.
    """

    rows: Tensor | None  # [B, 1]: 0, 1, ...; not needed where all rows are alike
    positions: Tensor  # [B, num_tokens]
    num_tokens: int
    lowest: int
    highest: int

    @classmethod
    def from_host(cls, first: Tensor, num_tokens: int, device: torch.device) -> Slots:
        """`first` is a tensor [B] on the CPU."""
        ends = first.tolist()
        positions = first[:, None]
        if num_tokens > 1:
            positions = positions + torch.arange(num_tokens)
        lowest, highest = min(ends), max(ends)
        rows = None if lowest == highest else row_numbers(len(ends), device)
        return cls(rows, positions.to(device, non_blocking=True), num_tokens, lowest, highest)

    def beside_longer(self, ahead: int) -> Slots:
        """The same, as if there were another row `ahead` slots further on."""
        rows = row_numbers(len(self.positions), self.positions.device)
        return self._replace(rows=rows, highest=self.highest + ahead)

    @property
    def width(self) -> int:
        """Slots in use once these tokens are written."""
        return self.highest + self.num_tokens


@functools.lru_cache(maxsize=16)
def row_numbers(num_rows: int, device: torch.device) -> Tensor:
    """[num_rows, 1]; every pass of a batch asks for it."""
    return torch.arange(num_rows, device=device)[:, None]


class Place:
    """Where the coming forward pass writes: what a cache tells its layers."""

    slots: Slots


class UnequalRowsError(RuntimeError):
    """A model minds the lengths of a row's neighbours, so that its rows cannot share a cache."""

    def __init__(self, name: str):
        super().__init__(f"{name} cannot hold rows of different lengths: call `generate()` row by row.")


class RaggedLayer(CacheLayerMixin):
    """Keys [B, heads, capacity, key size] and values [B, heads, capacity, value size] of one layer.

    Args:
        source (`CacheLayerMixin`): the layer that the states come from, which [`RaggedLayer.given_back`] is like.
    """

    is_sliding = False
    names: tuple[str, ...] = ("keys", "values")

    def __init__(self, source: Any, keys: Tensor, values: Tensor, place: Place):
        super().__init__()
        self.keys, self.values = keys, values
        self.place = place  # not the cache: a cycle would keep the states until the garbage collector looks
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.kind, self.window = type(source), [source.sliding_window] if source.is_sliding else []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._written("keys", key_states), self._written("values", value_states)

    def _written(self, name: str, new: Tensor) -> Tensor:
        """Writes `new` [B, heads, T, size] to the states of that name, and returns all of them that are in use."""
        slots, states = self.place.slots, getattr(self, name)
        if slots.width > states.shape[2]:
            states = _enlarged(states, max(slots.width, int(GROWTH * states.shape[2])))
            setattr(self, name, states)
        _write(states, new, slots)
        return states.narrow(2, 0, slots.width)

    @property
    def states(self) -> list[Tensor]:
        """All of them, in the order of `names`."""
        return [getattr(self, name) for name in self.names]

    @states.setter
    def states(self, states: list[Tensor]) -> None:
        for name, value in zip(self.names, states, strict=True):
            setattr(self, name, value)

    def select(self, index: Tensor) -> list[Tensor]:
        """`states` of the rows `index`."""
        return [states.index_select(0, index.to(states.device)) for states in self.states]

    def given_back(self, states: list[Tensor]) -> CacheLayerMixin:
        """A layer of transformers' own that holds these `states`."""
        layer: Any = self.kind(*self.window)
        layer.update(*states[:2])
        return layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A ragged layer is made from a prefilled one, so there is nothing left to initialise."""

    def get_seq_length(self) -> int:
        return self.place.slots.highest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.slots.width, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # another name of it in transformers 5.17


class RaggedIndexedLayer(RaggedLayer):
    """Also holds the keys [B, 1, capacity, size] by which sparse attention picks the tokens it attends to."""

    names = ("keys", "values", "indexer_keys")

    def __init__(self, source: Any, keys: Tensor, values: Tensor, indexer_keys: Tensor, place: Place):
        super().__init__(source, keys, values, place)
        self.indexer_keys = indexer_keys

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self._written("indexer_keys", indexer_key_states[:, None])[:, 0]

    def given_back(self, states: list[Tensor]) -> CacheLayerMixin:
        layer: Any = super().given_back(states)
        layer.update_indexer(states[2][:, 0])
        return layer


class RaggedCache(Cache):
    """The ragged cache of a model; see the module's docstring. Set `place.slots` before every forward pass."""

    place: Place
    padding: Tensor  # [R] on the CPU, of the rows as they came
    rows: Tensor  # [B] on the CPU, those still here
    retired: list[tuple[Tensor, list[list[Tensor]]]]  # rows that left, and their states by layer

    @staticmethod
    def can_hold(cache: object) -> bool:
        """Whether every layer of a fresh or prefilled transformers cache is attention, or has no states."""
        return isinstance(cache, Cache) and bool(cache.layers) and all(map(_is_supported, cache.layers))

    @classmethod
    def from_prefilled(cls, cache: Cache, padding: Tensor, num_columns: int, is_emptied: bool = True) -> RaggedCache:
        """Take over what transformers prefilled with left-padded rows.

        Args:
            cache (`Cache`): filled with `num_columns` columns of B rows.
            padding (`torch.Tensor` of shape [B], on the CPU): padded columns of each row.
            is_emptied (`bool`): empty `cache` layer by layer, so that the prompts' states are not held twice.
        """
        ragged = cls(layers=[])
        ragged.place, ragged.padding, ragged.retired = Place(), padding, []
        ragged.rows = torch.arange(len(padding))
        layers = cache.layers if is_emptied else list(cache.layers)
        while layers:
            layer = layers.pop(0)
            if getattr(layer, "keys", None) is None:  # it reads another layer's states and has none of its own
                ragged.layers.append(layer)
                continue
            missing = num_columns - layer.keys.shape[2]  # a sliding layer has dropped this many early columns
            if missing < 0 or missing > 0 and not layer.is_sliding:
                raise UnequalRowsError("A model with states of something else than the text")
            keys, values = (_left_aligned(states, padding, missing) for states in (layer.keys, layer.values))
            picked_by = getattr(layer, "indexer_keys", None)
            if picked_by is None:
                ragged.layers.append(RaggedLayer(layer, keys, values, ragged.place))
            else:
                picked_by = _left_aligned(picked_by[:, None], padding, 0)
                ragged.layers.append(RaggedIndexedLayer(layer, keys, values, picked_by, ragged.place))
        return ragged

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots in every layer."""
        for layer in self._own_layers():
            layer.states = [
                states if states.shape[2] >= capacity else _enlarged(states, capacity) for states in layer.states
            ]

    @property
    def states(self) -> list[Tensor]:
        """Of all layers."""
        return [states for layer in self._own_layers() for states in layer.states]

    def keep(self, index: Tensor, retire: bool) -> None:
        """Go on with the rows `index` (on the CPU) only; `retire` the others for [`RaggedCache.give_back`]."""
        layers = self._own_layers()
        if retire:
            leaving = torch.ones(len(self.rows), dtype=torch.bool).index_fill_(0, index, False).nonzero()[:, 0]
            self.retired.append((self.rows[leaving], [layer.select(leaving) for layer in layers]))
        self.rows = self.rows[index]
        for layer in layers:
            layer.states = layer.select(index)

    def take_back(self) -> None:
        """Hold all R rows again, in order."""
        layers = self._own_layers()
        parts = [*self.retired, (self.rows, [layer.states for layer in layers])]
        for number, layer in enumerate(layers):
            states = []
            for i, like in enumerate(layer.states):  # the rows that went on have the most slots
                whole = like.new_zeros(len(self.padding), *like.shape[1:])
                for rows, saved in parts:
                    whole[rows.to(whole.device), :, : saved[number][i].shape[2]] = saved[number][i]
                states.append(whole)
            layer.states = states
        self.rows, self.retired = torch.arange(len(self.padding)), []

    def give_back(self, cache: Cache, num_columns: int) -> Cache:
        """Put `num_columns` columns of all R rows into `cache`, in place of what it held."""
        layers = list(self.layers)
        for number, layer in enumerate(self.layers):
            if isinstance(layer, RaggedLayer):
                layers[number] = layer.given_back(
                    [_columns(states, self.padding, num_columns) for states in layer.states]
                )
        cache.layers = layers
        return cache

    def _own_layers(self) -> list[RaggedLayer]:
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]


def _is_supported(layer: object) -> bool:
    kind = type(layer)
    return kind in (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer) or kind.__name__ == "DummyLayer"


def _write(states: Tensor, new: Tensor, slots: Slots) -> None:
    if slots.rows is None:  # all rows alike: a plain slice is several times cheaper than a scatter
        states.narrow(2, slots.lowest, slots.num_tokens).copy_(new)
        return
    # Under autocast a cache of transformers 5.17 holds values in float32 that the model writes in half precision
    places = slots.rows.to(states.device), slice(None), slots.positions.to(states.device)
    states[places] = new.transpose(1, 2).to(states.dtype)


def _enlarged(states: Tensor, capacity: int) -> Tensor:
    # Zeros, not empty memory: a masked slot still enters the products with weight 0, and 0 * nan is nan.
    larger = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    larger[:, :, : states.shape[2]] = states
    return larger


def _left_aligned(states: Tensor, padding: Tensor, missing: int) -> Tensor:
    """Slots 0.. of each row, from columns that start at `missing` and are padded on the left."""
    batch, heads, columns, size = states.shape
    if missing == 0 and not padding.any():
        return states
    source = torch.arange(columns + missing) + padding[:, None] - missing  # [B, slots]
    source = source.clamp(0, columns - 1).to(states.device)  # slots without a column are masked or overwritten
    return states.gather(2, source[:, None, :, None].expand(batch, heads, -1, size))


def _columns(states: Tensor, padding: Tensor, num_columns: int) -> Tensor:
    """Columns of left-padded rows, from slots; the columns of padding hold anything."""
    batch, heads, slots, size = states.shape
    source = (torch.arange(num_columns) - padding[:, None]).clamp(0, slots - 1).to(states.device)
    return states.gather(2, source[:, None, :, None].expand(batch, heads, -1, size))
