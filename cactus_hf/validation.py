"""Checks of a `generate()` call, all made before any forward pass, with errors that say what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import generation as hf


if TYPE_CHECKING:
    from .generation import Host

# Padding of one family's vocabularies differs by less; a larger difference means different tokenizers
MAX_VOCABULARY_PADDING = 1024
# What `generate()` hands to the decoding method and this package passes on or makes itself
KNOWN_INPUTS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}
SOURCES = "`assistant_model=`, a smaller model with the same tokenizer, or `prompt_lookup_num_tokens=`"
OTHER_SOURCES = {
    "assistant_early_exit": "early exit",
    "use_mtp": "multi-token prediction",
    "speculation_type": "this type of speculation",
}


def check_mode(config: hf.GenerationConfig, has_draft: bool) -> None:
    """Raises `ValueError` unless the call is one of assisted generation with a draft model."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"`cactus_delta` and `acceptance_rule` verify sampled or greedy drafts; `num_beams={config.num_beams}` "
            "is neither. Leave one of the two out."
        )
    for name, what in OTHER_SOURCES.items():
        if getattr(config, name, None):
            raise ValueError(
                f"`{name}` ({what}) does not yet go with `cactus_delta` and `acceptance_rule`: pass {SOURCES}."
            )
    if has_draft and config.prompt_lookup_num_tokens:
        raise ValueError("`assistant_model` and `prompt_lookup_num_tokens` both draft: give one of them.")
    if not has_draft and not config.prompt_lookup_num_tokens:
        raise ValueError(
            f"`cactus_delta` and `acceptance_rule` are about drafted tokens, and nothing drafts: pass {SOURCES}."
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError(
            "`output_attentions` and `output_hidden_states` are not collected with `cactus_delta` or "
            "`acceptance_rule`. `output_scores` and `output_logits` are; for the others run the "
            "returned `sequences` through the model once."
        )
    if config.use_cache is False:
        raise ValueError("Speculative decoding rolls back a cache: `use_cache=False` cannot go with it. Leave it out.")


def check_models(hosts: dict[str, Host], tokenizers: tuple[Any, Any]) -> None:
    """Raises `ValueError` unless "target" and "draft", if there is one, fit this package and one another."""
    for role, host in hosts.items():
        if host.is_encoder_decoder:
            raise ValueError(
                f"The {role}, {host.name}, is an encoder-decoder model, which `cactus_delta` and `acceptance_rule` do "
                "not support yet: leave them out to run transformers' own assisted generation."
            )
        if not host.can_roll_back:
            raise ValueError(
                f"The {role}, {host.name}, keeps a recurrent state that cannot be rolled back to the last accepted "
                "token: use a model whose layers are all attention."
            )
    if "draft" in hosts:
        _check_likeness(hosts["target"], hosts["draft"], tokenizers)


def _check_likeness(target: Host, draft: Host, tokenizers: tuple[Any, Any]) -> None:
    if target.device != draft.device:
        raise ValueError(
            f"The target is on {target.device} and the draft on {draft.device}: move the draft with "
            f'`assistant_model.to("{target.device}")`.'
        )
    if any(tokenizers) and not all(tokenizers):
        tokenizers = (None, None)  # a tokenizer alone is for stop strings
    if all(tokenizers):
        if tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
            raise ValueError(
                "`tokenizer` and `assistant_tokenizer` have different vocabularies, which `cactus_delta` and "
                "`acceptance_rule` do not support yet: take a draft of the target's own family."
            )
    elif abs(target.vocab_size - draft.vocab_size) > MAX_VOCABULARY_PADDING:
        raise ValueError(
            f"The target knows {target.vocab_size} token ids and the draft {draft.vocab_size}, which is more than "
            "padding: their tokenizers differ. Take a draft with the target's tokenizer. (If they share it, pass both "
            "`tokenizer=` and `assistant_tokenizer=`.)"
        )


def check_batch(target: Host, draft: Host | None, num_rows: int) -> None:
    """Raises `ValueError` for batches of models that need a row each."""
    for role, host in (("target", target), ("draft", draft)):
        if num_rows > 1 and host is not None and not host.is_ragged:
            raise ValueError(
                f"The {role}, {host.name} with `attn_implementation={host.attention!r}`, can be verified one row at a "
                f"time only, but there are {num_rows} rows: call `generate()` row by row, or, unless its attention is "
                '"sdpa" or "eager" already, load it with one of these.'
            )


def check_inputs(inputs: dict[str, Any], input_ids: Tensor, streamer: Any, synced_gpus: bool) -> None:
    """Raises `ValueError` for inputs that the loop would have to ignore."""
    # An empty dictionary is what multimodal models are given for a prompt of text alone
    is_given = {name: value is not None and value != {} for name, value in inputs.items() if name not in KNOWN_INPUTS}
    others = sorted(name for name, given in is_given.items() if given)
    if others:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in others)} cannot be passed along with `cactus_delta` or "
            "`acceptance_rule` yet: only token ids and their attention mask can."
        )
    if input_ids.shape[1] == 0:
        raise ValueError(
            "The prompt has no token ids: speculative decoding needs at least one, as the draft reads them too."
        )
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"A streamer takes one row, but there are {len(input_ids)}: stream them one at a time.")
    if synced_gpus:
        raise ValueError(
            "`synced_gpus` (FSDP, DeepSpeed ZeRO-3) is not supported with `cactus_delta` or `acceptance_rule` yet."
        )


def check_cache(cache: Any, config: hf.GenerationConfig) -> None:
    """Raises `ValueError` for caches that cannot be rolled back row by row."""
    kind = type(cache).__name__
    if cache is not None and kind != "DynamicCache" or getattr(cache, "offloading", False):
        cause = (
            f"`cache_implementation={config.cache_implementation!r}`" if config.cache_implementation else f"a `{kind}`"
        )
        raise ValueError(
            f"{cause} cannot be rolled back row by row: leave it out, or pass a `DynamicCache`. Speculative decoding "
            "makes a cache of its own."
        )


def check_processors(processors: Any) -> None:
    for processor in processors:
        if isinstance(processor, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor):
            raise ValueError(
                "`guidance_scale` keeps a cache of its own that cannot be rolled back with the drafts: leave it out, "
                "or leave `cactus_delta` and `acceptance_rule` out."
            )


def left_padding(mask: Tensor | None, num_rows: int) -> Tensor:
    """[R] on the CPU: padded columns of each row. Raises `ValueError` if `mask` [R, P] has other padding than left."""
    if mask is None:
        return torch.zeros(num_rows, dtype=torch.long)
    mask = mask.cpu() != 0
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "`attention_mask` hides tokens behind visible ones: prompts must be padded on the left. Set "
            '`tokenizer.padding_side = "left"`.'
        )
    if not mask[:, -1].all():
        row = int((~mask[:, -1]).long().argmax())
        raise ValueError(f"`attention_mask` hides all tokens of row {row}: every row needs at least one.")
    return (~mask).sum(1)


def check_positions(position_ids: Tensor | None, padding: Tensor, length: int) -> None:
    """Raises `ValueError` unless positions count the tokens of each row from 0, as the loop goes on counting them."""
    if position_ids is None:
        return
    expected = (torch.arange(length) - padding[:, None]).clamp_min(0)
    if position_ids.dim() != 2 or (position_ids.cpu() != expected).any():
        raise ValueError(
            "`position_ids` must count the tokens of each row from 0: leave it out, and `generate()` will."
        )
