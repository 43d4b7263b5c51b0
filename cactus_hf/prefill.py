"""Runs the prompts through a model, and makes the cached model that the loop goes on with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import generation as hf
from transformers.utils import ModelOutput

from .cached_model import CachedModel, CroppedModel, RaggedModel
from .compiled import MOST_COLUMNS, CompiledModel
from .ragged_cache import UnequalRowsError
from .ranks import ALONE, Ranks
from .recurrent import ReplayedModel


if TYPE_CHECKING:
    from .host import Host


# Beside these, a model may look at something that `RaggedModel` does not pass on
TEXT_INPUTS = ("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep")
# Inputs with one value a token of the prompts
SEQUENCES = (
    "attention_mask",
    "decoder_attention_mask",
    "position_ids",
    "decoder_position_ids",
    "token_type_ids",
    "mm_token_type_ids",
)


class Prompts(NamedTuple):
    """What a model reads before it is to go on."""

    input_ids: Tensor  # [R, P], of the decoder if there is an encoder
    padding: Tensor  # [R] on the CPU, padded columns on the left
    inputs: dict[str, Any]  # what else the forward pass takes
    encoder_input: Tensor | None = None  # what `generate()` gave the target's encoder

    def row(self, index: int) -> Prompts:
        """One row alone, without its padding."""
        first, select = int(self.padding[index]), functools.partial(_row, index=index, num_rows=len(self.input_ids))
        inputs = {name: select(value) for name, value in self.inputs.items()}
        for name in SEQUENCES:
            if inputs.get(name) is not None and first > 0:
                inputs[name] = inputs[name][..., first:]
        return Prompts(
            self.input_ids[index : index + 1, first:],
            torch.zeros(1, dtype=torch.long),
            inputs,
            select(self.encoder_input),
        )

    def check_separable(self) -> None:
        """Raises `ValueError` for inputs of several rows of which it is not known what belongs to which row."""
        known = SEQUENCES + ("use_cache", "logits_to_keep", "encoder_outputs")
        given = {name for name, value in self.inputs.items() if value is not None and value != {}}
        others = sorted(given - set(known))
        if others:
            raise ValueError(
                f"This model takes one row at a time, and {', '.join(f'`{name}`' for name in others)} cannot be split "
                f"into the {len(self.input_ids)} rows given. Call `generate()` row by row. Attention implementations "
                '"sdpa" and "eager" serve batches with most models.'
            )


def _row(value: Any, index: int, num_rows: int) -> Any:
    if isinstance(value, Tensor):  # positions may have one row for all, or planes in front of the rows
        if value.dim() == 3 and value.shape[0] != num_rows and value.shape[1] == num_rows:
            return value[:, index : index + 1]
        return value[index : index + 1] if value.shape[0] == num_rows else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _row(each, index, num_rows) for name, each in value.items()})
    return value


def prefilled(
    host: Host,
    prompts: Prompts,
    config: hf.GenerationConfig,
    is_returned: bool = False,
    watched: dict[str, Any] | None = None,
    context: int | None = None,
    ranks: Ranks = ALONE,
    before: CachedModel | None = None,
) -> tuple[Tensor, CachedModel]:
    """Run the prompts as plain `generate()` would.

    Args:
        is_returned (`bool`): whether the caller will want the cache.
        watched (`dict`, *optional*): options of the forward pass, if the one row's model is to keep its outputs.
        context (`int`, *optional*): most tokens a row may come to have, if not the config's `max_length` columns.
        ranks (`Ranks`): the processes that make the same passes, which choose the same kind of cached model.
        before (`CachedModel`, *optional*): what held the rows before, if they are read again. That takes one pass, as
            no other process knows when it happens.

    Returns:
        Logits [R, V] behind the prompts, and the model holding them.
    """
    input_ids, padding, inputs, _ = prompts
    num_rows, num_columns = input_ids.shape
    # An empty dictionary is what multimodal models are given for a prompt of text alone
    others = (value for name, value in inputs.items() if name not in TEXT_INPUTS)
    is_trusted = host.is_tested and all(value is None or value == {} for value in others)
    if before is not None:
        is_trusted, ranks = is_trusted or isinstance(before, RaggedModel), ALONE
    is_trusted = not ranks.most(not is_trusted)
    is_ragged = host.is_ragged and watched is None and (is_trusted or ranks.most(num_rows) > 1)
    cache = inputs.get(host.cache_name)
    if cache is None:
        cache = host.fresh_cache(inputs) if is_ragged else host.whole_cache(inputs)
    if not (is_ragged and is_trusted) and not host.is_replayed:
        cache.activate_past_recording()  # sliding layers keep all: to be cropped, or for `is_faithful` to look back
    inputs = inputs | {host.cache_name: cache, "use_cache": True}
    first = host.prefill(input_ids, config, inputs | (watched or {}))
    logits, cache = first.logits[:, -1], first[host.cache_name]
    if not is_ragged:
        kept = None if watched is None else first
        kind = ReplayedModel if host.is_replayed else CroppedModel
        row = kind(host, cache, input_ids, inputs | (watched or {}), int(padding[0]), kept)
        # A cache of the caller's may have forgotten what was before its last token, and synced ranks make equal passes
        is_tried = not (host.is_tested or host.is_encoder_decoder or host.is_users(cache) or ranks.is_synced)
        is_tried = is_tried and before is None and watched is None and not host.is_replayed
        if is_tried and not row.is_faithful(logits):
            raise ValueError(
                f"{host.name} does not give tokens that were taken back and scored again the logits they had, so "
                "drafts cannot be verified: use another model."
            )
        return logits, row
    longest = min(config.max_length, MOST_COLUMNS) - padding if context is None else torch.full_like(padding, context)
    position_ids = inputs.get("position_ids")
    ragged: Callable[..., RaggedModel] = RaggedModel
    if config.cache_implementation == "static":
        ragged = functools.partial(CompiledModel, host.compiled(config))
    model = ragged(
        host, cache, padding, num_columns, position_ids, longest=longest, is_returned=is_returned, ranks=ranks
    )
    if not is_trusted and ranks.some(not model.is_faithful(input_ids[:, -1:], logits)):
        raise UnequalRowsError(host.name)
    return logits, model
