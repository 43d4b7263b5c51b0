"""The door into `generate()`, and the one module that names private parts of transformers.

`enable` gives a model a subclass of its own class whose three overridden methods take our keywords off, check them,
and run our loop where stock transformers would run assisted decoding. Checked with transformers 5.17 and 5.24.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import ModelOutput

from . import support
from .config import KEYWORDS, SpeculationOptions, make_options
from .early_exit import check_early_exit, first_layers
from .model_inputs import extended
from .ragged_cache import RaggedCache
from .session import speculate
from .sources import Sources
from .validation import check_mode, check_models
from .wrappers import check_surroundings, execution_device, unwrapped


Model = TypeVar("Model")

# The cache is `past_key_values` in transformers 5.17 and `cache` in 5.24
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
OPTIONS = "speculation_options"  # where our options travel on the generation config of one call


def prepare_generation_config(
    stock: Callable, model: Any, generation_config: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, dict]:
    """Takes our keywords off, and lets their meaning travel on the config of the call."""
    call = {name: kwargs.pop(name, None) for name in KEYWORDS}
    options = make_options(call | kwargs, [c for c in (generation_config, model.generation_config) if c is not None])
    if options is not None and options.is_explicit and kwargs.get("is_assistant"):
        raise ValueError("`is_assistant=True` is for drafts: leave it out of a call with a rule or `cactus_delta`.")
    if options is None:  # Whisper, and pipelines of transformers 5.17, prepare a config and hand it in again
        options = getattr(generation_config, OPTIONS, None)
    config, model_kwargs = stock(generation_config, *args, **kwargs)
    if not config.is_assistant:  # a draft that is enabled too drafts as any other
        setattr(config, OPTIONS, options)
    return config, model_kwargs


def validate_generation_mode(
    stock: Callable, model: Any, generation_mode: Any, generation_config: Any, call: dict[str, Any]
) -> None:
    """Checks a call of ours instead of refusing what stock assisted generation cannot do."""
    options: SpeculationOptions | None = getattr(generation_config, OPTIONS, None)
    is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
    if options is None or not (is_assisted or options.is_explicit):
        return stock(generation_mode, generation_config, call)
    draft = call.get("assistant_model") if is_assisted else None
    generation_config.use_cache = True  # some checkpoints say otherwise; a call that says so has been refused
    # Where the decoding method is a function of the user's, `generate()` hands on nothing else than its own arguments
    check_mode(generation_config, str(generation_mode.value), draft is not None, is_custom="synced_gpus" not in call)
    sources = Sources(Host(model), _draft_host(model, draft, generation_config), options, generation_config)
    for role, host in sources.hosts.items():
        check_surroundings(role, host)
    check_models(sources.hosts, (call.get("tokenizer"), call.get("assistant_tokenizer")))


def _draft_host(model: Any, draft: Any, config: Any) -> Host | None:
    if config.assistant_early_exit is not None:
        check_early_exit(model, config.assistant_early_exit)
        draft = first_layers(model, config.assistant_early_exit)
    return None if draft is None else Host(draft)


def assisted_decoding(
    stock: Callable,
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **kwargs: Any,
) -> Any:
    """Runs our loop where stock assisted decoding would run."""
    options = getattr(generation_config, OPTIONS, None)
    prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
    if options is None:
        return stock(*prepared, **kwargs)
    for name in ("tokenizer", "assistant_tokenizer"):  # of no use to the loop
        kwargs.pop(name, None)
    draft = kwargs.pop("assistant_model", None)
    try:
        return speculate(Host(model), _draft_host(model, draft, generation_config), options, *prepared, **kwargs)
    finally:
        if draft is not None and stock_class(type(model)).__name__.startswith("Whisper"):
            # Whisper's own `generate()` leaves this behind on a draft, for stock assisted generation
            vars(unwrapped(draft).generation_config).pop("force_unique_generate_call", None)


def save_pretrained(stock: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets a `cactus_delta` on the generation config survive saving and loading."""
    config = getattr(model, "generation_config", None)
    if config is not None and getattr(config, "cactus_delta", None) is not None:
        config._from_model_config = False  # or loading drops the keys that transformers does not know
    return stock(*args, **kwargs)


