"""Which models can share one cache between rows of different lengths, as far as their configuration tells."""

from __future__ import annotations

from typing import Any


RAGGED_ATTENTION = ("eager", "sdpa")  # implementations that take ready-made masks
OWN_MASKS = ("bloom", "mpt")  # model types that build attention biases from a mask of two dimensions
# Model types whose cache does not let the loop go back and score several tokens, though it looks like any other
UNFIT = {
    "cpmant": "puts tokens of its own before the text",
    "moshi": "drops tokens from its cache that its mask does not hide",
    "prophetnet": "takes one token at a time once there is a cache",
    "xlm": "fills no cache",
    **dict.fromkeys(
        ("falcon_mamba", "jamba", "mamba", "zamba"),
        "forgets its recurrent state where it reads several tokens at once",
    ),
}
# Model types with running states that go on from where they are saved (`cactus_hf.recurrent`), one row at a time
REPLAYED = frozenset(
    "bailing_hybrid bamba falcon_h1 granitemoehybrid inkling_text kimi_linear lara_mini mamba2 nemotron_h olmo_hybrid "
    "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text zamba2 zaya".split()
)
# Model types whose short convolutions transformers' cache can take back, one row at a time
CONVOLVED = frozenset("inkling2_text inkling2_loop_text lfm2 lfm2_moe lfm3".split())
# Model types whose ragged batches equal plain rows (tests/test_families.py); others are tried at run time
TESTED = frozenset(
    "afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 beam bert bert-generation big_bird biogpt bitnet "
    "camembert codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 "
    "deepseek_v3 deepseek_v32 diffllama doge dory dots1 dots3_note_text electra ernie ernie4_5 ernie4_5_moe exaone "
    "exaone4 exaone_moe falcon flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text "
    "gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_neox_japanese "
    "gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense "
    "hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text "
    "longcat_flash megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral "
    "modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe "
    "qwen3 qwen3_moe rembert roberta roberta-prelayernorm roc_bert sarvam_mla sarvam_moe seed_oss smollm3 "
    "solar_open stablelm starcoder2 vaultgemma xglm xlm-roberta xlm-roberta-xl xmod youtu".split()
)


def takes_ready_masks(config: Any, attention: str) -> bool:
    """Whether a model takes masks made by others and treats a row alike whatever the others' lengths.

    Args:
        config (`PreTrainedConfig`): of the text model.
        attention (`str`): its attention implementation.
    """
    has_alibi = config.model_type in OWN_MASKS or getattr(config, "alibi", False)
    return attention in RAGGED_ATTENTION and not has_alibi


def has_fixed_rope(config: Any, shortest: int, longest: int) -> bool:
    """Whether rotary frequencies stay as they are while rows of at least `shortest` tokens grow to at most `longest`.

    Dynamic scaling changes them with every token behind the original context, longrope once, when a text outgrows it:
    then those of a block depend on where it and the other rows end, and nothing is like plain decoding any more.
    """
    scaled = _scaled_rope(config)
    if not scaled:
        return True
    limit = _original_context(config, scaled)
    is_beyond_it = shortest > limit and all(r["rope_type"] == "longrope" for r in scaled)
    return longest <= limit or is_beyond_it


def draft_context(config: Any) -> int | None:
    """Tokens that a draft should read at most, if its configuration sets a limit.

    Behind it a model has no positions, was not trained, or changes the rotary frequencies of all rows.
    """
    scaled = _scaled_rope(config)
    return _original_context(config, scaled) if scaled else getattr(config, "max_position_embeddings", None)


def _scaled_rope(config: Any) -> list[dict[str, Any]]:
    """The settings of rotary frequencies that depend on the length of the text."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [r for r in (rope, *rope.values()) if isinstance(r, dict) and r.get("rope_type") in ("dynamic", "longrope")]


def _original_context(config: Any, scaled: list[dict[str, Any]]) -> int:
    limits = [r.get("original_max_position_embeddings") for r in scaled]
    original = getattr(config, "original_max_position_embeddings", None)
    return next((each for each in (*limits, original) if each), config.max_position_embeddings)
