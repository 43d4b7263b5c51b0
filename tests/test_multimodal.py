"""Prompts with images: every row's text is plain decoding's, alone and in ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

import cactus_hf
import tiny


IMAGE, BEGIN, END, VIDEO = 90, 91, 92, 93  # ids of image placeholders and what stands around them
NUM_PLACEHOLDERS = 4  # of an image
TEXT = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": tiny.PAD,
    "eos_token_id": tiny.EOS, "bos_token_id": tiny.BOS,
}  # fmt: skip
HEAD = {"head_dim": 8}
UNTIED = {"tie_word_embeddings": False}
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
} | UNTIED
QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


class Family(NamedTuple):
    """How to make a vision-language model in miniature, and what it takes for images."""

    build: Callable[[], PreTrainedModel]
    images: Callable[[int], dict[str, Tensor]]
    token_types: str | None = None  # the input that marks placeholders


def pixels(*shape: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda count: {"pixel_values": noise(count, *shape)}


def patches(count: int) -> dict[str, Tensor]:
    return {"pixel_values": noise(16 * count, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]] * count)}


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def llava() -> PreTrainedModel:
    config = hf.LlavaConfig(
        **UNTIED, vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="default",
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def gemma3() -> PreTrainedModel:
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = hf.Gemma3Config(
        **UNTIED, vision_config=hf.SiglipVisionConfig(**VISION), mm_tokens_per_image=NUM_PLACEHOLDERS,
        image_token_index=IMAGE,
        text_config=hf.Gemma3TextConfig(**TEXT, **HEAD, **layers, query_pre_attn_scalar=8), boi_token_index=BEGIN,
        eoi_token_index=END,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


def paligemma() -> PreTrainedModel:
    config = hf.PaliGemmaConfig(
        **UNTIED, vision_config=hf.SiglipVisionConfig(**VISION, projection_dim=32, vision_use_head=False),
        projection_dim=32,
        text_config=hf.GemmaConfig(**TEXT, **HEAD), image_token_index=IMAGE,
    )  # fmt: skip
    return hf.PaliGemmaForConditionalGeneration(config)


def qwen2_vl() -> PreTrainedModel:
    vision = QWEN_VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(text_config=TEXT | {"rope_parameters": ROPE}, vision_config=vision, **QWEN)
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> PreTrainedModel:
    vision = QWEN_VISION | {
        "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 16,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = hf.Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": ROPE}, vision_config=vision, **QWEN)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> PreTrainedModel:
    vision = QWEN_VISION | {
        "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    text = TEXT | HEAD | {"rope_parameters": ROPE | {"mrope_interleaved": True}}
    return hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN))


def idefics3() -> PreTrainedModel:
    config = hf.Idefics3Config(
        **UNTIED, vision_config=VISION | {"patch_size": 4}, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE,
        scale_factor=2, pad_token_id=tiny.PAD,
    )  # fmt: skip
    return hf.Idefics3ForConditionalGeneration(config)


def internvl() -> PreTrainedModel:
    vision = VISION | {"image_size": [16, 16], "patch_size": [4, 4]}
    config = hf.InternVLConfig(
        **UNTIED, vision_config=vision, text_config=hf.Qwen2Config(**TEXT), image_token_id=IMAGE, image_seq_length=4,
        downsample_ratio=0.5,
    )  # fmt: skip
    return hf.InternVLForConditionalGeneration(config)


def mllama() -> PreTrainedModel:
    """Its images are no part of the text: layers of cross attention look at them."""
    text = TEXT | {"num_hidden_layers": 3, "cross_attention_layers": [1]}
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "image_size": 16,
        "attention_heads": 2, "patch_size": 8, "vision_output_dim": 32, "intermediate_layers_indices": [1],
        "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = hf.MllamaConfig(**UNTIED, vision_config=vision, text_config=text | rope, image_token_index=IMAGE)
    return hf.MllamaForConditionalGeneration(config)


FAMILIES = {
    "llava": Family(llava, pixels(3, 16, 16)),
    "gemma3": Family(gemma3, pixels(3, 16, 16), "token_type_ids"),
    "paligemma": Family(paligemma, pixels(3, 16, 16), "token_type_ids"),
    "qwen2_vl": Family(qwen2_vl, patches, "mm_token_type_ids"),
    "qwen2_5_vl": Family(qwen2_5_vl, patches, "mm_token_type_ids"),
    "qwen3_vl": Family(qwen3_vl, patches, "mm_token_type_ids"),
    "idefics3": Family(idefics3, pixels(1, 3, 16, 16)),
    "internvl": Family(internvl, pixels(3, 16, 16)),
}


def built(make: Callable[[], PreTrainedModel], attention: str = "sdpa") -> PreTrainedModel:
    model = make().eval()
    model.set_attn_implementation(attention)
    tiny.spread(model, seed=0)
    head = model.get_output_embeddings().weight
    head.data *= tiny.LOGIT_SCALE / head.data.std() / head.shape[1] ** 0.5
    return cactus_hf.enable(model)


def prompted(family: Family, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Prompts of these lengths, left-padded, with an image near the beginning of each."""
    prompts = tiny.ragged_prompts(lengths, vocab=IMAGE - 1)
    image = torch.tensor([BEGIN, *[IMAGE] * NUM_PLACEHOLDERS, END])
    for row, length in enumerate(lengths):
        start = max(lengths) - length + 1
        prompts.input_ids[row, start : start + len(image)] = image
    inputs = {**prompts.inputs, **family.images(len(lengths))}
    if family.token_types is not None:
        inputs[family.token_types] = (prompts.input_ids == IMAGE).long()
    return inputs | {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": tiny.PAD}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("lengths", ((11,), (9, 16, 12, 20)), ids=("one row", "batch"))
def test_greedy_text_is_plain(name, attention, lengths):
    family = FAMILIES[name]
    if name == "paligemma" and len(lengths) > 1:
        pytest.skip("takes one row at a time: it counts positions from 1, which no input says")
    target = built(family.build, attention)
    inputs = prompted(family, lengths)
    plain = target.generate(**inputs)
    blind = target.generate(**inputs | {"pixel_values": noise(*inputs["pixel_values"].shape, seed=4)})
    assert not plain.equal(blind), "the images must matter"
    for draft in (tiny.perturbed(target), tiny.model("llama")):  # one that sees the images, one that reads text only
        output = target.generate(**inputs, assistant_model=draft, cactus_delta=1.0, return_dict_in_generate=True)
        assert output.sequences.equal(plain)
        if draft is not tiny.model("llama"):
            assert output.speculation.accepted_length > 1


def test_prompt_lookup_in_a_text_with_an_image():
    target, inputs = built(llava), prompted(FAMILIES["llava"], (9, 16, 12))
    plain = target.generate(**inputs)
    assert target.generate(**inputs, prompt_lookup_num_tokens=3, cactus_delta=1.0).equal(plain)


def test_text_without_images():
    target, prompts = built(gemma3), tiny.ragged_prompts()
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD}
    plain = target.generate(**prompts.inputs, **options)
    assert target.generate(
        **prompts.inputs, **options, assistant_model=tiny.perturbed(target), cactus_delta=1.0
    ).equal(plain)


