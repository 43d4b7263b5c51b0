"""Runs the prompts through a model, and makes the cached model that the loop goes on with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import generation as hf

from .cached_model import CachedModel, CroppedModel, RaggedModel


if TYPE_CHECKING:
    from .generation import Host


MOST_COLUMNS = 2**31  # a `max_length` beyond it means "no limit", and need not fit an int64


def prefilled(
    host: Host,
    input_ids: Tensor,
    padding: Tensor,
    config: hf.GenerationConfig,
    inputs: dict[str, Any],
    is_returned: bool = False,
) -> tuple[Tensor, CachedModel]:
    """Logits [R, V] behind the prompts, and the model holding them."""
    num_rows, num_columns = input_ids.shape
    cache = inputs.get(host.cache_name)
    is_ragged = host.is_ragged and (host.is_tested or num_rows > 1)
    if cache is None or not (is_ragged or host.is_users(cache)):
        cache = host.fresh_cache() if is_ragged else host.whole_cache()
    if not (is_ragged and host.is_tested):
        cache.activate_past_recording()  # sliding layers keep all: to be cropped, or for `is_faithful` to look back
    logits, cache = host.prefill(input_ids, config, inputs | {host.cache_name: cache, "use_cache": True})
    if not is_ragged:
        return logits, CroppedModel(host, cache, inputs.get("attention_mask"), int(padding[0]), num_columns)
    model = RaggedModel(host, cache, padding, num_columns, min(config.max_length, MOST_COLUMNS), is_returned)
    if not host.is_tested and not model.is_faithful(input_ids[:, -1:], logits):
        raise ValueError(
            f"{host.name} does not give rows of different lengths the logits they have alone, so it can be verified "
            "one row at a time only: call `generate()` row by row."
        )
    return logits, model
