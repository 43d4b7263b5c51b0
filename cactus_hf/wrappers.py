"""What others put around a model or into it: PEFT, accelerate, `torch.compile`, data parallelism, subclasses."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer


if TYPE_CHECKING:
    from .host import Host


def unwrapped(model: Any, kind: type = GenerationMixin) -> Any:
    """The transformers model inside PEFT, `torch.compile` and data-parallel wrappers."""
    inner = model
    while not isinstance(inner, kind):
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            raise TypeError(
                f"`cactus_hf.enable` needs a transformers model that can `generate()`, such as an "
                f"`AutoModelForCausalLM`; got {type(model).__name__}."
            )
    return inner


def execution_device(model: Any) -> torch.device:
    """Where a model's forward pass runs. Weights that accelerate offloaded lie on "meta", which is nowhere."""
    if model.device.type == "meta":
        for module in model.modules():
            device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if device is not None:
                return torch.device(device)
    return model.device


def check_surroundings(role: str, host: Host) -> None:
    """Raises `ValueError` for a "target" or "draft" that others have changed so that the loop cannot run it."""
    who = f"The {role}, {host.name},"
    if host.device.type == "meta":
        raise ValueError(
            f"{who} has its weights on the meta device, which is nowhere: load it with `device_map`. (A pipeline that "
            "is given a draft by name moves it to `model.device`, which is meta for an offloaded model: pass the "
            "loaded draft.)"
        )
    if unnamed := _unnamed_arguments(host):
        raise ValueError(
            f"{who} has a `forward` that does not name {', '.join(unnamed)}, which the one that it overrides takes: "
            "add them to its signature, which `generate()` reads."
        )
    if _drops_cache(host.inner):
        raise ValueError(
            f"{who} is in train mode with gradient checkpointing, where the installed transformers uses no cache: "
            "call `.eval()` on it first."
        )
    if _uses_virtual_tokens(host):
        raise ValueError(
            f"{who} has a PEFT adapter of virtual tokens (prompt or prefix tuning), which `cactus_delta`, "
            "`cactus_kl` and `acceptance_rule` do not support: take one that changes layers, such as LoRA, or "
            "generate inside `with model.disable_adapter():`."
        )
    if _remove_row_adapters(host.inner):
        raise ValueError(
            f"PEFT applies adapters of the {role}, {host.name}, to some rows or tokens only (`adapter_names`, aLoRA), "
            "which `cactus_delta`, `cactus_kl` and `acceptance_rule` do not support: call `set_adapter()` and "
            "`generate()` once for each adapter."
        )


def _unnamed_arguments(host: Host) -> list[str]:
    owners = [vars(cls)["forward"] for cls in type(host.inner).__mro__ if "forward" in vars(cls)]
    known = {name for forward in owners for name in inspect.signature(forward).parameters}
    names = ("attention_mask", "position_ids", host.cache_name)
    return [name for name in names if name in known and not host.takes(name)]


def _drops_cache(model: nn.Module) -> bool:
    # In train mode with gradient checkpointing layers do so in transformers 5.17, where their `__call__` sees to it;
    # in 5.24 only where a gradient is asked for, which `generate()` does not
    return "__call__" in vars(GradientCheckpointingLayer) and any(
        module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )


def _uses_virtual_tokens(host: Host) -> bool:
    # While such a target generates, its model prepares inputs by a method of the PEFT model around it
    around = getattr(getattr(host.inner, "prepare_inputs_for_generation", None), "__self__", None)
    configs = (getattr(each, "active_peft_config", None) for each in (host.model, around))
    return any(getattr(config, "is_prompt_learning", False) for config in configs)


def _remove_row_adapters(model: nn.Module) -> bool:
    """Takes off the hooks by which PEFT applies adapters to some rows or tokens of one call; whether there were any.

    PEFT leaves them on a model whose call fails, and so in force for the next one.
    """
    found = [
        (module, key)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if {"adapter_names", "alora_offsets"} & getattr(hook, "keywords", {}).keys()
    ]
    for module, key in found:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    return bool(found)
