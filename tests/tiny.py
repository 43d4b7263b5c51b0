"""Tiny random models, drafts, tokenizers and prompts for the tests: float32 on the CPU, no network.

Dimension letters: B rows, T length, V vocabulary.

transformers' own initialisation (weights of standard deviation 0.02) makes attention almost uniform and logits almost
flat, so a wrong mask or a wrong position hardly moves the output and greedy choices are near-ties. `spread` therefore
draws every weight anew: attention is sharp enough that one wrong slot changes the text, logits have the spread
`LOGIT_SCALE`, and the best token leads the second by about a third of that.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast


VOCAB = 97  # prime, so that no kernel's block size divides it
PAD, EOS, BOS, UNK = 0, 1, 2, 3
LOGIT_SCALE = 4.0  # standard deviation of the logits over the vocabulary
MAX_POSITIONS = 256


@dataclass(frozen=True)
class Architecture:
    """
    How to make one family of decoder-only models in miniature.

    Args:
        name (`str`): Name in `ARCHITECTURES`.
        prefix (`str`): Stem of the class names in transformers, as in `LlamaConfig`.
        options (`dict`): Arguments of the configuration.
        head (`str`, *optional*, defaults to `"ForCausalLM"`): What follows `prefix` in the name of the model class.
        config (`str`, *optional*): Name of the configuration class where it is not `prefix + "Config"`.
        flags (`frozenset[str]`): What is special: see `FLAGS`.
        seed (`int`): Default seed of the weights: one whose greedy texts are varied and keep clear of near-ties.
    """

    name: str
    prefix: str
    options: dict[str, Any] = field(hash=False)
    head: str = "ForCausalLM"
    config: str | None = None
    flags: frozenset[str] = frozenset()
    seed: int = 0

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return getattr(transformers, self.prefix + self.head)

    @property
    def attention(self) -> tuple[str, ...]:
        """Attention implementations among eager and sdpa that the class takes (this varies between releases)."""
        return ("eager", "sdpa") if self.model_class._supports_sdpa else ("eager",)

    def build(
        self,
        *,
        attn_implementation: str | None = None,
        seed: int | None = None,
        vocab: int = VOCAB,
        dtype: torch.dtype = torch.float32,
        logit_scale: float = LOGIT_SCALE,
        **options: Any,
    ) -> PreTrainedModel:
        """A new model in eval mode. The same arguments give the same weights whatever the attention implementation."""
        common = {
            "vocab_size": vocab,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "bos_token_id": BOS,
            "tie_word_embeddings": False,
        }
        config_class = getattr(transformers, self.config or f"{self.prefix}Config")
        config = config_class(**{**common, **self.options, **options})
        config._attn_implementation = attn_implementation or self.attention[-1]
        seed = self.seed if seed is None else seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model_class(config).eval()
        if not self.flags & {"recurrent", "hybrid"}:  # a state that must decay does not survive random weights
            spread(model, seed=seed)
        sharpen(model, logit_scale)
        return model.to(dtype)


FLAGS = {
    "alibi": "positions enter as a bias built from the 2-D attention mask, not from position ids",
    "recurrent": "keeps a running state that cannot be rolled back",
    "hybrid": "some layers keep such a state, others a key/value cache",
    "sliding": "all layers, or those of `config.layer_types`, see a window of the last 8 tokens",
    "chunked": "some layers see only their own chunk of 8 positions",
    "moe": "mixture of experts",
    "latent": "multi-head latent attention: keys and values have different widths",
    "learned": "learned absolute positions: none beyond `MAX_POSITIONS`",
    "no_position_ids": "forward takes no position ids",
    "dynamic_rope": "rotary frequencies depend on the longest row of the batch, so rows influence each other",
}


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
WINDOW = 8
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


def _make(name: str, prefix: str, options: dict[str, Any], *flags: str, **rest: Any) -> Architecture:
    return Architecture(name, prefix, options, flags=frozenset(flags), **rest)


_ROWS = (
    _make("llama", "Llama", LLAMA, seed=1),
    _make(
        "llama_dynamic_rope",
        "Llama",
        dict(
            LLAMA,
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ),
        "dynamic_rope",
    ),
    _make("qwen2", "Qwen2", LLAMA, seed=1),
    _make("qwen3", "Qwen3", LLAMA_HEAD_DIM, seed=4),
    _make(
        "qwen3_moe",
        "Qwen3Moe",
        dict(LLAMA_HEAD_DIM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        "moe",
        seed=12,
    ),
    _make("mistral", "Mistral", dict(LLAMA, sliding_window=WINDOW), "sliding", seed=2),
    _make("mixtral", "Mixtral", dict(LLAMA, sliding_window=None, **EXPERTS), "moe"),
    _make("gemma", "Gemma", LLAMA_HEAD_DIM),
    _make("gemma2", "Gemma2", dict(LLAMA_HEAD_DIM, query_pre_attn_scalar=8, **ONE_SLIDING), "sliding", seed=4),
    _make(
        "gemma3",
        "Gemma3",
        dict(
            LLAMA_HEAD_DIM,
            num_hidden_layers=3,
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        "sliding",
        config="Gemma3TextConfig",
        seed=12,
    ),
    _make("phi", "Phi", dict(LLAMA, num_key_value_heads=4), seed=15),
    _make("phi3", "Phi3", dict(LLAMA, original_max_position_embeddings=MAX_POSITIONS)),
    _make("gpt_neox", "GPTNeoX", dict(LLAMA, rotary_pct=0.5), seed=24),
    _make("gpt2", "GPT2", GPT, "learned", head="LMHeadModel", seed=5),
    _make("gptj", "GPTJ", dict(GPT, rotary_dim=4), seed=22),
    _make("codegen", "CodeGen", dict(GPT, rotary_dim=4), seed=14),
    _make(
        "opt",
        "OPT",
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
    _make("cohere", "Cohere", dict(LLAMA, logit_scale=1.0), seed=3),
    _make("cohere2", "Cohere2", dict(LLAMA_HEAD_DIM, logit_scale=1.0, **ONE_SLIDING), "sliding", seed=7),
    _make("falcon", "Falcon", dict(LLAMA, multi_query=True, parallel_attn=True), seed=1),
    _make("falcon_new", "Falcon", dict(LLAMA, new_decoder_architecture=True, num_kv_heads=2), seed=10),
    _make("falcon_alibi", "Falcon", dict(LLAMA, alibi=True, multi_query=False, parallel_attn=False), "alibi"),
    _make("gpt_oss", "GptOss", dict(LLAMA_HEAD_DIM, **EXPERTS, **ONE_SLIDING), "sliding", "moe", seed=6),
    _make("olmo", "Olmo", LLAMA, seed=5),
    _make("olmo2", "Olmo2", LLAMA, seed=8),
    _make("granite", "Granite", LLAMA, seed=6),
    _make("granite_moe", "GraniteMoe", dict(LLAMA, **EXPERTS), "moe"),
    _make("starcoder2", "Starcoder2", dict(LLAMA, sliding_window=None), seed=15),
    _make("stablelm", "StableLm", LLAMA, seed=5),
    _make("nemotron", "Nemotron", LLAMA_HEAD_DIM, seed=5),
    _make("glm", "Glm", LLAMA_HEAD_DIM, seed=2),
    _make("glm4", "Glm4", LLAMA_HEAD_DIM),
    _make("smollm3", "SmolLM3", dict(LLAMA, no_rope_layers=[1, 0]), seed=1),
    _make("deepseek_v2", "DeepseekV2", dict(LATENT, topk_method="greedy", n_group=1), "moe", "latent", seed=1),
    _make("deepseek_v3", "DeepseekV3", dict(LATENT, n_group=2), "moe", "latent", seed=9),
    _make("ernie4_5", "Ernie4_5", LLAMA_HEAD_DIM, seed=1),
    _make(
        "llama4",
        "Llama4",
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
        config="Llama4TextConfig",
        seed=4,
    ),
    _make("gpt_bigcode", "GPTBigCode", dict(GPT, multi_query=True), "learned", seed=1),
    _make("biogpt", "BioGpt", {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, "learned", seed=4),
    _make(
        "xglm",
        "XGLM",
        {
            "d_model": 32,
            "ffn_dim": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
        seed=6,
    ),
    _make("bloom", "Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "alibi", "no_position_ids", seed=17),
    _make("mpt", "Mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}, "alibi", "no_position_ids", seed=20),
    _make("mamba", "Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "recurrent", seed=2),
    _make(
        "rwkv",
        "Rwkv",
        {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": MAX_POSITIONS},
        "recurrent",
        seed=6,
    ),
    _make(
        "recurrent_gemma",
        "RecurrentGemma",
        dict(LLAMA, lru_width=32, attention_window_size=WINDOW, block_types=["recurrent", "attention"]),
        "hybrid",
        seed=3,
    ),
    _make(
        "jamba",
        "Jamba",
        dict(LLAMA, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False),
        "hybrid",
        "moe",
        seed=11,
    ),
)
ARCHITECTURES = {row.name: row for row in _ROWS}


def spread(model: PreTrainedModel, *, seed: int, gain: float = 1.5) -> None:
    """
    Draws the weights of `model` anew, in place: unit embeddings, matrices that multiply the spread of their input by
    `gain`, biases and norms a little off their start.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.data += 0.1 * noise
        elif parameter in embeddings:
            parameter.data = noise
        else:
            parameter.data = noise * gain / min(parameter.shape[-2:]) ** 0.5


