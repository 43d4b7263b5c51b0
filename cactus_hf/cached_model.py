"""A causal model together with the cache of its rows: scores tokens that follow what it has seen.

`RaggedModel` serves batches on the ragged cache. `CroppedModel` serves one row on transformers' own cache, for the
models and attention implementations that the ragged cache does not fit. The decoding loop cannot tell them apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .masks import attention_mask, patterns_of
from .model_inputs import position_offset
from .probabilities import widened
from .ragged_cache import RaggedCache, Slots
from .ranks import ALONE, Ranks


if TYPE_CHECKING:
    from .host import Host


MOST_AHEAD = 4096  # slots behind the longest row that `RaggedModel.is_faithful` looks at
TAKEN_BACK = 3  # tokens that `CroppedModel.is_faithful` scores again


class CachedModel(Protocol):
    def score(self, tokens: Tensor, first: Tensor) -> Tensor:
        """Logits [B, T, V] of `tokens` [B, T], the first of each row at position `first` [B] (on the CPU).

        All that the row held from that position on is forgotten: at most what was scored since it last was taken back,
        as sliding layers remember no more. They have the dtype that the model gives them.
        """
        ...

    def keep(self, index: Tensor) -> None:
        """Go on with the rows `index` (on the CPU) only."""
        ...

    def returned_cache(self, tokens: Tensor, first: Tensor, is_uneven: bool) -> Cache:
        """The cache in transformers' own form, up to the column before the last of the longest row.

        Args:
            tokens (`torch.Tensor` of shape [R, T]): the last columns of it; rows that ended early have pads there,
                which plain decoding reads too.
            first (`torch.Tensor` of shape [R], on the CPU): position of the first of them.
            is_uneven (`bool`): whether rows ended at different columns.
        """
        ...


class RaggedModel:
    """B rows of different lengths over a `RaggedCache`.

    Args:
        host (`Host`): the model.
        cache (`Cache`): transformers' cache, holding the prompts in `num_columns` columns.
        padding (`torch.Tensor` of shape [B], on the CPU): padded columns of each row.
        position_ids (`torch.Tensor`, *optional*): of the prompts, as the model took them.
        longest (`torch.Tensor` of shape [B], on the CPU): most tokens that each row may have.
        is_returned (`bool`): whether `returned_cache` will be asked for; then rows that leave are remembered.
        ranks (`Ranks`): the processes that make the same passes.
    """

    def __init__(
        self,
        host: Host,
        cache: Cache,
        padding: Tensor,
        num_columns: int,
        position_ids: Tensor | None = None,
        *,
        longest: Tensor,
        is_returned: bool,
        ranks: Ranks = ALONE,
    ):
        self.host, self.source, self.is_returned, self.ranks = host, cache, is_returned, ranks
        # A cache of the user's stays whole until the call has succeeded
        self.cache = RaggedCache.from_prefilled(cache, padding, num_columns, is_emptied=not host.is_users(cache))
        self.patterns = patterns_of(host.config)
        self.is_additive = host.attention == "eager"
        self.dtype = host.dtype  # floating, whatever weights are quantised
        self.takes_positions = host.takes("position_ids")
        self.last_slot = num_columns - 1 - padding  # [B] on the CPU, of the prompts
        # Rows with fewer drafts than others are filled up; learned positions must not be asked for more than exist
        self._bound(longest - 1)
        self.offset = position_offset(position_ids, num_columns - padding)  # [..., B] on the CPU
        self.whole = self.last_position, self.offset  # of all rows

    def score(self, tokens: Tensor, first: Tensor) -> Tensor:
        return self._score_at(tokens, Slots.from_host(first, tokens.shape[1], tokens.device))

    def is_faithful(self, last_tokens: Tensor, logits: Tensor) -> bool:
        """Whether the model minds its rows' own lengths.

        Scores the prompts' last tokens `last_tokens` [B, 1] again, as if beside a row twice as far on as the call may
        come, and compares with the `logits` [B, V] that plain prefilling gave. (Twice, so that a window of the model's
        own, which rows may come to outgrow, hides more than a token or two.)

        A model that makes masks or positions of its own from the shape of the cache does not, and its configuration
        does not tell.
        """
        last = Slots.from_host(self.last_slot, 1, last_tokens.device)
        ahead = min(2 * (int(self.last_position.max()) - last.highest), MOST_AHEAD)
        again = self._score_at(last_tokens, last.beside_longer(ahead))[:, 0]
        return is_same_law(again, logits)

    def _score_at(self, tokens: Tensor, slots: Slots, forward: Callable[..., ModelOutput] | None = None) -> Tensor:
        """`forward` is the model's own unless given."""
        self.cache.place.slots = slots
        inputs = {
            "input_ids": tokens,
            "attention_mask": attention_mask(self.patterns, slots, self.dtype, self.is_additive),
            self.host.cache_name: self.cache,
            "use_cache": True,
        }
        if self.takes_positions:
            inputs["position_ids"] = self._positions(slots)
        return (forward or self.host.model)(**inputs).logits

    def _positions(self, slots: Slots) -> Tensor:
        """[B, T], or one such for each of the model's planes of positions."""
        positions = slots.positions
        if slots.width > self.shortest:
            positions = positions.clamp_max(self.last_position.to(positions.device)[:, None])
        return positions if self.offset is None else positions + self.offset.to(positions.device)[..., None]

    def _bound(self, last_position: Tensor) -> None:
        self.last_position = last_position  # [B] on the CPU
        self.shortest = int(last_position.min()) + 1  # positions that every row has

    def keep(self, index: Tensor) -> None:
        self.cache.keep(index, retire=self.is_returned)
        self._bound(self.last_position[index])
        if self.offset is not None and self.offset.shape[-1] > 1:
            self.offset = self.offset[..., index]

    def returned_cache(self, tokens: Tensor, first: Tensor, is_uneven: bool) -> Cache:
        # Rows that end in one round may do so at different columns, and none of them has left
        if self.ranks.most(bool(self.cache.retired) or is_uneven):
            self.cache.take_back()
            last_position, self.offset = self.whole
            self._bound(last_position)
            self.score(tokens, first)
        return self.cache.give_back(self.source, int(self.cache.padding[0] + first[0]) + tokens.shape[1])


