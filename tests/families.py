"""The families of the tests: one row of `ARCHITECTURES` for each tiny model."""

from __future__ import annotations

from typing import Any

import families_generic
import families_one_row
from architectures import MAX_POSITIONS, WINDOW, Architecture
from families_one_row import FORGETS


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
LLAMA_HEAD_DIM = dict(LLAMA, head_dim=8)  # for classes whose default is the full-size model's
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}
ONE_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    **LLAMA,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "topk_group": 1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _row(name: str, options: dict[str, Any], *flags: str, model_type: str | None = None, **rest: Any) -> Architecture:
    return Architecture(name, options, model_type or name, frozenset(flags), **rest)


_ROWS = (
    _row("llama", LLAMA, seed=1),
    _row(
        "llama_dynamic_rope",
        dict(
            LLAMA,
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ),
        "dynamic_rope",
        model_type="llama",
    ),
    _row("qwen2", LLAMA, seed=1),
    _row("qwen3", LLAMA_HEAD_DIM, seed=4),
    _row(
        "qwen3_moe",
        dict(LLAMA_HEAD_DIM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        "moe",
        seed=12,
    ),
    _row("mistral", dict(LLAMA, sliding_window=WINDOW), "sliding", seed=2),
    _row("mixtral", dict(LLAMA, sliding_window=None, **EXPERTS), "moe"),
    _row("gemma", LLAMA_HEAD_DIM),
    _row("gemma2", dict(LLAMA_HEAD_DIM, query_pre_attn_scalar=8, **ONE_SLIDING), "sliding", seed=4),
    _row(
        "gemma3",
        dict(
            LLAMA_HEAD_DIM,
            num_hidden_layers=3,
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        "sliding",
        seed=12,
        model_type="gemma3_text",
    ),
    _row("phi", dict(LLAMA, num_key_value_heads=4), seed=15),
    _row("phi3", dict(LLAMA, original_max_position_embeddings=MAX_POSITIONS)),
    _row("gpt_neox", dict(LLAMA, rotary_pct=0.5), seed=24),
    _row("gpt2", GPT, "learned", seed=5),
    _row("gptj", dict(GPT, rotary_dim=4), seed=22),
    _row("codegen", dict(GPT, rotary_dim=4), seed=14),
    _row(
        "opt",
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
        "learned",
        seed=2,
    ),
    _row("cohere", dict(LLAMA, logit_scale=1.0), seed=3),
    _row("cohere2", dict(LLAMA_HEAD_DIM, logit_scale=1.0, **ONE_SLIDING), "sliding", seed=7),
    _row("falcon", dict(LLAMA, multi_query=True, parallel_attn=True), seed=1),
    _row("falcon_new", dict(LLAMA, new_decoder_architecture=True, num_kv_heads=2), seed=10, model_type="falcon"),
    _row(
        "falcon_alibi",
        dict(LLAMA, alibi=True, multi_query=False, parallel_attn=False),
        "alibi",
        model_type="falcon",
        batch="one row",
        remark="with `alibi`",
    ),
    _row("gpt_oss", dict(LLAMA_HEAD_DIM, **EXPERTS, **ONE_SLIDING), "sliding", "moe", seed=6),
    _row("olmo", LLAMA, seed=5),
    _row("olmo2", LLAMA, seed=8),
    _row("granite", LLAMA, seed=6),
    _row("granite_moe", dict(LLAMA, **EXPERTS), "moe", model_type="granitemoe"),
    _row("starcoder2", dict(LLAMA, sliding_window=None), seed=15),
    _row("stablelm", LLAMA, seed=5),
    _row("nemotron", LLAMA_HEAD_DIM, seed=5),
    _row("glm", LLAMA_HEAD_DIM, seed=2),
    _row("glm4", LLAMA_HEAD_DIM),
    _row("smollm3", dict(LLAMA, no_rope_layers=[1, 0]), seed=1),
    _row("deepseek_v2", dict(LATENT, topk_method="greedy", n_group=1), "moe", "latent", seed=1),
    _row("deepseek_v3", dict(LATENT, n_group=2), "moe", "latent", seed=9),
    _row("ernie4_5", LLAMA_HEAD_DIM, seed=1),
    _row(
        "llama4",
        dict(
            LLAMA_HEAD_DIM,
            intermediate_size_mlp=64,
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=WINDOW,
            no_rope_layers=[1, 0],
            layer_types=["chunked_attention", "full_attention"],
        ),
        "moe",
        "chunked",
        seed=4,
        model_type="llama4_text",
    ),
    _row("gpt_bigcode", dict(GPT, multi_query=True), "learned", seed=1),
    _row("biogpt", {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, "learned", seed=4),
    _row(
        "xglm",
        {
            "d_model": 32,
            "ffn_dim": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
        seed=6,
    ),
    _row(
        "bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "alibi", "no_position_ids", seed=17, batch="one row"
    ),
    _row("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}, "alibi", "no_position_ids", seed=20, batch="one row"),
    _row(
        "mamba",
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        "recurrent",
        batch="refused",
        remark=FORGETS,
    ),
    _row(
        "rwkv",
        {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": MAX_POSITIONS},
        "recurrent",
        batch="refused",
        remark="states of its own, in no cache",
    ),
    _row(
        "recurrent_gemma",
        dict(LLAMA, lru_width=32, attention_window_size=WINDOW, block_types=["recurrent", "attention"]),
        "hybrid",
        batch="refused",
        remark="states of its own, in no cache",
    ),
    _row(
        "jamba",
        dict(LLAMA, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False),
        "hybrid",
        "moe",
        batch="refused",
        remark=FORGETS,
    ),
)
ARCHITECTURES = {row.name: row for row in _ROWS + families_generic.ROWS + families_one_row.ROWS}
