"""Logits of tokens behind a cache equal those of the whole text, whatever was scored and taken back in between."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

import tiny
from cactus_hf.cached_model import CroppedModel, RaggedModel
from cactus_hf.host import Host


LENGTHS = (3, 14, 9)


def prefilled(model, prompts: tiny.Prompts, is_ragged: bool):
    host = Host(model)
    cache = host.fresh_cache() if is_ragged else host.whole_cache()
    cache.activate_past_recording()
    columns = prompts.input_ids.shape[1]
    padding = (prompts.attention_mask == 0).sum(1)
    positions = (prompts.attention_mask.cumsum(1) - 1).clamp_min(0)
    inputs = {
        "attention_mask": prompts.attention_mask,
        "position_ids": positions,
        host.cache_name: cache,
        "use_cache": True,
    }
    with torch.no_grad():
        outputs = host.prefill(prompts.input_ids, GenerationConfig(), inputs)
    logits, cache = outputs.logits[:, -1], outputs[host.cache_name]
    if is_ragged:
        return logits, RaggedModel(host, cache, padding, columns, positions, longest=100 - padding, is_returned=False)
    return logits, CroppedModel(host, cache, prompts.input_ids, inputs, int(padding[0]))


@torch.no_grad()
def whole(model, text: list[int]) -> torch.Tensor:
    return model(torch.tensor([text])).logits[0]


@pytest.mark.parametrize("name", ("llama", "mistral", "gemma3", "gpt2", "llama4"))
@pytest.mark.parametrize("is_ragged", (True, False))
def test_scoring_taking_back_and_scoring_again(name, is_ragged):
    model = tiny.model(name)
    prompts = tiny.ragged_prompts(LENGTHS if is_ragged else LENGTHS[1:2])
    texts = [prompts.row(row).input_ids[0].tolist() for row in range(len(prompts.input_ids))]
    logits, cached = prefilled(model, prompts, is_ragged)
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], whole(model, text)[-1], atol=1e-4, rtol=1e-4)
    generator = torch.Generator().manual_seed(0)
    for count, back in ((1, 0), (4, 0), (5, 3), (6, 2), (2, 5), (3, 0)):
        texts = [text[: len(text) - back - row * (back > 0) % 2] for row, text in enumerate(texts)]
        first = torch.tensor([len(text) for text in texts])
        tokens = torch.randint(5, tiny.VOCAB, (len(texts), count), generator=generator)
        with torch.no_grad():
            scored = cached.score(tokens, first)
        texts = [text + new.tolist() for text, new in zip(texts, tokens, strict=True)]
        for row, text in enumerate(texts):
            torch.testing.assert_close(scored[row], whole(model, text)[-count:], atol=2e-4, rtol=1e-3)


def test_rows_can_leave():
    model = tiny.model("llama")
    prompts = tiny.ragged_prompts(LENGTHS)
    _, cached = prefilled(model, prompts, True)
    cached.keep(torch.tensor([2, 0]))
    with torch.no_grad():
        scored = cached.score(torch.tensor([[7], [8]]), torch.tensor([9, 3]))
    for row, (source, token) in enumerate(((2, 7), (0, 8))):
        text = prompts.row(source).input_ids[0].tolist() + [token]
        torch.testing.assert_close(scored[row, 0], whole(model, text)[-1], atol=1e-4, rtol=1e-4)


def test_float64_models_are_scored_in_float64():
    _, cached = prefilled(tiny.model("llama", dtype=torch.float64), tiny.ragged_prompts(LENGTHS), True)
    with torch.no_grad():
        assert cached.score(torch.tensor([[7], [8], [9]]), torch.tensor(LENGTHS)).dtype == torch.float64
    _, cached = prefilled(tiny.model("llama", dtype=torch.bfloat16), tiny.ragged_prompts(LENGTHS), True)
    with torch.no_grad():
        assert cached.score(torch.tensor([[7], [8], [9]]), torch.tensor(LENGTHS)).dtype == torch.bfloat16