class CroppedModel:
    """One row over transformers' own cache, rolled back by cropping it.

    Args:
        host (`Host`): the model.
        cache (`Cache`): holding the prompt, past recording activated before it was filled.
        prompt (`torch.Tensor` of shape [1, P]): token ids, of the decoder if there is an encoder.
        inputs (`dict`): what else the model took with the prompt.
        padding (`int`): padded columns.
        outputs (`ModelOutput`, *optional*): of the prompt, if the model's outputs are to be kept in `outputs`.
    """

    def __init__(
        self,
        host: Host,
        cache: Cache,
        prompt: Tensor,
        inputs: dict[str, Any],
        padding: int = 0,
        outputs: ModelOutput | None = None,
    ):
        self.host, self.source, self.text, self.inputs, self.padding = host, cache, prompt, inputs, padding
        # A cache of the user's keeps the prompt, and no drafts, until the call has succeeded
        self.cache = copy.deepcopy(cache) if host.is_users(cache) else cache
        self.outputs = outputs

    def is_faithful(self, logits: Tensor) -> bool:
        """Whether several tokens can be scored behind a cache, and taken back.

        Scores the prompt's last tokens again: one, then all of them. The first must not see those behind it, and the
        last must have the `logits` [1, V] that plain prefilling gave.
        """
        length = self.text.shape[1] - self.padding
        count = min(TAKEN_BACK, length - 1)
        if count == 0:
            return True
        tokens, first = self.text[:, -count:], torch.tensor([length - count])
        alone = self.score(tokens[:, :1], first)
        together = self.score(tokens, first)
        return is_same_law(together[:, 0], alone[:, 0]) and is_same_law(together[:, -1], logits)

    def score(self, tokens: Tensor, first: Tensor) -> Tensor:
        self._crop(int(first[0]) + self.padding)
        self.text = torch.cat([self.text, tokens], dim=1)
        outputs = self.host.step(self.text, tokens.shape[1], self.inputs | {self.host.cache_name: self.cache})
        if self.outputs is not None:
            self.outputs = outputs
        return outputs.logits

    def _crop(self, num_columns: int) -> None:
        # Cropping nothing is no idle call: it would trim sliding layers to their window, and what a later roll back
        # needs
        if num_columns < self.text.shape[1]:
            self.cache.crop(num_columns - self.text.shape[1])
            self.text = self.text[:, :num_columns]

    def keep(self, index: Tensor) -> None:
        """The one row stays until the call ends."""

    def returned_cache(self, tokens: Tensor, first: Tensor, is_uneven: bool) -> Cache:
        self._crop(int(first[0]) + self.padding + tokens.shape[1])
        vars(self.source).update(vars(self.cache))
        return self.source


def is_same_law(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits [B, V] agree up to rounding.

    Total variation of .1 is far above it, even in bfloat16, and far below that of another text's law.
    """
    law, expected_law = (widened(each).softmax(-1) for each in (logits, expected))
    return bool(((law - expected_law).abs().sum(-1) / 2 < 0.1).all())
