"""What the loop needs of a transformers model, and the one module that names private parts of transformers.

Checked with transformers 5.17 and 5.24.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.generation import GenerationConfig, PrefixConstrainedLogitsProcessor
from transformers.generation.candidate_generator import AssistedCandidateGeneratorDifferentTokenizers
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.generation.utils import _speculative_sampling
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import ModelOutput

from . import support
from .logits import RowProcessors
from .model_inputs import extended
from .ragged_cache import RaggedCache
from .wrappers import execution_device, unwrapped


# The cache is `past_key_values` in transformers 5.17 and `cache` in 5.24
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
OPTIONS = "speculation_options"  # where our options travel on the generation config of one call

# The methods of transformers' classes that `enable` puts ours around, by the name of ours in `generation.py`
METHODS = {
    "prepare_generation_config": (GenerationMixin, "_prepare_generation_config"),
    "validate_generation_mode": (GenerationMixin, "_validate_generation_mode"),
    "assisted_decoding": (GenerationMixin, "_assisted_decoding"),
    "generate_batch": (ContinuousMixin, "generate_batch"),
    "save_pretrained": (PreTrainedModel, "save_pretrained"),
}


def keep_unknown_options(config: Any) -> None:
    """Let options that transformers does not know survive the saving and loading of a generation config."""
    config._from_model_config = False


def _decoder_config(config: Any) -> Any:
    config = config.get_text_config(decoder=True)
    num_layers = getattr(config, "decoder_layers", None)
    if num_layers and not config.is_encoder_decoder and num_layers != config.num_hidden_layers:
        # A decoder taken out of Whisper or Bart, whose config still counts the encoder's layers
        config = copy.deepcopy(config)
        config.num_hidden_layers = num_layers
    return config


class Host:
    """What the loop needs of a transformers model."""

    cache_name = CACHE_NAME

    def __init__(self, model: Any):
        self.model = model
        self.inner = unwrapped(model, PreTrainedModel)  # a block drafter cannot `generate()`
        self.config = _decoder_config(self.inner.config)

    @property
    def name(self) -> str:
        return type(self.inner).__name__  # `enable` keeps it

    @property
    def device(self) -> torch.device:
        return execution_device(self.inner)

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def attention(self) -> str:
        return self.config._attn_implementation

    @property
    def has_masks(self) -> bool:
        """Whether transformers makes masks for the model's attention; else it must make them itself."""
        return self.attention in AttentionMaskInterface().valid_keys()

    @property
    def is_encoder_decoder(self) -> bool:
        return self.inner.config.is_encoder_decoder

    @functools.cached_property
    def can_roll_back(self) -> bool:
        """Whether states can be put back to an earlier token: there must be a cache, and one known to allow it."""
        if not self.inner._supports_default_dynamic_cache() or not self.takes(CACHE_NAME):
            return False
        if self.config.model_type in support.UNFIT:
            return False
        if self.is_replayed or self.config.model_type in support.CONVOLVED:
            return True
        is_croppable = all(getattr(type(layer), "is_croppable", False) is True for layer in self.own_cache().layers)
        return is_croppable and not self.inner._is_stateful

    @property
    def is_replayed(self) -> bool:
        """Whether it keeps running states, which no cache can crop."""
        return self.config.model_type in support.REPLAYED

    @functools.cached_property
    def is_ragged(self) -> bool:
        """Whether rows of different lengths can share a `RaggedCache`; else they run one at a time."""
        return (
            not self.is_encoder_decoder
            and support.takes_ready_masks(self.config, self.attention)
            and RaggedCache.can_hold(self.own_cache())
        )

    @property
    def is_tested(self) -> bool:
        return self.config.model_type in support.TESTED

    def takes(self, name: str) -> bool:
        """Whether the model's forward pass has an argument of that name."""
        return name in inspect.signature(self.inner.forward).parameters

    @property
    def process_groups(self) -> dict[str, Any]:
        """The groups in which this process shares the model, where transformers spread it over several: "tp" for parts
        of layers, "pp" for layers, "fsdp" for weights at rest.
        """
        mesh = getattr(self.inner, "_device_mesh", None)
        if mesh is None:
            return {}
        names = mesh.mesh_dim_names or ("tp",)  # transformers 5.17 gives none where there is tensor parallelism alone
        return {name: mesh.get_group(i) for i, name in enumerate(names) if mesh.size(i) > 1}

    def own_cache(self) -> DynamicCache:
        """An empty cache for what the model itself writes."""
        return DynamicCache(config=self.config)

    def fresh_cache(self, inputs: dict[str, Any] | None = None) -> Cache:
        """An empty cache, with room for an encoder's states where `inputs` hold some."""
        return self._with_encoder(self.own_cache(), inputs)

    def whole_cache(self, inputs: dict[str, Any] | None = None) -> Cache:
        """One whose sliding layers keep every position: then any number of tokens can be taken back.

        Up to transformers 5.17 a sliding layer that remembers the past can be read once only before it is cropped.
        """
        cache = self.own_cache()
        cache.layers = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers
        ]
        return self._with_encoder(cache, inputs)

    def _with_encoder(self, cache: Cache, inputs: dict[str, Any] | None) -> Cache:
        has_encoder = self.is_encoder_decoder or (inputs or {}).get("encoder_outputs") is not None
        return EncoderDecoderCache(cache, self.own_cache()) if has_encoder else cache

    def is_users(self, cache: Cache) -> bool:
        """Whether the caller of `generate()` passed this cache in, and so expects to find it filled afterwards."""
        return getattr(cache, "_is_user_defined", False)

    def pad_token_id(self, generation_config: Any) -> int:
        """What fills a row behind its end, as `generate()` has prepared it: without one given the first end of
        sequence. 0 where there is none of either, and only a criterion can have ended the row.
        """
        token = generation_config._pad_token_tensor
        return 0 if token is None else int(token)

    def prefill(self, input_ids: Tensor, generation_config: Any, inputs: dict[str, Any]) -> ModelOutput:
        """Run the prompts as plain `generate()` would, with logits of at least the last position."""
        if self.inner._supports_logits_to_keep():
            inputs = {"logits_to_keep": 1} | inputs
        return self.inner._prefill(input_ids, generation_config, inputs)

    def compiled(self, config: Any) -> Callable[..., ModelOutput]:
        """The forward pass, compiled where transformers would compile it for a static cache; on a CPU, where that may
        take minutes, only if the call has a `compile_config`.
        """
        if config.disable_compile or (self.device.type == "cpu" and config.compile_config is None):
            return self.model
        return self.inner.get_compiled_call(config.compile_config)

    def step(self, text: Tensor, num_new: int, inputs: dict[str, Any]) -> ModelOutput:
        """Run the last `num_new` tokens of `text` [1, columns] over the cache in `inputs`, which are the prompt's."""
        inputs = extended(inputs, text.shape[1], self.is_encoder_decoder)
        inputs.pop("logits_to_keep", None)  # all are wanted now
        prepared = self.inner.prepare_inputs_for_generation(
            text, next_sequence_length=num_new, is_first_iteration=False, **inputs
        )
        prepared.pop("logits_to_keep", None)  # some models ask for the last alone
        return self.model(**prepared)

    def replay(self, text: Tensor, inputs: dict[str, Any]) -> ModelOutput:
        """Run all of `text` [R, columns] at once, without a cache, with the prompts' `inputs`."""
        inputs = extended(inputs, text.shape[1], self.is_encoder_decoder) | {self.cache_name: None, "use_cache": False}
        inputs.pop("logits_to_keep", None)
        prepared = self.inner.prepare_inputs_for_generation(text, is_first_iteration=True, **inputs)
        prepared.pop("logits_to_keep", None)
        return self.model(**prepared)

    def candidate_generator(
        self,
        draft: Host | None,
        input_ids: Tensor,
        processors: Any,
        config: Any,
        inputs: dict[str, Any],
    ) -> Any:
        """A new candidate generator of transformers, which reads this target's states."""
        return self.inner._get_candidate_generator(
            generation_config=config,
            input_ids=input_ids,
            inputs_tensor=None,
            logits_processor=processors,
            model_kwargs=inputs,
            assistant_model=None if draft is None else draft.inner,
        )

    def retokenising_generator(self, input_ids: Tensor, config: Any, tokenizers: tuple[Any, Any]) -> Any:
        """A new candidate generator for which this model drafts text in a tokenizer of its own (the second one)."""
        # Ids of the call's config are the target's, and its stop strings would want a tokenizer
        settings = {name: getattr(config, name) for name in ("do_sample", "temperature", "top_k", "top_p")}
        own = GenerationConfig(**settings, max_length=config.max_length, min_length=0)
        tokenizer, own_tokenizer = tokenizers
        return AssistedCandidateGeneratorDifferentTokenizers(
            input_ids, self.inner, tokenizer, own_tokenizer, own, model_kwargs={}
        )

    def encoded(self, source: Tensor, attention_mask: Tensor | None) -> ModelOutput:
        """What the model's encoder makes of ids, pixels or sound."""
        encoder = self.inner.get_encoder()
        inputs = {encoder.main_input_name: source}
        if attention_mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters:
            inputs["attention_mask"] = attention_mask
        return encoder(**inputs, return_dict=True)

    def serves_states_to(self, draft: Host | None, config: Any) -> bool:
        """Whether transformers drafts by a generator that reads this target's states."""
        options = (getattr(config, name, None) for name in ("use_mtp", "speculation_type"))
        kind = "" if draft is None else draft.name
        return any(options) or kind.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant"))


def split_by_row(processor: Any, num_rows: int) -> Any:
    """The same; for a `prefix_allowed_tokens_fn` one a row, so that what one row's drafts raise is its own affair."""
    if type(processor) is not PrefixConstrainedLogitsProcessor:
        return processor

    def of_row(row: int) -> PrefixConstrainedLogitsProcessor:
        function, number = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        return PrefixConstrainedLogitsProcessor(lambda _, text: function(number, text), 1)

    return RowProcessors([of_row(row) for row in range(num_rows)])


def stock_verification(draft_tokens: Tensor, draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """
    What transformers does with one sequence's block, for comparisons: the tokens it goes on with, and how many of the
    drafts are among them.

    Args:
        draft_tokens (`torch.Tensor` of shape `[1, m]`): the drafts.
        draft_logits (`torch.Tensor` of shape `[1, m, V]`): the draft's.
        target_logits (`torch.Tensor` of shape `[1, m + 1, V]`): the target's.
    """
    arguments = (draft_tokens, draft_logits, draft_tokens.shape[1], target_logits)
    is_older = "is_done_candidate" in inspect.signature(_speculative_sampling).parameters  # transformers 5.17
    return _speculative_sampling(*arguments, *[False] * is_older)
