"""Lets any model's `generate()` take `cactus_delta`, `cactus_kl` and `acceptance_rule`, without `cactus_hf.enable`."""

import copy
from typing import Any

from transformers import GenerationMixin

import cactus_hf


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """
    `model.generate(...)` as an enabled model runs it.

    Args:
        model (`PreTrainedModel`):
            The target; left as it is. Weights and generation config are its own, not copies.
        args, kwargs:
            Those of `generate()`, `cactus_delta`, `cactus_kl`, `cactus_kl_total`, `acceptance_rule`, `generator`,
            `speculation_kl` and `speculation_costs` included.

    Returns:
        What `generate()` returns; see the documentation of cactus_hf.
    """
    # A shallow copy, and not the model itself for a while: other threads may be generating with it
    enabled = cactus_hf.enable(copy.copy(model))
    # A model loaded from a repository with this file has it as its `generate`, and may have another one in its class.
    # Otherwise that one has run already, and called this.
    owner = type(enabled) if "generate" in vars(model) else GenerationMixin
    return owner.generate(enabled, *args, **kwargs)
