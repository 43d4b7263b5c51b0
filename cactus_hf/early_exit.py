"""The first layers of a model as a draft for the whole of it, as transformers' `assistant_early_exit`."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import DynamicCache

from .parameters import is_integer


def check_early_exit(model: Any, num_layers: Any) -> None:
    """Raises `TypeError` or `ValueError` unless `model` can be cut to its first `num_layers` layers."""
    if not is_integer(num_layers):
        raise TypeError(f"`assistant_early_exit` must be a number of layers, got {num_layers!r}.")
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or find_layers(model) is None:
        raise ValueError(
            f"`assistant_early_exit` needs a decoder-only model whose layers form one list, which {name} is not: take "
            "another draft with `assistant_model=` or `prompt_lookup_num_tokens=`."
        )
    if not 1 <= num_layers < config.num_hidden_layers:
        raise ValueError(
            f"`assistant_early_exit={num_layers}` is no draft for {name}, which has {config.num_hidden_layers} "
            f"layers: give a number from 1 to {config.num_hidden_layers - 1}."
        )
    if _has_attention(config) and not _has_attention(_shortened(config, num_layers)):
        raise ValueError(
            f"`assistant_early_exit={num_layers}` leaves {name} without a layer of attention: give a larger number."
        )


def first_layers(model: Any, num_layers: int) -> Any:
    """A model that ends after `num_layers` layers of `model`, with its head behind them.

    All parameters are shared. `model` and its configuration are left as they are, so both can be used in turn.
    """
    config = model.config.get_text_config(decoder=True)
    own_config = _shortened(config, num_layers)
    path = find_layers(model)
    assert path is not None  # `check_early_exit` has refused the model otherwise
    whole = _detached(model)
    # The modules inside go on with their own configuration, which some cut rows of embeddings by
    whole.config = own_config if model.config is config else _with(model.config, config, own_config)
    *parents, last = path.split(".")
    module = whole
    for name in parents:
        child = _detached(getattr(module, name))
        setattr(module, name, child)
        module = child
    setattr(module, last, getattr(module, last)[:num_layers])
    return whole


def find_layers(model: Any) -> str | None:
    """Where the list of the text model's layers is, if there is one: of that length, and in no other list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and not any(map(str.isdigit, name.split(".")))
    ]
    decoder = model.get_decoder()  # in some classes a head
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    inside = [name for name in lists if name.startswith(f"{prefix}." if prefix else "")]
    return min(inside or lists, key=lambda name: name.count("."), default=None)


def _has_attention(config: Any) -> bool:
    """Whether any layer is attention: then models ask its part of the cache how long the text is."""
    try:
        return DynamicCache(config=config).get_seq_length() == 0
    except ValueError:
        return False


def _shortened(config: Any, num_layers: int) -> Any:
    short = copy.copy(config)
    shared = getattr(config, "num_kv_shared_layers", None)  # the last layers, which read the states of earlier ones
    if shared:
        short.num_kv_shared_layers = max(0, shared - config.num_hidden_layers + num_layers)
    if vars(config).get("layer_types") is not None:
        short.layer_types = config.layer_types[:num_layers]
    short.num_hidden_layers = num_layers
    return short


def _with(config: Any, part: Any, other: Any) -> Any:
    """A copy of `config` that has `other` where it has `part`."""
    new = copy.copy(config)
    for name, value in vars(config).items():
        if value is part:
            setattr(new, name, other)
    return new


def _detached(module: Any) -> Any:
    """A shallow copy whose children can be replaced. It runs its class's own forward pass, where the original may have
    been given another one, made for that object: by hooks of accelerate, which the children keep, or by compilation.
    """
    new = copy.copy(module)
    new._modules = dict(module._modules)
    new.__dict__.pop("forward", None)
    return new
