"""`cache_implementation="static"`: passes of equal shapes, compiled once, and the same text."""

from __future__ import annotations

import pytest
import torch
from packaging import version
from torch._dynamo.utils import counters
from transformers import CompileConfig

import cactus_hf
import tiny


LENGTHS = (9, 17, 5)
CALL = {"max_new_tokens": 24, "pad_token_id": 0, "cactus_delta": 0.5, "num_assistant_tokens": 3}
STATIC = {"cache_implementation": "static"}
EAGER = CompileConfig(backend="eager", mode=None)


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def pair(name: str = "llama"):
    target, draft = tiny.pair(name, dtype=torch.float64)
    return cactus_hf.enable(target), draft


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mistral"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "generator": [1, 2, 3]}], ids=str)
def test_the_same_text(name: str, options: dict) -> None:
    target, draft = pair(name)
    inputs = tiny.ragged_prompts(LENGTHS, vocab=target.config.vocab_size).inputs
    expected = target.generate(**inputs, **CALL, **options, assistant_model=draft)
    assert torch.equal(target.generate(**inputs, **CALL, **options, **STATIC, assistant_model=draft), expected)


def test_rows_that_ended_stay_where_they_are() -> None:
    """Their room is written to no more, and the returned cache is that of the whole text."""
    target, draft = pair()
    inputs = tiny.ragged_prompts(LENGTHS).inputs
    options = CALL | {"assistant_model": draft, "return_dict_in_generate": True}
    free = target.generate(**inputs, **options)
    options["eos_token_id"] = [int(free.sequences[0, 20]), int(free.sequences[2, 24])]
    expected, got = (target.generate(**inputs, **options, **more) for more in ({}, STATIC))
    emitted = expected.speculation.emitted
    assert emitted.unique().numel() > 1, "no row ended before another"
    assert torch.equal(got.sequences, expected.sequences) and torch.equal(got.speculation.emitted, emitted)
    for layer, other in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
        for row, length in enumerate(LENGTHS):
            begin, end = max(LENGTHS) - length, max(LENGTHS) + int(emitted[row]) - 1
            torch.testing.assert_close(layer.keys[row, :, begin:end], other.keys[row, :, begin:end])


def test_a_few_graphs_serve_all_rounds_and_later_calls() -> None:
    target, draft = pair()
    inputs = tiny.ragged_prompts(LENGTHS).inputs
    options = CALL | STATIC | {"assistant_model": draft, "do_sample": True, "generator": [1, 2, 3]}
    expected = target.generate(**inputs, **options)
    assert not counters["stats"], "on a CPU nothing is compiled unless asked for"
    assert torch.equal(target.generate(**inputs, **options, compile_config=EAGER), expected)
    graphs = counters["stats"]["unique_graphs"]
    if version.parse(torch.__version__) < version.parse("2.13"):  # torch 2.9 cuts the passes into 21 graphs
        assert graphs > 0
        return
    # A block of the target; of the draft one token, and two where a round kept all drafts
    assert 0 < graphs <= 3 and not counters["graph_break"]
    target.generate(**inputs, **options | {"max_new_tokens": 40}, compile_config=EAGER)
    assert counters["stats"]["unique_graphs"] == graphs
    target.generate(**inputs, **options, compile_config=EAGER, disable_compile=True)
    assert counters["stats"]["unique_graphs"] == graphs


def test_one_row_and_short_blocks_take_no_graphs_of_their_own() -> None:
    """A single row's tokens are cut out of a longer one, whose length compiled passes would mind, and the blocks at
    the end of a text are shorter than the others.
    """
    if version.parse(torch.__version__) < version.parse("2.13"):
        pytest.skip("torch 2.9 cuts the passes into many graphs")
    target, draft = pair()
    inputs = tiny.ragged_prompts((9,)).inputs
    options = CALL | STATIC | {"assistant_model": draft, "num_assistant_tokens": 6, "eos_token_id": None}
    for max_new_tokens in (24, 33, 40):
        options["max_new_tokens"] = max_new_tokens
        expected = target.generate(**inputs, **options)
        assert torch.equal(target.generate(**inputs, **options, compile_config=EAGER), expected)
    assert counters["stats"]["unique_graphs"] <= 3


def test_room_grows_where_drafts_outgrow_it() -> None:
    target, draft = pair()
    inputs = tiny.ragged_prompts((3,)).inputs
    options = {"assistant_model": draft, "max_new_tokens": 300, "cactus_delta": 0.0, "pad_token_id": 0}
    options |= {"num_assistant_tokens": 40, "eos_token_id": None}
    expected = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, **STATIC), expected)


def test_prompt_lookup() -> None:
    target, _ = pair()
    inputs = tiny.ragged_prompts(LENGTHS).inputs
    options = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 24, "pad_token_id": 0, "cactus_delta": 0.0}
    assert torch.equal(target.generate(**inputs, **options, **STATIC), target.generate(**inputs, **options))


def test_refused_where_rows_share_no_cache() -> None:
    target, draft = pair("bloom")
    with pytest.raises(ValueError, match="share a cache of ours"):
        target.generate(**tiny.ragged_prompts((5,)).inputs, **CALL, **STATIC, assistant_model=draft)
