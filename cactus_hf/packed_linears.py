"""Puts packed layers into a model, and takes them out again."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar, cast

import torch
from torch import nn

from .packed_layers import HalfLinear, PackedLinear, missing_fbgemm


Model = TypeVar("Model", bound=nn.Module)


def pack_linears(model: Model, weight_dtype: torch.dtype | None = None) -> Model:
    """
    Lets oneDNN compute the linear layers of a model on the CPU, at nearly the same cost for 1 and for 10 tokens; or
    FBGEMM, from weights in float16, which for few tokens takes about half as long.

    For plain decoding as for targets and drafts. By default results differ from the ordinary layers' by rounding
    alone. Weights are rearranged, not copied; those that a layer shares with others (as a head does with the
    embedding) stay where they are. Gradients and autocast find the ordinary product; `torch.compile` leaves these
    layers out. [`unpack_linears`] undoes it.

    Args:
        model (`torch.nn.Module`):
            Changed in place: its float32 layers of class `nn.Linear`, and its bfloat16 ones where the CPU has
            instructions for them. Other precisions and classes (GPT-2's `Conv1D`, experts kept in one tensor,
            quantised layers) stay as they are. A wrapper may be around it.
        weight_dtype (`torch.dtype`, *optional*):
            `torch.float16` rounds the weights of the float32 layers to it, packed ones too, for good: float32 weights
            are not kept, but where others share them. Layers take and give float32 as before, and add up in it. It
            changes the law of the model by that rounding; a draft's law may be any. Weights of layers packed so stay
            as they are in a call without `weight_dtype`.

    Returns:
        The model given.

    Raises:
        ValueError: if there is no layer that could be packed, or if weights are beyond float16's range.
        TypeError: if `model` is no module.
    """
    if weight_dtype not in (None, torch.float16):
        raise ValueError(
            f"`weight_dtype` must be torch.float16, or left out to keep the weights' own, got {weight_dtype!r}."
        )
    kind, packs = (PackedLinear, [nn.Linear]) if weight_dtype is None else (HalfLinear, [nn.Linear, PackedLinear])
    modules = _modules(model, "pack_linears")
    layers = {name: each for name, each in modules.items() if type(each) in packs}
    fitting = {name: layer for name, layer in layers.items() if _fits(layer, kind)}
    if not fitting and not any(isinstance(each, kind) for each in modules.values()):
        reason = _reason(list(layers.values()), kind)
        raise ValueError(f"`pack_linears` found nothing to pack in this {type(model).__name__}: {reason}")
    if kind is HalfLinear:
        _check_range(fitting)
    num_readers = Counter(id(p) for each in modules.values() for p in each._parameters.values() if p is not None)
    for layer in fitting.values():
        is_shared = num_readers[id(layer.weight)] > 1
        if isinstance(layer, PackedLinear):
            layer.unpack()
        layer.__class__ = kind
        cast(PackedLinear, layer).pack(is_shared)
    return model


def unpack_linears(model: Model) -> Model:
    """Undoes [`pack_linears`]: the layers of the model given, which it returns, are ordinary ones with the weights of
    before, bit by bit; after `weight_dtype=torch.float16` with the rounded ones, in float32.

    Raises:
        TypeError: if `model` is no module.
    """
    for module in _modules(model, "unpack_linears").values():
        if isinstance(module, PackedLinear):
            module.unpack()
    return model


def _fits(layer: nn.Linear, kind: type[PackedLinear]) -> bool:
    weight, bias = layer.weight, layer.bias
    if "forward" in vars(layer):  # offloading by accelerate replaces it, and moves weights around
        return False
    # oneDNN would take a bias for contiguous that is not
    return kind.takes(weight) and (bias is None or (bias.dtype is weight.dtype and bias.is_contiguous()))


def _check_range(layers: dict[str, nn.Linear]) -> None:
    largest = torch.finfo(torch.float16).max  # FBGEMM would cut off at it, without a word
    beyond = {}
    for name, layer in layers.items():
        values = layer.values() if isinstance(layer, PackedLinear) else layer.weight
        size = float(values.detach().abs().max())
        if not size <= largest:  # NaN is not either
            beyond[name] = size
    if beyond:
        names = ", ".join(f"{name or 'the layer'} ({size:g})" for name, size in list(beyond.items())[:3])
        raise ValueError(
            f"float16 holds numbers up to {largest:g}, and the largest weights are beyond in {len(beyond)} of "
            f"{len(layers)} layers: {names}. Leave `weight_dtype` out."
        )


def _modules(model: Any, caller: str) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`{caller}` needs a model (a `torch.nn.Module`), got {type(model).__name__}.")
    return dict(model.named_modules())


def _reason(layers: list[nn.Linear], kind: type[PackedLinear]) -> str:
    if kind is HalfLinear and (missing := missing_fbgemm()):
        return f"{missing}."
    if kind is PackedLinear and not torch.backends.mkldnn.is_available():
        return f"torch {torch.__version__} was built without oneDNN."
    if any("forward" in vars(layer) for layer in layers):
        return "the `forward` of its linear layers was replaced, as accelerate does to offload weights."
    counted = Counter(f"{layer.weight.dtype} on {layer.weight.device}" for layer in layers)
    counts = ", ".join(f"{count} with {described}" for described, count in counted.items()) or "none"
    remedy = "It is for float32 layers on the CPU, and bfloat16 ones on a CPU that computes in it."
    if kind is HalfLinear:
        remedy = "`weight_dtype` is for float32 layers on the CPU: load the model in float32, or leave it out."
    return f"of its layers of class nn.Linear there are {counts}. {remedy}"
