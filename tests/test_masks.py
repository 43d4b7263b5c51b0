from __future__ import annotations

import torch

import tiny
from cactus_hf.masks import Pattern, attention_mask, patterns_of
from cactus_hf.ragged_cache import Slots


def slots(first: list[int], count: int) -> Slots:
    return Slots.from_host(torch.tensor(first), count, torch.device("cpu"))


def visible(pattern: Pattern, first: list[int], count: int) -> list:
    mask = attention_mask({"full_attention": pattern}, slots(first, count), torch.float32, is_additive=False)
    return [[row.nonzero()[:, 0].tolist() for row in rows[0]] for rows in mask]


def test_full():
    assert visible(Pattern("full"), [0, 2], 2) == [[[0], [0, 1]], [[0, 1, 2], [0, 1, 2, 3]]]


def test_sliding():
    assert visible(Pattern("sliding", 2), [0, 3], 1) == [[[0]], [[2, 3]]]


def test_chunked():
    assert visible(Pattern("chunked", 3), [2, 4], 2) == [[[0, 1, 2], [3]], [[3, 4], [3, 4, 5]]]


def test_additive_masks_have_the_dtype_of_the_model():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = attention_mask({"full_attention": Pattern("full")}, slots([1, 0], 1), dtype, is_additive=True)
        assert mask.dtype == dtype
        assert mask[1, 0, 0].tolist() == [0.0, torch.finfo(dtype).min]


def test_one_mask_for_each_layer_type_only_where_they_differ():
    both = {"full_attention": Pattern("full"), "sliding_attention": Pattern("sliding", 4)}
    assert set(attention_mask(both, slots([1], 1), torch.float32, False)) == set(both)
    same = {"sliding_attention": Pattern("sliding", 4)}
    assert isinstance(attention_mask(same, slots([1], 1), torch.float32, False), torch.Tensor)


def test_patterns_of_models():
    expected = {
        "llama": [Pattern("full")],
        "mistral": [Pattern("sliding", tiny.WINDOW)],
        "gemma3": [Pattern("full"), Pattern("sliding", tiny.WINDOW)],
        "llama4": [Pattern("chunked", 8), Pattern("full")],
    }
    for name, patterns in expected.items():
        assert sorted(patterns_of(tiny.model(name).config).values()) == patterns
