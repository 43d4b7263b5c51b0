"""The door into `generate()`.

`enable` gives a model a subclass of its own class whose overridden methods take our keywords off, check them, and run
our loop where stock transformers would run assisted decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from .config import CONFIG_KEYWORDS, KEYWORDS, SpeculationOptions, make_options
from .early_exit import check_early_exit, first_layers
from .host import METHODS, OPTIONS, Host, keep_unknown_options, split_by_row
from .session import speculate
from .sources import Sources
from .validation import check_mode, check_models
from .wrappers import check_surroundings, unwrapped


Model = TypeVar("Model")


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
    if options is None:
        return stock(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
    processors = [split_by_row(processor, len(input_ids)) for processor in logits_processor]
    prepared = (input_ids, processors, stopping_criteria, generation_config)
    draft = kwargs.pop("assistant_model", None)
    try:
        return speculate(Host(model), _draft_host(model, draft, generation_config), options, *prepared, **kwargs)
    finally:
        if draft is not None and stock_class(type(model)).__name__.startswith("Whisper"):
            # Whisper's own `generate()` leaves this behind on a draft, for stock assisted generation
            vars(unwrapped(draft).generation_config).pop("force_unique_generate_call", None)


def save_pretrained(stock: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets a `cactus_delta` on the generation config survive saving and loading, and `speculation_costs`."""
    config = getattr(model, "generation_config", None)
    if config is not None and any(getattr(config, name, None) is not None for name in CONFIG_KEYWORDS):
        keep_unknown_options(config)
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


# Methods of transformers' own classes, and what `enable` puts around them
HOSTED: tuple[tuple[type, str, Callable], ...] = tuple(
    (*METHODS[function.__name__], function)
    for function in (
        prepare_generation_config,
        validate_generation_mode,
        assisted_decoding,
        generate_batch,
        save_pretrained,
    )
)


class SpeculativeMixin:
    """Put before a model's own class by `enable`; it has the methods of `HOSTED`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Protocol 1 alone does not insist on our class. No `__deepcopy__` instead: wrappers hand the names that they
        # lack to the model inside, so that copying a wrapper would copy that model only.
        rebuild, args, *state = cast(tuple, super().__reduce_ex__(1))
        return _Rebuild(rebuild), tuple(stock_class(a) if a is type(self) else a for a in args), *state


def _overriding(name: str, function: Callable, stock: Callable) -> Callable:
    @functools.wraps(stock)  # `generate()` looks at the signature
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(getattr(super(SpeculativeMixin, self), name), self, *args, **kwargs)

    return method


for _owner, _name, _function in HOSTED:
    setattr(SpeculativeMixin, _name, _overriding(_name, _function, getattr(_owner, _name)))


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
    Lets `model.generate(assistant_model=draft, ...)` take `cactus_delta`, `cactus_kl` and `acceptance_rule`.

    Without one of these, `generate()` remains transformers' own. Enabling twice is harmless; [`disable`] undoes it.

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
        inner.__class__ = _enabled_class(cast(Hashable, stock_class(type(inner))))
    return model


def disable(model: Model | None = None) -> Model | None:
    """Undoes [`enable`] for the model given, which it returns; without a model undoes `enable()` for the process.

    Calls that are running should end first: one that has only begun goes on as transformers' own.
    """
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
