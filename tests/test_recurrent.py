"""States that sum up the text: put back and read on from, they are those of the whole text."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

import cactus_hf
import tiny
from cactus_hf.cached_model import CroppedModel
from cactus_hf.host import Host
from cactus_hf.recurrent import ReplayedModel


BLOCKS = ((1, 0), (4, 0), (5, 3), (6, 2), (2, 5), (3, 0))  # tokens scored, and before that taken back
SINGLE = ((1, 0), (1, 0), (1, 0), (1, 2), (1, 0), (1, 0), (2, 2), (1, 0), (1, 1))  # as a draft does it
NAMES = [
    name
    for name in ("qwen3_5_text", "mamba2", "granitemoehybrid", "zaya", "lfm2", "lfm3", "inkling_text")
    if tiny.ARCHITECTURES[name].exists and Host(tiny.model(name)).can_roll_back
]


def prefilled(model, row: tiny.Prompts) -> CroppedModel:
    host = Host(model)
    cache = host.whole_cache()
    if not host.is_replayed:
        cache.activate_past_recording()
    inputs = {"attention_mask": row.attention_mask, host.cache_name: cache, "use_cache": True}
    host.prefill(row.input_ids, GenerationConfig(), inputs)
    kind = ReplayedModel if host.is_replayed else CroppedModel
    return kind(host, cache, row.input_ids, inputs)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", (BLOCKS, SINGLE), ids=("blocks", "single tokens"))
def test_scoring_taking_back_and_scoring_again(name, steps):
    model = tiny.model(name)
    row = tiny.ragged_prompts((14,))
    text = row.input_ids[0].tolist()
    cached = prefilled(model, row)
    generator = torch.Generator().manual_seed(0)
    for count, back in steps:
        text = text[: len(text) - back]
        tokens = torch.randint(5, tiny.VOCAB, (1, count), generator=generator)
        scored = cached.score(tokens, torch.tensor([len(text)]))
        text += tokens[0].tolist()
        torch.testing.assert_close(scored[0], model(torch.tensor([text])).logits[0, -count:], atol=1e-3, rtol=1e-3)


@pytest.fixture
def target(request):
    model = cactus_hf.enable(tiny.model(request.param))
    yield model
    cactus_hf.disable(model)


OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": tiny.PAD}


@pytest.mark.parametrize("target", [*(name for name in NAMES if name != "mamba2"), "gemma3n_text"], indirect=True)
def test_a_cache_of_an_earlier_turn(target):
    """gemma3n has layers without states of their own in its cache."""
    draft, row = tiny.perturbed(target, 0.02), tiny.ragged_prompts((9,))
    options = OPTIONS | {"assistant_model": draft, "cactus_delta": 0.0}
    turn = target.generate(**row.inputs, max_new_tokens=10, return_dict_in_generate=True, **options)
    text = torch.cat([turn.sequences, tiny.ragged_prompts((3,), seed=6).input_ids], dim=1)
    cache = {Host.cache_name: turn[Host.cache_name]}
    again = target.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=10, **cache, **options)
    assert again.tolist() == target.generate(text, max_new_tokens=10, **OPTIONS).tolist()


@pytest.mark.skipif("mamba2" not in NAMES, reason="Mamba 2 has another kind of cache in the installed transformers")
@pytest.mark.parametrize("target", ["mamba2"], indirect=True)
def test_a_cache_that_does_not_tell_its_length_is_refused(target):
    row = tiny.ragged_prompts((9,))
    options = OPTIONS | {"assistant_model": target, "cactus_delta": 0.0, "max_new_tokens": 3}
    turn = target.generate(**row.inputs, return_dict_in_generate=True, **options)
    with pytest.raises(ValueError, match="does not tell how many tokens"):
        target.generate(turn.sequences, **{Host.cache_name: turn[Host.cache_name]}, **options)


@pytest.mark.parametrize("target", NAMES, indirect=True)
def test_drafts_from_the_text(target):
    """Where it holds none, single tokens are scored."""
    row = tiny.ragged_prompts((9,))
    text = target.generate(**row.inputs, max_new_tokens=20, prompt_lookup_num_tokens=3, cactus_delta=0.0, **OPTIONS)
    assert text.tolist() == target.generate(**row.inputs, max_new_tokens=20, **OPTIONS).tolist()
