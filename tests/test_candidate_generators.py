"""Drafts by transformers' own candidate generators, which read the target's states."""

from __future__ import annotations

import copy
import importlib.util

import laws
import pytest
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

import cactus_hf
import tiny


pytestmark = pytest.mark.filterwarnings("ignore:The rows of this batch are decoded one after another")
GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": tiny.PAD}
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": tiny.PAD, "eos_token_id": tiny.EOS, "bos_token_id": tiny.BOS, "max_position_embeddings": 256,
}  # fmt: skip


def built(model: PreTrainedModel, seed: int = 0, logit_scale: float = tiny.LOGIT_SCALE) -> PreTrainedModel:
    tiny.spread(model.eval(), seed=seed)
    tiny.sharpen(model, logit_scale)
    return model


def gemma4(vocab: int, logit_scale: float):
    """Target and assistant; the assistant takes the most likely token."""
    if not hasattr(transformers, "Gemma4AssistantConfig"):
        pytest.skip("this transformers has no Gemma 4 assistants")
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    shape = SHAPE | {
        "global_head_dim": 8,
        "num_kv_shared_layers": 2,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    config = transformers.Gemma4TextConfig(
        **shape | layers, hidden_size_per_layer_input=8, vocab_size_per_layer_input=vocab
    )
    target = built(transformers.Gemma4ForCausalLM(config), logit_scale=logit_scale)
    own = shape | {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": layers["layer_types"][:2]}
    text = transformers.Gemma4TextConfig(**own, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)
    draft = transformers.Gemma4AssistantForCausalLM(config).eval()
    tiny.spread(draft, seed=1)
    return target, {"assistant_model": draft}


def dflash(vocab: int, logit_scale: float):
    """A drafter that fills a block of masks, and draws."""
    if importlib.util.find_spec("transformers.models.muse_glimmer_assistant") is None:
        pytest.skip("this transformers has no DFlash drafter")
    target = tiny.ARCHITECTURES["llama"].build(vocab=vocab, logit_scale=logit_scale)
    shape = {name: value for name, value in SHAPE.items() if name != "max_position_embeddings"}
    config = transformers.MuseGlimmerAssistantConfig(
        **shape, num_hidden_layers=2, sliding_window=8, block_size=4, mask_token_id=vocab - 1, target_layer_ids=[0, 1]
    )
    draft = transformers.MuseGlimmerAssistantModel(config).eval()
    tiny.spread(draft, seed=1)
    return target, {"assistant_model": draft, "speculation_type": "dflash"}


def mtp(vocab: int, logit_scale: float):
    """Layers of the target's checkpoint that draft, here two, and draw."""
    from transformers.modeling_layers import MtpModel

    config = transformers.Glm4MoeConfig(
        **SHAPE, vocab_size=vocab, num_hidden_layers=2, num_mtp_layers=2, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=32, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    target = built(transformers.Glm4MoeForCausalLM(config), seed=2, logit_scale=logit_scale)
    layers = MtpModel(target, 2).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in layers.layers.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return target, {"use_mtp": True, "layers": layers}


KINDS = {"gemma4": gemma4, "dflash": dflash, "mtp": mtp}


@pytest.fixture
def drafting(request, monkeypatch):
    """Makes (enabled target, options that draft)."""

    def make(kind: str, vocab: int = tiny.VOCAB, logit_scale: float = tiny.LOGIT_SCALE):
        target, options = KINDS[kind](vocab, logit_scale)
        if (layers := options.pop("layers", None)) is not None:  # else loaded from the target's checkpoint
            monkeypatch.setattr(type(layers), "from_pretrained", lambda *args, **kwargs: layers)
        return cactus_hf.enable(target), options

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", ((9,), (3, 12, 7)), ids=("one row", "batch"))
@pytest.mark.parametrize("num_drafts", (None, 2))
def test_greedy_text_is_plain(drafting, kind, lengths, num_drafts):
    target, options = drafting(kind)
    prompts = tiny.ragged_prompts(lengths)
    output = target.generate(
        **prompts.inputs, **GREEDY, **options, cactus_delta=1.0, num_assistant_tokens=num_drafts,
        return_dict_in_generate=True,
    )  # fmt: skip
    for row, plain in zip(output.sequences, tiny.plain_greedy(target, prompts, 20), strict=True):
        assert row[prompts.input_ids.shape[1] :].tolist() == plain.tolist()
    drafted = output.speculation.accepted_by_position.shape[1]
    assert drafted == num_drafts or (num_drafts is None and drafted > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_the_targets(drafting, kind):
    """Vocabulary 8, delta 0: the second and the third token have the target's law, though the draft is a bad one."""
    target, options = drafting(kind, vocab=8, logit_scale=0.8)
    laws.assert_next_tokens_follow(target, options)


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_decide_and_the_global_generator_is_left_alone(drafting, kind):
    target, options = drafting(kind)
    options |= {"do_sample": True, "cactus_delta": 0.5, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    prompts = tiny.ragged_prompts((9, 4))
    torch.manual_seed(0)
    one = target.generate(**prompts.inputs, **options, generator=[1, 2])
    state = torch.get_rng_state()
    other = target.generate(**prompts.inputs, **options, generator=[1, 2])
    assert one.equal(other) and torch.get_rng_state().equal(state)
    assert not one.equal(target.generate(**prompts.inputs, **options, generator=[1, 3]))


@pytest.mark.parametrize("kind", ("gemma4", "dflash"))
def test_the_draft_is_left_as_it_was(drafting, kind):
    target, options = drafting(kind)
    draft = options["assistant_model"]
    before = copy.deepcopy(draft.state_dict()), draft.config.to_dict(), target.generation_config.to_dict()
    for _ in range(2):
        target.generate(**tiny.ragged_prompts((5,)).inputs, **GREEDY, **options, cactus_delta=1.0)
    assert all(value.equal(before[0][name]) for name, value in draft.state_dict().items())
    assert (draft.config.to_dict(), target.generation_config.to_dict()) == before[1:]


def test_what_they_cannot_do_is_refused(drafting):
    target, options = drafting("mtp")
    prompts = tiny.ragged_prompts((5,)).inputs
    with pytest.raises(ValueError, match="assistant_confidence_threshold"):
        target.generate(**prompts, **options, cactus_delta=1.0, assistant_confidence_threshold=0.4)
    with pytest.raises(ValueError, match="assistant_model.*use_mtp.*one of"):
        target.generate(**prompts, **options, cactus_delta=1.0, assistant_model=tiny.model("llama"))
    with pytest.raises(ValueError, match="dflash.*drafters.*LlamaForCausalLM"):
        target.generate(**prompts, assistant_model=tiny.model("llama"), speculation_type="dflash", cactus_delta=1.0)
    with pytest.raises(ValueError, match="dflash.*assistant_model"):
        config = GenerationConfig(use_mtp=True, speculation_type="dflash")
        target.generate(**prompts, generation_config=config, cactus_delta=1.0)
