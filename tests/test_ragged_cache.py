from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache

from cactus_hf.ragged_cache import RaggedCache, Slots


def prefilled(padding: list[int], columns: int, layers: int = 2) -> DynamicCache:
    """Keys and values that name their row and column: row + column / 100; values are negative."""
    cache = DynamicCache()
    for layer in range(layers):
        states = torch.arange(len(padding))[:, None] + torch.arange(columns) / 100
        states = states[:, None, :, None].expand(-1, 3, -1, 4).contiguous()
        cache.update(states, -states, layer)
    return cache


def write(cache: RaggedCache, first: list[int], value: float, count: int = 1):
    cache.place.slots = Slots.from_host(torch.tensor(first), count, torch.device("cpu"))
    states = torch.full((len(first), 3, count, 4), value)
    return [layer.update(states, -states) for layer in cache.layers]


def test_rows_are_moved_to_slot_0():
    ragged = RaggedCache.from_prefilled(prefilled([2, 0], 3), torch.tensor([2, 0]), 3)
    (keys, values), _ = write(ragged, [1, 3], 9.0)
    assert keys[0, 0, :2, 0].tolist() == [torch.tensor(0.02).item(), 9.0]  # its only column was number 2
    assert torch.equal(keys[1, 0, :, 0], torch.tensor([1.0, 1.01, 1.02, 9.0]))
    assert torch.equal(values, -keys)


def test_the_source_is_emptied_only_if_it_may_be():
    for is_emptied in (True, False):
        cache = prefilled([0, 0], 3)
        RaggedCache.from_prefilled(cache, torch.tensor([0, 0]), 3, is_emptied)
        assert len(cache.layers) == (0 if is_emptied else 2)


def test_writing_leaves_a_kept_source_as_it_was():
    cache = prefilled([0, 0], 3)
    before = cache.layers[0].keys.clone()
    write(RaggedCache.from_prefilled(cache, torch.tensor([0, 0]), 3, is_emptied=False), [3, 3], 9.0)
    assert torch.equal(cache.layers[0].keys, before)


def test_rolling_back_is_writing_at_an_earlier_slot():
    ragged = RaggedCache.from_prefilled(prefilled([0, 0], 2), torch.tensor([0, 0]), 2)
    write(ragged, [2, 2], 7.0, count=3)
    (keys, _), _ = write(ragged, [3, 2], 8.0)
    assert keys[0, 0, 2:4, 0].tolist() == [7.0, 8.0]
    assert keys[1, 0, 2, 0] == 8.0


def test_it_grows_in_large_steps():
    ragged = RaggedCache.from_prefilled(prefilled([0], 10), torch.tensor([0]), 10)
    capacities = []
    for slot in range(10, 200):
        write(ragged, [slot], 1.0)
        capacities.append(ragged.layers[0].keys.shape[2])
    assert len(set(capacities)) < 10
    assert capacities[-1] < 1.5 * 200


def test_fresh_slots_hold_zeros_and_not_whatever_lay_in_memory():
    ragged = RaggedCache.from_prefilled(prefilled([0, 0], 2), torch.tensor([0, 0]), 2)
    (keys, _), _ = write(ragged, [2, 9], 5.0)
    assert (keys[0, :, 3:] == 0).all()


def test_rows_leave_and_come_back_in_transformers_layout():
    padding = torch.tensor([2, 0, 1])
    source = prefilled(padding.tolist(), 3)
    whole = [(layer.keys.clone(), layer.values.clone()) for layer in source.layers]
    ragged = RaggedCache.from_prefilled(source, padding, 3)
    write(ragged, [1, 3, 2], 9.0)
    ragged.keep(torch.tensor([0, 2]), retire=True)
    write(ragged, [2, 3], 8.0)
    ragged.take_back()
    cache = ragged.give_back(source, 5)
    assert cache is source
    for layer, (keys, values) in zip(cache.layers, whole, strict=True):
        for row, pads in enumerate(padding.tolist()):
            assert torch.equal(layer.keys[row, :, pads:3], keys[row, :, pads:])
            assert torch.equal(layer.values[row, :, pads:3], values[row, :, pads:])
            assert (layer.keys[row, :, 3] == 9.0).all()
        assert (layer.keys[[0, 2], :, 4] == 8.0).all()
