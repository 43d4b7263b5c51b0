"""Drafts without a draft model: what followed the last few tokens where they stood earlier in the text.

Prompt lookup decoding (Saxena, 2023), as transformers' `prompt_lookup_num_tokens`. The drafts are no draws, so their
law is one-hot, and everything is done on the host's copy of the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .drafting import Drafts
from .sequences import Sequences


class PromptLookup:
    """
    Args:
        max_ngram (`int`): the longest run of last tokens to look for; shorter ones are tried where it is not found.
        vocab_size (`int`): the target's V. Ids beyond it, as image placeholders have, are never drafted.
    """

    def __init__(self, max_ngram: int, vocab_size: int):
        self.max_ngram, self.vocab_size = max_ngram, vocab_size

    def propose(self, sequences: Sequences, lengths: Tensor, uniforms: Tensor) -> Drafts:
        text, end = sequences.text[sequences.rows], sequences.length[sequences.rows]
        begin = latest_continuation(text, sequences.padding[sequences.rows], end, self.max_ngram)
        place = torch.arange(int(lengths.max()))
        columns = begin[:, None] + place
        tokens = text.gather(1, columns.clamp_max(text.shape[1] - 1))
        is_void = (columns >= end[:, None]) | (place >= lengths[:, None]) | (tokens >= self.vocab_size)
        found = (~is_void).long().cumprod(1).sum(1)
        tokens = tokens[:, : int(found.max())].masked_fill(is_void[:, : int(found.max())], 0)
        device = sequences.tokens.device
        sequences.write(0, tokens.to(device))
        return Drafts(tokens.to(device), None, found.to(device))

    def keep(self, index: Tensor) -> None:
        """There is nothing to keep: all there is to know stands in the text."""


def latest_continuation(text: Tensor, begin: Tensor, end: Tensor, max_ngram: int) -> Tensor:
    """Column [B] behind the latest earlier occurrence of the longest run of last tokens that has one; else `end`.

    Args:
        text (`torch.Tensor` of shape [B, columns])
        begin, end (`torch.Tensor` of shape [B]): each row's text lies at columns `begin` .. `end` - 1.
        max_ngram (`int`): the longest run to look for.
    """
    columns = torch.arange(text.shape[1])
    result = end.clone()
    matches = torch.ones_like(
        text, dtype=torch.bool
    )  # whether the run that ends at a column is that of the last tokens
    for ngram in range(1, max_ngram + 1):
        last = text.gather(1, (end - ngram).clamp_min(0)[:, None])
        earlier = torch.nn.functional.pad(text, (ngram - 1, 0))[:, : text.shape[1]]  # the token `ngram` - 1 before
        matches &= (earlier == last) & (columns - (ngram - 1) >= begin[:, None])
        at = torch.where(matches & (columns < end[:, None] - 1), columns, -1).amax(1)
        result = torch.where(at >= 0, at + 1, result)
    return result
