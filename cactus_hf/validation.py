"""Checks of a `generate()` call, all made before any forward pass, with errors that say what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers import generation as hf

from . import support
from .acceptance import AcceptanceRule
from .law import has_closed_form
from .parameters import is_integer
from .processor_kinds import FOR_OTHER_MODELS, is_among


if TYPE_CHECKING:
    from .config import SpeculationOptions
    from .host import Host
    from .ranks import Ranks

# Padding of one family's vocabularies differs by less; a larger difference means different tokenizers
MAX_VOCABULARY_PADDING = 1024
# What asks for a rule, as errors name it; `cactus_kl` stands for `cactus_kl_total` too
KEYWORDS = "`cactus_delta`, `cactus_kl` and `acceptance_rule`"
SOURCES = "`assistant_model=`, a smaller model; `assistant_early_exit=`; or `prompt_lookup_num_tokens=`"
# Options that choose a decoding method which is fetched from the Hub
OTHER_METHODS = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}


def check_mode(config: hf.GenerationConfig, mode: str, has_draft: bool, is_custom: bool) -> None:
    """Raises `ValueError` unless the call is one of assisted generation with a source of drafts.

    Args:
        mode (`str`): value of transformers' `GenerationMode`.
        is_custom (`bool`): whether `custom_generate` is a function.
    """
    if is_custom:
        raise ValueError(
            f"`custom_generate` decodes by its own function, which knows nothing of {KEYWORDS}: leave it out, or "
            "leave them out."
        )
    is_other = mode not in ("greedy_search", "sample", "assisted_generation")
    for name, method in OTHER_METHODS.items():
        if getattr(config, name, None) is not None and (is_other or name == "dola_layers"):
            raise ValueError(
                f"`{name}` asks for {method}, another decoding method than that of {KEYWORDS}: leave it out, or leave "
                "them out."
            )
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"{KEYWORDS} verify sampled or greedy drafts; `num_beams={config.num_beams}` is neither. Leave it out, "
            "or leave these out."
        )
    options = ("use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit")
    values = {name: getattr(config, name, None) for name in options}
    drafting = ["assistant_model"] * has_draft + [
        name for name, value in values.items() if value is not None and value is not False
    ]
    if len(drafting) > 1:
        raise ValueError(f"{' and '.join(f'`{name}`' for name in drafting)} each draft: give one of them.")
    if not drafting:
        raise ValueError(f"{KEYWORDS} are about drafted tokens, and nothing drafts: pass {SOURCES}.")
    if config.speculation_type and not has_draft:
        raise ValueError(
            f"`speculation_type={config.speculation_type!r}` needs the model that drafts so: pass `assistant_model`."
        )
    if config.cache_implementation not in (None, "dynamic", "static"):  # before the cache is made
        raise _cache_error(f"`cache_implementation={config.cache_implementation!r}`")
    ngram = config.max_matching_ngram_size
    if ngram is not None and (not is_integer(ngram) or ngram < 1):
        raise ValueError(f"`max_matching_ngram_size` must be an integer of at least 1, got {ngram!r}.")


def check_models(hosts: dict[str, Host], tokenizers: tuple[Any, Any]) -> None:
    """Raises `ValueError` unless "target" and "draft", if there is one, fit this package and one another."""
    for role, host in hosts.items():
        if not host.can_roll_back:
            reason = support.UNFIT.get(host.config.model_type, "keeps a recurrent state, or has no key/value cache")
            raise ValueError(
                f"The {role}, {host.name}, cannot be rolled back to the last accepted token: it {reason}. Use a model "
                "whose layers are all attention over such a cache."
            )
        if not host.has_masks:
            raise ValueError(
                f"The {role}, {host.name}, has the attention implementation {host.attention!r}, for which no masks "
                "are made: several tokens behind a cache would see one another. Register one for it by "
                "`transformers.AttentionMaskInterface.register`."
            )
    if "draft" in hosts:
        _check_likeness(hosts["target"], hosts["draft"], tokenizers)


def _check_likeness(target: Host, draft: Host, tokenizers: tuple[Any, Any]) -> None:
    if tokenizers[1] is not None and tokenizers[0] is None:
        raise ValueError("`assistant_tokenizer` is given without `tokenizer`: pass both, or neither.")
    if (
        tokenizers[1] is not None
        and (target.is_encoder_decoder or draft.is_encoder_decoder)
        and tokenizers[0].get_vocab() != tokenizers[1].get_vocab()
    ):
        raise ValueError(
            "`assistant_tokenizer` with another vocabulary than that of `tokenizer` is for decoder-only models: take "
            "a draft with the target's tokenizer."
        )
    if tokenizers[1] is None and abs(target.vocab_size - draft.vocab_size) > MAX_VOCABULARY_PADDING:
        raise ValueError(
            f"The target knows {target.vocab_size} token ids and the draft {draft.vocab_size}, which is more than "
            "padding: their tokenizers differ. Pass both as `tokenizer=` and `assistant_tokenizer=`, or take a draft "
            "with the target's tokenizer."
        )


def check_context(target: Host, prompt_lengths: Tensor, longest: int) -> None:
    """Raises `ValueError` for texts that the target would not go on with as plain decoding does. (Drafts may.)

    Args:
        prompt_lengths (`torch.Tensor` of shape [R], on the CPU): tokens of each prompt.
        longest (`int`): tokens that a row may come to have.
    """
    if not support.has_fixed_rope(target.config, int(prompt_lengths.min()), longest):
        raise ValueError(
            f"The rotary frequencies of the target, {target.name}, change as a text outgrows its original context, so "
            f"that drafts cannot be verified, and a row may come to {longest} tokens here. Lower `max_new_tokens`."
        )


def check_call(
    target: Host,
    inputs: dict[str, Any],
    input_ids: Tensor,
    processors: Any,
    streamer: Any,
    options: SpeculationOptions,
) -> Tensor:
    """Raises `ValueError` for what a call cannot have. Returns [R] on the CPU: padded columns of each row."""
    check_inputs(target, inputs, input_ids, streamer)
    cache = inputs.get(target.cache_name)
    is_unused = isinstance(cache, StaticCache) and not target.is_users(cache)  # what `generate()` made on demand
    check_cache(None if is_unused else cache, *input_ids.shape)
    check_processors(processors)
    if options.speculation_kl:
        check_measurable(options.rule)
    mask = inputs.get("decoder_attention_mask" if target.is_encoder_decoder else "attention_mask")
    padding = left_padding(mask, len(input_ids))
    check_decoder_padding(target, padding)
    return padding


def check_inputs(target: Host, inputs: dict[str, Any], input_ids: Tensor, streamer: Any) -> None:
    """Raises `ValueError` for inputs that the loop would have to ignore."""
    if inputs.get("pixel_values") is not None and getattr(target.config, "cross_attention_layers", None):
        raise ValueError(
            f"{target.name} looks at images by cross attention, whose states transformers' caches cannot keep while "
            f"they take drafts back: leave `pixel_values` out, or {KEYWORDS}."
        )
    if inputs.get("inputs_embeds") is not None and not target.is_encoder_decoder:
        raise ValueError(
            f"`inputs_embeds` cannot be passed along with {KEYWORDS}: the draft reads token ids. Pass `input_ids`."
        )
    mask = None if target.is_encoder_decoder else inputs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has the shape {list(mask.shape)}, but the prompts have {list(input_ids.shape)}: give "
            "one value a token. (Tokens that a cache holds belong to the prompts.)"
        )
    positions = inputs.get("position_ids")
    if positions is not None and positions.shape[-1] != input_ids.shape[1]:
        raise ValueError(
            f"`position_ids`, made from `attention_mask` unless given, have the shape {list(positions.shape)}, but "
            f"the prompts have {list(input_ids.shape)}: give one value a token. (Tokens that a cache holds belong to "
            "the prompts.)"
        )
    if len(input_ids) == 0:
        raise ValueError("There are no rows: give at least one prompt.")
    if input_ids.shape[1] == 0:
        raise ValueError(
            "The prompt has no token ids: speculative decoding needs at least one, as the draft reads them too."
        )
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"A streamer takes one row, but there are {len(input_ids)}: stream them one at a time.")


def check_cache(cache: Any, num_rows: int, length: int) -> None:
    """Raises `ValueError` for a cache that cannot be rolled back row by row, or does not fit prompts [R, `length`]."""
    if cache is None:
        return
    cache = getattr(cache, "self_attention_cache", cache)  # what an encoder left is never rolled back
    is_offloading = bool(getattr(cache, "offloading", False))
    if type(cache).__name__ != "DynamicCache" or is_offloading:
        raise _cache_error(f"a `{type(cache).__name__}`" + " with offloading" * is_offloading)
    # Running states have no length, and layers that read another's states have none of their own
    states = [keys for layer in cache.layers if (keys := getattr(layer, "keys", None)) is not None]
    if not states and any(True in getattr(layer, "has_previous_state", {}).values() for layer in cache.layers):
        raise ValueError(
            "The cache of a model without attention does not tell how many tokens it holds: leave it out, so that the "
            "whole text is read."
        )
    num_held = int(cache.get_seq_length()) if states else 0
    if num_held >= length:
        raise ValueError(
            f"The cache holds {num_held} tokens, but the prompts have {length}: pass the whole text's token ids, "
            "those in the cache included, with one `attention_mask` value for each, and at least one that is new."
        )
    held_rows = {keys.shape[0] for keys in states if num_held}
    if held_rows and held_rows != {num_rows}:
        raise ValueError(
            f"The cache holds {held_rows.pop()} rows, but there are {num_rows}: fill one for them all, or repeat its "
            "rows with `cache.batch_repeat_interleave(...)`."
        )


def _cache_error(cause: str) -> ValueError:
    return ValueError(
        f"{cause} cannot be rolled back row by row: leave it out, or pass a `DynamicCache`. Speculative decoding "
        "makes a cache of its own."
    )


def check_ranks(ranks: Ranks, hosts: Iterable[Host], needs_generator: bool, config: hf.GenerationConfig) -> None:
    """Raises `ValueError` where several processes could not keep in step.

    Args:
        hosts (iterable of `Host`): the models whose rows have a cache of their own.
        needs_generator (`bool`): whether a generator of transformers drafts, which knows of one process only.
    """
    replayed = next((host.name for host in hosts if host.is_replayed), None)
    if ranks.is_synced and replayed is not None:
        raise ValueError(
            "With `synced_gpus` (FSDP, DeepSpeed ZeRO-3) all processes must make the same forward passes, and "
            f"{replayed}, which keeps running states, makes one more after each rejection: use a model of attention."
        )
    if ranks.is_synced and config.prefill_chunk_size is not None:
        raise ValueError(
            "With `synced_gpus` (FSDP, DeepSpeed ZeRO-3) all processes must make the same forward passes, and "
            "`prefill_chunk_size` makes their number depend on the length of the prompt: leave it out."
        )
    if ranks.has_stages and config.assistant_early_exit is not None:
        raise ValueError(
            "`assistant_early_exit` drafts with the first layers, which not all processes of a pipeline-parallel "
            "model have: pass `assistant_model=` or `prompt_lookup_num_tokens=`."
        )
    if needs_generator and (ranks.is_synced or ranks.groups):
        raise ValueError(
            "Drafts that read the target's states, or share no token with it, are made for one process, but there are "
            f"several: pass {SOURCES}."
        )


def check_processors(processors: Any) -> None:
    """Raises `ValueError` for processors of other kinds of models."""
    for processor in processors:
        if is_among(processor, FOR_OTHER_MODELS):
            raise ValueError(
                f"{type(processor).__name__} is for models with several rows of scores a text: leave it out."
            )


def check_measurable(rule: AcceptanceRule) -> None:
    """Raises `ValueError` for a rule whose emitted law is not known, where `speculation_kl` asks for it."""
    if not has_closed_form(rule):
        raise ValueError(
            f"`speculation_kl=True` needs the law that {type(rule).__name__} emits, which is known only for rules "
            "that set `shares_residual = True`. Leave it out."
        )


def check_decoder_padding(target: Host, padding: Tensor) -> None:
    """Raises `ValueError` for texts of an encoder-decoder model that begin at different columns."""
    if target.is_encoder_decoder and padding.any():
        raise ValueError(
            "`decoder_attention_mask` hides tokens: texts of an encoder-decoder model must all begin at the first "
            "column. Call `generate()` once for each length of `decoder_input_ids`."
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