def generate_batch(stock: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses our keywords, which continuous batching would silently ignore, as it does all that it does not know."""
    given = [f"`{name}`" for name in KEYWORDS if kwargs.get(name) is not None]
    if given:
        raise ValueError(
            f"`generate_batch`, continuous batching, decodes without drafts: leave {' and '.join(given)} out, or call "
            "`generate()`."
        )
    return stock(*args, **kwargs)


# Methods of transformers' own classes, and what `enable()` puts around them for the whole process
HOSTED: tuple[tuple[type, str, Callable], ...] = (
    (GenerationMixin, "_prepare_generation_config", prepare_generation_config),
    (GenerationMixin, "_validate_generation_mode", validate_generation_mode),
    (GenerationMixin, "_assisted_decoding", assisted_decoding),
    (ContinuousMixin, "generate_batch", generate_batch),
    (PreTrainedModel, "save_pretrained", save_pretrained),
)


class SpeculativeMixin:
    """Put before a model's own class by `enable`."""

    generation_config: Any

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        return prepare_generation_config(super()._prepare_generation_config, self, *args, **kwargs)  # type: ignore[misc]

    def _validate_generation_mode(self, *args: Any) -> None:
        return validate_generation_mode(super()._validate_generation_mode, self, *args)  # type: ignore[misc]

    @functools.wraps(GenerationMixin._assisted_decoding)  # `generate()` looks at the signature
    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        return assisted_decoding(super()._assisted_decoding, self, *args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        return generate_batch(super().generate_batch, self, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        return save_pretrained(super().save_pretrained, self, *args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Protocol 1 alone does not insist on our class. No `__deepcopy__` instead: wrappers hand the names that they
        # lack to the model inside, so that copying a wrapper would copy that model only.
        rebuild, args, *state = cast(tuple, super().__reduce_ex__(1))
        return _Rebuild(rebuild), tuple(stock_class(a) if a is type(self) else a for a in args), *state


class _Rebuild:
    """Makes an enabled model for `copy`, but pickles as what makes a stock one, readable without this package."""

    def __init__(self, rebuild: Callable):
        self.rebuild = rebuild

    def __call__(self, *args: Any) -> Any:
        return enable(self.rebuild(*args))

    def __reduce__(self) -> tuple:
        return functools.partial, (self.rebuild,)


@functools.cache
def _enabled_class(cls: type) -> type:
    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (SpeculativeMixin, cls), body)


def stock_class(cls: type) -> type:
    """A model's class without what `enable` put before it."""
    if not issubclass(cls, SpeculativeMixin):
        return cls
    if cls.__bases__[0] is SpeculativeMixin:
        return cls.__bases__[1]
    # A class that FSDP, say, made of an enabled one
    return type(cls.__name__, tuple(map(stock_class, cls.__bases__)), dict(vars(cls)))


def enable(model: Model | None = None) -> Model | None:
    """
    Lets `model.generate(assistant_model=draft, ...)` take `cactus_delta` and `acceptance_rule`.

    Without one of the two, `generate()` remains transformers' own. Enabling twice is harmless; [`disable`] undoes it.

    Args:
        model (`PreTrainedModel`, *optional*):
            Changed in place; a wrapper (PEFT, `torch.compile`, data parallel) may be around it. Without a model, every
            transformers model of the process is enabled, those to come included.

    Returns:
        The model given.

    Raises:
        TypeError: if it is no transformers model that can generate.
    """
    if model is None:
        for owner, name, function in HOSTED:
            stock = getattr(owner, name)
            if not hasattr(stock, "cactus_hf_stock"):
                setattr(owner, name, _hosted(function, stock))
        return None
    inner = unwrapped(model)
    if not isinstance(inner, SpeculativeMixin):
        inner.__class__ = _enabled_class(cast(Hashable, type(inner)))
    return model


def disable(model: Model | None = None) -> Model | None:
    """Undoes [`enable`] for the model given, which it returns; without a model undoes `enable()` for the process."""
    if model is None:
        for owner, name, _ in HOSTED:
            method = getattr(owner, name)
            setattr(owner, name, getattr(method, "cactus_hf_stock", method))
        return None
    inner = unwrapped(model)
    inner.__class__ = stock_class(type(inner))
    return model


def _hosted(function: Callable, stock: Callable) -> Callable:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(functools.partial(stock, self), self, *args, **kwargs)

    method.cactus_hf_stock = stock  # type: ignore[attr-defined]
    return method


class Host:
    """What the loop needs of a transformers model."""

    cache_name = CACHE_NAME

    def __init__(self, model: Any):
        self.model = model
        self.inner = unwrapped(model, PreTrainedModel)  # a block drafter cannot `generate()`
        self.config = self.inner.config.get_text_config(decoder=True)

    @property
    def name(self) -> str:
        return stock_class(type(self.inner)).__name__

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
        """Whether states can be put back to an earlier token: there must be a cache, and not a recurrent one."""
        if self.inner._is_stateful or not self.inner._supports_default_dynamic_cache() or not self.takes(CACHE_NAME):
            return False
        return all(getattr(type(layer), "is_croppable", False) is True for layer in self.own_cache().layers)

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
    def device_mesh(self) -> Any:
        """The grid of processes that transformers spread the model over, a `DeviceMesh`; `None` if it did not."""
        return getattr(self.inner, "_device_mesh", None)

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
        can_be_plain = RaggedCache.can_hold(self.own_cache())
        return self._with_encoder(DynamicCache() if can_be_plain else DynamicCache(config=self.config), inputs)

    def _with_encoder(self, cache: Cache, inputs: dict[str, Any] | None) -> Cache:
        has_encoder = self.is_encoder_decoder or (inputs or {}).get("encoder_outputs") is not None
        return EncoderDecoderCache(cache, self.own_cache()) if has_encoder else cache

    def is_users(self, cache: Cache) -> bool:
        """Whether the caller of `generate()` passed this cache in, and so expects to find it filled afterwards."""
        return getattr(cache, "_is_user_defined", False)

    def prefill(self, input_ids: Tensor, generation_config: Any, inputs: dict[str, Any]) -> ModelOutput:
        """Run the prompts as plain `generate()` would, with logits of at least the last position."""
        if self.inner._supports_logits_to_keep():
            inputs = {"logits_to_keep": 1} | inputs
        return self.inner._prefill(input_ids, generation_config, inputs)

    def step(self, text: Tensor, num_new: int, inputs: dict[str, Any]) -> ModelOutput:
        """Run the last `num_new` tokens of `text` [1, columns] over the cache in `inputs`, which are the prompt's."""
        inputs = extended(inputs, text.shape[1], self.is_encoder_decoder)
        inputs.pop("logits_to_keep", None)  # all are wanted now
        prepared = self.inner.prepare_inputs_for_generation(
            text, next_sequence_length=num_new, is_first_iteration=False, **inputs
        )
        return self.model(**prepared)

    def replay(self, text: Tensor, inputs: dict[str, Any]) -> ModelOutput:
        """Run all of `text` [R, columns] at once, without a cache, with the prompts' `inputs`."""
        inputs = extended(inputs, text.shape[1], self.is_encoder_decoder) | {self.cache_name: None, "use_cache": False}
        inputs.pop("logits_to_keep", None)
        return self.model(**self.inner.prepare_inputs_for_generation(text, is_first_iteration=True, **inputs))

    def candidate_generator(
        self, draft: Host | None, input_ids: Tensor, processors: Any, config: Any, inputs: dict[str, Any]
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

    def encoded(self, inputs_tensor: Tensor, inputs: dict[str, Any], config: Any) -> dict[str, Any]:
        """The inputs of an encoder-decoder model from what an encoder reads, run through its encoder."""
        tensor, name, inputs = self.inner._prepare_model_inputs(inputs_tensor, config.bos_token_id, dict(inputs))
        return self.inner._maybe_prepare_encoder_kwargs_for_generation(tensor, inputs, name, config)

    def serves_states_to(self, draft: Host | None, config: Any) -> bool:
        """Whether transformers drafts by a generator that reads this target's states."""
        options = (getattr(config, name, None) for name in ("use_mtp", "speculation_type"))
        kind = "" if draft is None else draft.name
        return any(options) or kind.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant"))
