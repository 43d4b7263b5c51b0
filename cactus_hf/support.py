"""Which models can share one cache between rows of different lengths, as far as their configuration tells."""

from __future__ import annotations

from typing import Any


RAGGED_ATTENTION = ("eager", "sdpa")  # implementations that take ready-made masks
OWN_MASKS = ("bloom", "mpt")  # model types that build attention biases from a mask of two dimensions
# Model types whose ragged batches equal plain rows (tests/test_decoding.py); others are tried at run time
TESTED = frozenset(
    "biogpt codegen cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 falcon gemma gemma2 gemma3_text glm glm4 gpt2 "
    "gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe llama llama4_text mistral mixtral nemotron olmo olmo2 opt "
    "phi phi3 qwen2 qwen3 qwen3_moe smollm3 stablelm starcoder2 xglm".split()
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
