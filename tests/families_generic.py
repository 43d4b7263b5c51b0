"""Families whose tiny configuration needs little more than the usual sizes under their usual names."""

from __future__ import annotations

from typing import Any

from architectures import MAX_POSITIONS, WINDOW, Architecture


# Each configuration takes those that it knows by name
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "dim_ff"), 64),
    **dict.fromkeys(("ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "attention_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2
    ),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim", "dim_head", "swa_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), MAX_POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "o_lora_rank": 16},
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **{"mamba_d_ssm": 64, "mamba_dt_rank": 4, "time_step_rank": 4, "use_mamba_kernels": False},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    # The more heads an indexer has, the rarer are ties between the tokens it picks from
    **{"index_n_heads": 32, "index_head_dim": 8, "index_topk": 6, "rotary_dim": 4, "query_pre_attn_scalar": 8},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "laurel_rank": 8, "altup_num_inputs": 2},
    **{"prompt_length": 4, "prompt_types": 4, "segment_types": 4, "unpadded_vocab_size": 97, "is_decoder": True},
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
TWICE_SLIDING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
ALL_HEADS = {"num_key_value_heads": 4}
COMPASS_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def row(name: str, *flags: str, since: str = "5.17", seed: int = 0, **rest: Any) -> Architecture:
    own = {key: rest.pop(key) for key in ("batch", "remark") if key in rest}
    return Architecture(name, rest, name, frozenset(flags), since=since, seed=seed, sizes=SIZES, **own)


DENSE = (
    row("apertus", seed=17),
    row("apertus1p5_text", seed=17),
    row("arcee", seed=1),
    row("beam", "sliding", seed=3, **SLIDING),
    row("bitnet", seed=1),
    row(
        "cohere_compass_text",
        "sliding",
        seed=1,
        **SLIDING,
        rope_parameters=dict.fromkeys(SLIDING["layer_types"], COMPASS_ROPE),
    ),
    row("ctrl", seed=7),
    row("cwm", "sliding", seed=5, **SLIDING),
    row("diffllama"),
    row("doge", seed=3),
    row(
        "dory",
        "sliding",
        seed=1,
        num_hidden_layers=3,
        n_input_layers=1,
        n_output_layers=1,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        remark="layers run in a loop",
    ),
    row("exaone", seed=2),
    row("exaone4", "sliding", **SLIDING),
    row("flint", "sliding", seed=1, **SLIDING),
    row(
        "gemma3n_text",
        "sliding",
        "shared",
        seed=1,
        **TWICE_SLIDING,
        num_kv_shared_layers=2,
        intermediate_size=[64] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    row("gemma4_text", "sliding", "shared", seed=7, **TWICE_SLIDING, num_kv_shared_layers=2),
    row("gemma4_unified_text", "sliding", **SLIDING),
    row("gpt_neox_japanese", seed=3),
    row("granite_swa", "sliding", **SLIDING),
    row("helium", seed=3),
    row("hrm_text"),
    row("hunyuan_v1_dense"),
    row("hyperclovax"),
    row("internlm3", seed=2),
    row("iquestcoder", seed=2),
    row("jais2", seed=5),
    row("minicpm3", "latent", seed=8, **ALL_HEADS),
    row("ministral", "sliding", seed=2, **SLIDING),
    row("ministral3", "sliding"),
    row("modernbert-decoder", "sliding", seed=3, **SLIDING),
    row("nanochat", seed=14),
    row("olmo3", "sliding", seed=20, **SLIDING),
    row("persimmon"),
    row("seed_oss", seed=1),
    row("vaultgemma", "sliding", seed=7, **SLIDING),
    row("youtu", "latent", seed=3, **ALL_HEADS),
)
EXPERTS = (
    row("afmoe", "sliding", "moe", **SLIDING),
    row("aria_text", "moe"),
    row("axk1", "latent", "moe", seed=1, **ALL_HEADS),
    row("cohere2_moe", "sliding", "moe", **SLIDING),
    row(
        "dbrx",
        "moe",
        ffn_config={"ffn_hidden_size": 32, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    ),
    row("dots1", "sliding", "moe", seed=9, **SLIDING),
    row("ernie4_5_moe", "moe", seed=3),
    row("exaone_moe", "sliding", "moe", **SLIDING),
    row("flex_olmo", "moe", seed=2),
    row("glm4_moe", "moe", seed=2),
    row("glm4_moe_lite", "latent", "moe", seed=1, **ALL_HEADS),
    row("granitemoe_swa", "sliding", "moe", seed=2, **SLIDING),
    row("granitemoeshared", "moe", seed=1),
    row("hunyuan_v1_moe", "moe"),
    row("hy_v3", "moe", seed=1),
    row("jetmoe", "moe"),
    row("kolibri1", "sliding", "moe", seed=5, **SLIDING),
    row("laguna", "sliding", "moe", seed=7, **SLIDING),
    row("longcat_flash", "latent", "moe", seed=6, num_layers=1, head_dim=4, zero_expert_num=2, **ALL_HEADS),
    row("mellum", "sliding", "moe", seed=1, **SLIDING),
    row("mimo_v2_flash", "sliding", "moe", seed=3, **SLIDING),
    row("minimax_m2", "moe"),
    row("olmoe", "moe", seed=1),
    row("phimoe", "sliding", "moe", seed=3),
    row("qwen2_moe", "moe"),
    row("sarvam_mla", "latent", "moe", **ALL_HEADS),
    row("sarvam_moe", "moe"),
    row("solar_open", "moe", seed=2),
)
# Encoders of old whose language-modelling heads decode as well
FORMER_ENCODERS = (
    row("bert", "learned", seed=6),
    row("bert-generation", "learned", seed=10),
    row("big_bird", "learned", seed=17),
    row("camembert", "learned", seed=7),
    row("data2vec-text", "learned", seed=16),
    row("electra", "learned"),
    row("ernie", "learned", seed=23),
    row("megatron-bert", "learned", seed=1),
    row("rembert", "learned", seed=2),
    row("roberta", "learned", seed=16),
    row("roberta-prelayernorm", "learned", seed=4),
    row(
        "roc_bert",
        "learned",
        seed=2,
        pronunciation_vocab_size=97,
        shape_vocab_size=97,
        pronunciation_embed_dim=8,
        shape_embed_dim=8,
    ),
    row("xlm-roberta", "learned", seed=32),
    row("xlm-roberta-xl", "learned"),
    row("xmod", "learned", seed=21, default_language="en_XX"),
)
SPARSE = (
    row("axk2", "sparse", "latent", "moe", **ALL_HEADS),
    row("deepseek_v32", "sparse", "latent", "moe", seed=11, **ALL_HEADS),
    row("dots3_note_text", "sparse", "latent", "moe", seed=1, **ALL_HEADS),
    row("glm_moe_dsa", "sparse", "latent", "moe", seed=2, **ALL_HEADS),
    row("hy_v4", "sparse", "latent", "moe", seed=3, **ALL_HEADS),
)
ROWS = DENSE + EXPERTS + FORMER_ENCODERS + SPARSE
