"""One row over a cache that cannot be cropped, as its states sum up the whole text before them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from .cached_model import CroppedModel


class ReplayedModel(CroppedModel):
    """Rolled back by putting the states of an earlier position back and reading on from there.

    States are saved before each block, so that a round with a rejection costs one more forward pass, over the tokens
    of the block that were kept. Keys and values are never changed in place, so they are not copied.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._save()

    def score(self, tokens: Tensor, first: Tensor) -> Tensor:
        self._crop(int(first[0]) + self.padding)
        if tokens.shape[1] > 1:  # single tokens are drafts, as a rule: they are read again from the start of the round
            self._save()
        return super().score(tokens, first)

    def _crop(self, num_columns: int) -> None:
        if num_columns >= self.text.shape[1]:
            return
        kept = self.text[:, self.saved_columns : num_columns]
        self.text = self.text[:, : self.saved_columns]
        for layer, states in zip(self.cache.layers, self.saved, strict=True):
            vars(layer).update(states)
        if kept.shape[1] > 0:
            super().score(kept, torch.tensor([self.saved_columns - self.padding]))
        self._save()

    def _save(self) -> None:
        self.saved = [_copied(layer) for layer in self.cache.layers]
        self.saved_columns = self.text.shape[1]


def _copied(layer: Any) -> dict[str, Any]:
    shared = ("keys", "values")
    return {name: value if name in shared else copy.deepcopy(value) for name, value in vars(layer).items()}
