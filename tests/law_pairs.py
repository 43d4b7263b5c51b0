"""Pairs of laws of a target and a draft, in float64: degenerate, random, and equal but for rounding."""

from __future__ import annotations

import math

import torch


DEGENERATE = {
    "equal": ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
    "equal up to rounding": ([0.2, 0.3, 0.5], [0.2 + 1e-16, 0.3, 0.5 - 1e-16]),
    "one-hot target in the draft's support": ([0.0, 1.0, 0.0], [0.3, 0.3, 0.4]),
    "one-hot target outside the draft's support": ([0.0, 1.0, 0.0], [0.5, 0.0, 0.5]),
    "one-hot draft": ([0.2, 0.3, 0.5], [0.0, 1.0, 0.0]),
    "one-hot draft outside the target's support": ([0.5, 0.0, 0.5], [0.0, 1.0, 0.0]),
    "one-hot both, equal": ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
    "one-hot both, different": ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]),
    "disjoint supports": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.4, 0.6]),
    "zeros in both": ([0.5, 0.5, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0]),
    "nearly one-hot target": ([1 - 2e-16, 2e-16, 0.0], [0.1, 0.4, 0.5]),
    "tiny target": ([1e-300, 1 - 1e-15, 1e-15], [0.9, 0.05, 0.05]),
    "tied ratios": ([0.1, 0.1, 0.4, 0.4], [0.3, 0.3, 0.2, 0.2]),
    "one token": ([1.0], [1.0]),
}


def random_pairs(num: int, vocab_size: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs from near uniform to near one-hot, the draft from near the target to unrelated, a third with zeros."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for i in range(num):
        sharpness = (0.3, 1.0, 3.0, 8.0)[i % 4]
        target = torch.randn(vocab_size, generator=generator, dtype=torch.float64) * sharpness
        noise = torch.randn(vocab_size, generator=generator, dtype=torch.float64) * sharpness
        mix = (1e-8, 0.1, 0.5, 1.0)[i // 4 % 4]
        draft = (1 - mix) * target + mix * noise
        if i % 3 == 0:
            target = target.masked_fill(torch.rand(vocab_size, generator=generator) < 0.3, -math.inf)
            draft = draft.masked_fill(torch.rand(vocab_size, generator=generator) < 0.3, -math.inf)
        if target.isfinite().any() and draft.isfinite().any():
            pairs.append((target.softmax(-1), draft.softmax(-1)))
    return pairs


def rounding_pairs(num: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Laws that differ by a unit in the last place here and there, so that residuals are sums of rounding errors."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(num):
        target = torch.rand(8, generator=generator, dtype=torch.float64)
        target /= target.sum()
        sign = torch.randint(-1, 2, (8,), generator=generator).double()
        pairs.append((target, target.nextafter(target + sign)))
    return pairs


PAIRS = [
    *rounding_pairs(30, seed=9),
    *((torch.tensor(q, dtype=torch.float64), torch.tensor(p, dtype=torch.float64)) for q, p in DEGENERATE.values()),
    *random_pairs(32, 8, seed=0),
    *random_pairs(16, 7, seed=1),
    *random_pairs(8, 2, seed=2),
]