def cross_inputs(lengths: tuple[int, ...]) -> dict[str, Any]:
    prompts, count = tiny.ragged_prompts(lengths), len(lengths)
    return {
        **prompts.inputs, "pixel_values": noise(count, 1, 1, 3, 16, 16), "do_sample": False, "max_new_tokens": 20,
        "aspect_ratio_ids": torch.ones(count, 1, dtype=torch.long), "eos_token_id": None, "pad_token_id": tiny.PAD,
        "aspect_ratio_mask": torch.ones(count, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(count, max(lengths), 1, 1, dtype=torch.long),
    }  # fmt: skip


def test_what_cannot_be_rolled_back_or_split_is_refused():
    target = built(mllama)
    with pytest.raises(ValueError, match="MllamaForConditionalGeneration.*cross attention.*pixel_values"):
        target.generate(**cross_inputs((9,)), assistant_model=tiny.model("llama"), cactus_delta=1.0)
    target = built(paligemma)
    with pytest.raises(ValueError, match="one row at a time.*split"):
        inputs = prompted(FAMILIES["paligemma"], (9, 16))
        target.generate(**inputs, assistant_model=tiny.model("llama"), cactus_delta=1.0)


def test_text_alone_for_a_model_with_cross_attention():
    target, prompts = built(mllama), tiny.ragged_prompts()
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD}
    plain = target.generate(**prompts.inputs, **options)
    ours = target.generate(**prompts.inputs, **options, assistant_model=tiny.perturbed(target), cactus_delta=1.0)
    assert ours.equal(plain)
