"""Models of real shapes with random weights: what a machine can do, whatever the weights.

The shapes are those of the published configurations, but for the tiny one; a name says draft + target.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def _shape(
    kind: str, hidden: int, inner: int, layers: int, heads: int, groups: int, head: int, vocab: int, is_tied: bool
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "vocab_size": vocab,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": 32768,
    }


SHAPES = {
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen3-14b": _shape("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "llama-3.2-1b": _shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "smollm2-1.7b": _shape("llama", 2048, 8192, 24, 32, 32, 64, 49152, True),
}
# So small that a call is the loop and little else
SHAPES["tiny"] = _shape("llama", 64, 128, 2, 2, 1, 32, 512, True)
# The draft of the embedded pair has five of its target's layers
SHAPES["smollm2-5-layers"] = {**SHAPES["smollm2-135m"], "num_hidden_layers": 5}

PRESETS = {  # name -> (target, draft)
    "qwen3-0.6b+8b": ("qwen3-8b", "qwen3-0.6b"),
    "qwen3-0.6b+14b": ("qwen3-14b", "qwen3-0.6b"),
    "qwen2.5-0.5b+1.5b": ("qwen2.5-1.5b", "qwen2.5-0.5b"),
    "qwen2.5-0.5b+7b": ("qwen2.5-7b", "qwen2.5-0.5b"),
    "llama-3.2-1b+8b": ("llama-3.1-8b", "llama-3.2-1b"),
    "smollm2-135m+1.7b": ("smollm2-1.7b", "smollm2-135m"),
    "smollm2-135m": ("smollm2-135m", "smollm2-5-layers"),
    "tiny": ("tiny", "tiny"),
}
BLOCK = 2**20  # values drawn, which the weights repeat: drawing billions would take minutes


def check_preset(name: str) -> None:
    """Raises `ValueError`, with the nearest names, if there is no preset called `name`."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"There is no preset called {name!r}. {hint}Known presets: {', '.join(PRESETS)}.")


def build_pair(
    name: str, device: torch.device, dtype: torch.dtype, num_layers: int | None = None
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft of a preset, of at most `num_layers` layers each."""
    target, draft = (SHAPES[shape] for shape in PRESETS[name])
    return build(target, device, dtype, num_layers), build(draft, device, dtype, num_layers)


def build(
    shape: dict[str, Any], device: torch.device, dtype: torch.dtype, num_layers: int | None = None
) -> PreTrainedModel:
    """A model of random weights: norms 1, biases 0, all else normal with the usual spread of .02."""
    layers = min(shape["num_hidden_layers"], num_layers or shape["num_hidden_layers"])
    config: PreTrainedConfig = AutoConfig.for_model(**{**shape, "num_hidden_layers": layers})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    model.tie_weights()
    # No parameter, and so not restored by `to_empty`: rotary frequencies are computed at construction
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(device, dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), BLOCK):
            part = flat[start : start + BLOCK]
            part.copy_(block[: part.numel()])
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model.eval()