@torch.no_grad()
def sharpen(model: PreTrainedModel, logit_scale: float = LOGIT_SCALE) -> None:
    """Scales the head of `model`, in place, until its logits have standard deviation `logit_scale`."""
    tokens = torch.arange(min(model.config.vocab_size, 40))[None]
    model.get_output_embeddings().weight *= logit_scale / model(input_ids=tokens).logits.std(-1).mean()


@cache
def model(name: str, attn_implementation: str | None = None, **options: Any) -> PreTrainedModel:
    """`ARCHITECTURES[name].build(...)`, made once and shared: a test that changes it works on a `copy.deepcopy`."""
    return ARCHITECTURES[name].build(attn_implementation=attn_implementation, **options)


def perturbed(model: PreTrainedModel, eps: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """
    A draft that often agrees with `model`: a copy whose every tensor has noise of `eps` times its own spread added.
    At eps .02, .05, .1, .2 and .3 its greedy choice on the target's text is the target's at about 90, 75, 55, 35 and
    25 % of the positions (mean over the families).
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.data += eps * parameter.detach().std(correction=0) * noise
    return draft


@cache
def pair(
    name: str, attn_implementation: str | None = None, eps: float = 0.05, **options: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and a draft that often agrees with it, made once and shared as in `model`."""
    target = model(name, attn_implementation, **options)
    return target, perturbed(target, eps)


@cache
def vocabulary8(seed: int = 0, logit_scale: float = 1.2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """
    A Llama with 8 tokens for tests of laws. Hardly any token has a probability below .5 % in any context, so that all
    cells of a joint law are reached. Two seeds make a target and a draft; they overlap by about .5.
    """
    return ARCHITECTURES["llama"].build(
        seed=seed, vocab=8, dtype=dtype, logit_scale=logit_scale, hidden_size=16, intermediate_size=32
    )


class Prompts(NamedTuple):
    """Left-padded prompts, as a tokenizer with `padding_side="left"` makes them."""

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64, 0 at pads

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What `generate(**inputs)` takes."""
        return self._asdict()

    def row(self, index: int, num_pads: int = 0) -> Prompts:
        """Prompt `index` alone, behind `num_pads` pads."""
        tokens = self.input_ids[index, self.attention_mask[index].bool()]
        mask = torch.ones_like(tokens)
        return Prompts(*(torch.nn.functional.pad(x, (num_pads, 0), value=PAD)[None] for x in (tokens, mask)))


def ragged_prompts(lengths: tuple[int, ...] = (5, 17, 9, 2), vocab: int = VOCAB, seed: int = 5) -> Prompts:
    """Random prompts of these lengths, left-padded; no special tokens where the vocabulary has room for others."""
    generator = torch.Generator().manual_seed(seed)
    lowest = UNK + 1 if vocab > 8 else 0
    rows = [torch.randint(lowest, vocab, (length,), generator=generator) for length in lengths]
    padded = [torch.nn.functional.pad(row, (max(lengths) - len(row), 0), value=PAD) for row in rows]
    mask = [(torch.arange(max(lengths)) >= max(lengths) - length).long() for length in lengths]
    return Prompts(torch.stack(padded), torch.stack(mask))


def plain_greedy(model: PreTrainedModel, prompts: Prompts, max_new_tokens: int, **options: Any) -> list[Tensor]:
    """Stock greedy continuations of the rows, each generated alone; `options` go to `generate`."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD, **options}
    rows = [prompts.row(index) for index in range(len(prompts.input_ids))]
    return [
        model.generate(**row.inputs, max_new_tokens=max_new_tokens, **options)[0, row.input_ids.shape[1] :]
        for row in rows
    ]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
SPECIAL_IDS = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, "<unk>": UNK}


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def word_tokenizer(vocab: int = VOCAB, rotate: int = 0) -> PreTrainedTokenizerFast:
    """Words "w4", "w5", ... separated by spaces; id i is "w<i>", or with `rotate` another word: another tokenizer."""
    first = UNK + 1
    words = {f"w{(i - first + rotate) % (vocab - first) + first}": i for i in range(first, vocab)}
    tokenizer = Tokenizer(models.WordLevel(SPECIAL_IDS | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, 260 in all: any text makes the round trip, and stop strings can straddle tokens."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=UNK + 1)}
    tokenizer = Tokenizer(models.BPE(vocab=SPECIAL_IDS | letters, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)
