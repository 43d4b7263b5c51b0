"""Every misuse is refused before any forward pass, with an error that says what to do."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    DynamicCache,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    StaticCache,
)

import cactus_hf
import tiny
from cactus_hf.validation import left_padding


OTHER_MODELS = ClassifierFreeGuidanceLogitsProcessor(2.0)


class OwnRule(cactus_hf.AcceptanceRule):
    def accept(self, drafted):
        return torch.ones_like(drafted.target_prob)

    def residual(self, target_probs, draft_probs, drafted):
        return target_probs


@pytest.fixture
def pair(monkeypatch):
    """A pair whose forward passes fail the test."""
    target, draft = (copy.deepcopy(model) for model in tiny.pair("llama"))
    for model in (target, draft):
        monkeypatch.setattr(model, "forward", forbidden(model.forward))
    return cactus_hf.enable(target), draft


def forbidden(forward):
    def call(*args, **kwargs):
        pytest.fail("a forward pass ran before the error")

    call.__wrapped__ = forward  # generate() looks at the signature
    return call


def call(target, draft, **options):
    options = {
        **tiny.ragged_prompts().inputs,
        "assistant_model": draft,
        "do_sample": True,
        "max_new_tokens": 5,
        "pad_token_id": 0,
        **options,
    }
    return target.generate(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"cactus_delta": -0.1}, "cactus_delta.*0 .lossless. or more.*-0.1"),
        ({"cactus_delta": float("nan")}, "cactus_delta.*nan"),
        ({"cactus_delta": "large"}, "cactus_delta.*number.*large"),
        ({"cactus_delta": True}, "cactus_delta.*number.*True"),
        ({"cactus_delta": [0.1, -1, 0, 0]}, "cactus_delta.*-1"),
        ({"cactus_delta": [0.1, 0.2, 0.3]}, "3 rows.*4"),
        ({"cactus_delta": torch.ones(2, 2)}, "cactus_delta.*1-D"),
        ({"cactus_delta": [0.1, 0.2], "num_return_sequences": 3}, "2 rows.*12"),
        ({"acceptance_rule": 3}, "acceptance_rule.*Cactus"),
        ({"acceptance_rule": cactus_hf.TopK}, "acceptance_rule"),
        ({"acceptance_rule": cactus_hf.Cactus([0.1] * 3)}, "3 rows.*4"),
        ({"cactus_delta": 1.0, "acceptance_rule": cactus_hf.TopK(5)}, "cactus_delta.*acceptance_rule.*one of them"),
        ({"cactus_delta": 1.0, "assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight.*Mixture"),
        ({"acceptance_rule": cactus_hf.TopK(5), "assistant_ensemble_weight": 0.5}, "one of them"),
        ({"cactus_kl": -0.1}, "cactus_kl.*0 .lossless. or more.*-0.1"),
        ({"cactus_kl_total": float("nan")}, "cactus_kl_total.*nan"),
        ({"cactus_kl": "large"}, "cactus_kl.*number.*large"),
        ({"cactus_kl": [0.1, 0.2, 0.3]}, "kl_budget.*3 rows.*4"),
        ({"cactus_kl": 0.1, "cactus_kl_total": [1.0, 2.0]}, "kl_total.*2 rows.*4"),
        ({"cactus_kl": 0.1, "cactus_delta": 1.0}, "cactus_delta.*cactus_kl.*one of them"),
        ({"cactus_kl_total": 0.1, "cactus_delta": 1.0}, "cactus_delta.*cactus_kl_total.*one of them"),
        ({"cactus_kl_total": 0.1, "acceptance_rule": cactus_hf.Cactus(kl_budget=1.0)}, "acceptance_rule.*cactus_kl"),
        ({"cactus_kl": 0.1, "assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight.*cactus_kl.*one of them"),
        ({"speculation_kl": True}, "speculation_kl.*cactus_delta"),
        ({"generator": [1, 2, 3, 4]}, "generator.*cactus_delta"),
        ({"cactus_delta": 1.0, "generator": 7}, "generator.*list of integer seeds"),
        ({"cactus_delta": 1.0, "generator": [1, 2]}, "2 seeds for 4 rows"),
        ({"cactus_delta": 1.0, "assistant_model": None}, "assistant_model"),
        ({"cactus_delta": 1.0, "num_beams": 2}, "num_beams=2"),
        ({"cactus_kl": 1.0, "num_beams": 2}, "`cactus_kl`.*num_beams=2"),
        ({"cactus_kl_total": 1.0, "assistant_model": None}, "`cactus_kl`.*nothing drafts"),
        ({"cactus_delta": 1.0, "assistant_early_exit": 1}, "assistant_model.*assistant_early_exit.*one of them"),
        ({"cactus_delta": 1.0, "prompt_lookup_num_tokens": 3}, "assistant_model.*prompt_lookup_num_tokens.*one of"),
        ({"cactus_delta": 1.0, "assistant_model": None, "prompt_lookup_num_tokens": 0}, "prompt_lookup.*at least 1"),
        ({"cactus_delta": 1.0, "max_matching_ngram_size": 0}, "max_matching_ngram_size.*at least 1.*0"),
        ({"cactus_delta": 1.0, "max_matching_ngram_size": True}, "max_matching_ngram_size.*at least 1.*True"),
        ({"cactus_delta": 1.0, "max_matching_ngram_size": 2.5}, "max_matching_ngram_size.*integer.*2.5"),
        ({"cactus_delta": 1.0, "use_cache": False}, "use_cache"),
        ({"cactus_delta": 1.0, "logits_processor": [OTHER_MODELS]}, "ClassifierFreeGuidance.*leave it out"),
        ({"cactus_delta": 1.0, "cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"cactus_delta": 1.0, "speculation_kl": "no"}, "speculation_kl.*True or False"),
        ({"cactus_delta": 1.0, "attention_mask": torch.ones(4, 9, dtype=torch.long)}, "attention_mask.*token"),
        ({"cactus_delta": 1.0, "attention_mask": torch.eye(4, dtype=torch.long)}, "4, 4.*4, 17"),
        ({"cactus_delta": 1.0, "assistant_tokenizer": tiny.word_tokenizer()}, "assistant_tokenizer.*without.*both"),
        ({"cactus_delta": 1.0, "assistant_confidence_threshold": "x"}, "between 0 and 1.*x"),
        ({"acceptance_rule": OwnRule(), "speculation_kl": True}, "speculation_kl.*OwnRule.*shares_residual"),
        ({"cactus_delta": 1.0, "num_assistant_tokens": 0}, "num_assistant_tokens.*at least 1"),
        ({"cactus_delta": 1.0, "num_assistant_tokens": 2.5}, "num_assistant_tokens.*integer"),
        ({"cactus_delta": 1.0, "num_assistant_tokens_schedule": "clever"}, "constant.*heuristic.*clever"),
        ({"cactus_delta": 1.0, "assistant_confidence_threshold": 2.0}, "between 0 and 1"),
        ({"cactus_delta": 1.0, "cactus_dleta": 1.0}, "cactus_dleta"),
        ({"cactus_delta": 1.0, "attention_mask": tiny.ragged_prompts().attention_mask.flip(1)}, "padding_side"),
        ({"cactus_delta": 1.0, "attention_mask": torch.zeros(4, 17, dtype=torch.long)}, "row 0"),
        ({"cactus_delta": 1.0, "position_ids": torch.arange(9).expand(4, -1)}, "position_ids.*4, 9.*4, 17"),
        (
            {"cactus_delta": 1.0, "speculation_type": "dflash", "assistant_model": None},
            "dflash.*assistant_model|drafts",
        ),
        ({"cactus_delta": 1.0, "prompt_lookup_num_tokens": 3}, "assistant_model.*prompt_lookup_num_tokens.*one of"),
        ({"cactus_delta": 1.0, "streamer": types.SimpleNamespace(put=lambda x: None, end=lambda: None)}, "streamer"),
    ),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_options(pair, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call(*pair, **options)


def test_a_tensor_on_the_generation_config(pair):
    pair[0].generation_config.cactus_delta = torch.ones(4)
    with pytest.raises(TypeError, match="tolist"):
        call(*pair)


def test_a_tensor_of_budgets_on_the_generation_config(pair):
    pair[0].generation_config.cactus_kl_total = torch.ones(4)
    with pytest.raises(TypeError, match="cactus_kl_total.*tolist"):
        call(*pair)


def test_another_tokenizer(pair):
    target, draft = pair
    other = tiny.ARCHITECTURES["llama"].build(vocab=97 + 2000)
    with pytest.raises(ValueError, match="97 token ids and the draft 2097.*`tokenizer=` and `assistant_tokenizer=`"):
        call(target, other, cactus_delta=1.0)


@pytest.mark.parametrize("name", ("mamba", "rwkv", "recurrent_gemma", "jamba"))
@pytest.mark.parametrize("role", ("target", "draft"))
@pytest.mark.parametrize("rows", (1, 2))
def test_recurrent_states(pair, name, role, rows):
    models = {"target": pair[0], "draft": pair[1], role: tiny.model(name)}
    target = cactus_hf.enable(copy.copy(models["target"]))
    with pytest.raises(ValueError, match=f"{role}, {type(tiny.model(name)).__name__}.*recurrent"):
        call(target, models["draft"], cactus_delta=1.0, **tiny.ragged_prompts((3, 5)[:rows]).inputs)


def test_what_cannot_be_split_into_rows(pair):
    """Models that take one row at a time are given the rows one by one, if it is known what belongs to which."""
    target = cactus_hf.enable(copy.deepcopy(tiny.model("bloom")))
    cache = DynamicCache(config=target.config)
    with pytest.raises(ValueError, match="one row at a time.*`cache`|one row at a time.*`past_key_values`"):
        call(target, pair[1], cactus_delta=1.0, **{cactus_hf.host.CACHE_NAME: cache})


def test_a_model_without_a_cache(pair):
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=4)).eval()
    with pytest.raises(ValueError, match="draft, OpenAIGPTLMHeadModel.*no key/value cache"):
        call(pair[0], model, cactus_delta=1.0)


def test_no_rows(pair):
    empty = {"input_ids": torch.zeros(0, 3, dtype=torch.long), "attention_mask": torch.zeros(0, 3, dtype=torch.long)}
    with pytest.raises(ValueError, match="no rows"):
        call(*pair, cactus_delta=1.0, **empty)


def test_scaled_rope_beyond_the_original_context(pair):
    target = cactus_hf.enable(copy.deepcopy(tiny.model("llama_dynamic_rope")))
    with pytest.raises(ValueError, match="rotary frequencies.*22 tokens"):
        call(target, pair[1], cactus_delta=1.0)


def test_a_static_cache_passed_in(pair):
    cache = StaticCache(config=pair[0].config, max_cache_len=40)
    with pytest.raises(ValueError, match="StaticCache.*DynamicCache"):
        call(*pair, cactus_delta=1.0, **{cactus_hf.host.CACHE_NAME: cache})


def test_prompts_without_ids(pair):
    with pytest.raises(ValueError, match="token ids|no token ids|inputs_embeds"):
        pair[0].generate(
            inputs_embeds=torch.ones(1, 3, 32), assistant_model=pair[1], cactus_delta=1.0, max_new_tokens=3
        )


def test_left_padding():
    assert left_padding(None, 3).tolist() == [0, 0, 0]
    assert left_padding(torch.tensor([[0, 0, 1], [1, 1, 1]]), 2).tolist() == [2, 0]
    with pytest.raises(ValueError, match="left"):
        left_padding(torch.tensor([[1, 0, 1]]), 1)
