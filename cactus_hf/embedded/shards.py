"""Distillation data on disk: numbered safetensors files of conversations with the target's final hidden states.

The hidden state (after the final norm) takes 2 bytes x hidden size a token and gives the whole law back by one matrix
product, where stored logits would take 85 times as much.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .self_prompting import ANSWER, Sample


def write_shard(path: Path, samples: Iterable[Sample]) -> int:
    """Writes the conversations (all or nothing) and returns the number of tokens."""
    samples = list(samples)
    if not samples:
        raise ValueError("No conversation reached its answer in this wave. Give it more slots or shorter questions.")
    tensors = {
        "tokens": torch.cat([s.tokens for s in samples]).int(),
        "kinds": torch.cat([s.kinds for s in samples]),
        "hidden": torch.cat([s.hidden for s in samples]),
        "lengths": torch.tensor([len(s.tokens) for s in samples]),
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(tensors, temporary)
    temporary.replace(path)
    return len(tensors["tokens"])


def read_shard(path: Path) -> list[Sample]:
    """The conversations of one shard."""
    tensors = load_file(path)
    columns = (tensors[name].split(tensors["lengths"].tolist()) for name in ("tokens", "kinds", "hidden"))
    parts = zip(*columns, strict=True)
    return [Sample(tokens.long(), kinds, hidden) for tokens, kinds, hidden in parts]


def rank_ids(paths: Iterable[Path], head: Tensor, temperature: float) -> Tensor:
    """All token ids (int64 [V]), the likeliest in the target's answers first.

    The target's mass over the answers alone overrates the ids of these answers: 8,192 ids held 98.7 % of the mass they
    were chosen on and 93.6 % of that on other answers. So how often an id occurs in all of the text counts as well,
    and, for ids that never occur, that a byte-pair vocabulary is ordered from frequent to rare.
    """
    head = head.bfloat16()
    mass, count = (torch.zeros(len(head), dtype=torch.float64) for _ in range(2))
    for path in paths:
        samples = read_shard(path)
        count += torch.cat([sample.tokens for sample in samples]).bincount(minlength=len(head))
        for sample in samples[::5]:  # neighbours say little new; a fifth ranks well enough
            hidden = sample.hidden[sample.kinds == ANSWER]
            mass += (hidden.bfloat16() @ head.T).float().div_(temperature).softmax(-1).sum(0)
    order = 1 / (torch.arange(len(head), dtype=torch.float64) + 300)
    score = mass / mass.sum() + 0.3 * count / count.sum() + 0.01 * order / order.sum()
    return score.argsort(descending=True)


class Batch(NamedTuple):
    """Right-padded conversations, prefix included. Letters: B rows, T length."""

    tokens: Tensor  # int64 [B, T]
    weights: Tensor  # float32 [B, T], 0 where nothing is learnt
    hidden: Tensor  # float16 [B, T, H]


def collate(samples: list[Sample], prefix: list[int], kind_weights: Tensor, pad: int) -> Batch:
    """Pads conversations into one batch; a position is weighted by the kind of the token that follows it."""
    width = len(prefix) + max(len(s.tokens) for s in samples)
    tokens = torch.full((len(samples), width), pad)
    weights = torch.zeros(len(samples), width)
    hidden = torch.zeros(len(samples), width, samples[0].hidden.shape[1], dtype=torch.float16)
    for row, sample in enumerate(samples):
        first, end = len(prefix), len(prefix) + len(sample.tokens)
        tokens[row, :first] = torch.tensor(prefix)
        tokens[row, first:end] = sample.tokens
        weights[row, first : end - 1] = kind_weights[sample.kinds[1:].long()]
        hidden[row, first:end] = sample.hidden
    return Batch(tokens, weights, hidden)
