"""Attentions and hidden states are those of plain decoding, token by token and layer by layer."""

from __future__ import annotations

import copy

import pytest
import torch

import cactus_hf
import tiny


@pytest.mark.parametrize("name", ("llama", "gemma3", "gpt2", "bloom"))
@pytest.mark.parametrize("lengths", ((11,), (4, 11, 7)), ids=("one row", "batch"))
@pytest.mark.filterwarnings("ignore:The rows of this batch are decoded one after another")
def test_equal_those_of_plain_decoding(name, lengths):
    model, draft = tiny.pair(name, "eager")
    target = cactus_hf.enable(copy.copy(model))
    prompts = tiny.ragged_prompts(lengths)
    options = {
        "do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD,
        "return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True,
    }  # fmt: skip
    plain = target.generate(**prompts.inputs, **options)
    ours = target.generate(**prompts.inputs, **options, assistant_model=draft, cactus_delta=1.0)
    assert plain.sequences.equal(ours.sequences)
    for step in range(12):
        columns = range(11) if step == 0 else [10 + step]
        is_text = torch.tensor([[column >= 11 - length for column in columns] for length in lengths])
        for one, other in zip(plain.hidden_states[step], ours.hidden_states[step], strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one[is_text], other[is_text], atol=1e-4, rtol=1e-3)
        for one, other in zip(plain.attentions[step], ours.attentions[step], strict=True):
            assert one.shape == other.shape  # a sliding layer's are as narrow as its window
            one, other = (x.transpose(1, 2)[is_text] for x in (one, other))
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_only_what_was_asked_for():
    model, draft = tiny.pair("llama")
    target = cactus_hf.enable(copy.copy(model))
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "assistant_model": draft, "cactus_delta": 0.0}
    output = target.generate(**tiny.ragged_prompts().inputs, **options, output_hidden_states=True)
    assert output.attentions is None and len(output.hidden_states) == 3
    output = target.generate(**tiny.ragged_prompts().inputs, **options)
    assert output.hidden_states is None
