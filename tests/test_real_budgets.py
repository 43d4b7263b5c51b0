"""Budgets on the rows of real models over real text: what is found is never exceeded.

`CACTUS_HF_TEST_POSITIONS=100000 pytest -s tests/test_real_budgets.py` looks at so many positions and prints what came
out. The text is CPython's own manual of the language, which every installation has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cactus_hf import Cactus, emitted_law
from cactus_hf.kl_budget import find_deltas_of_block


NUM_POSITIONS = int(os.environ.get("CACTUS_HF_TEST_POSITIONS", "256"))
WINDOW, CHUNK = 256, 32  # positions of a text, and of a search
BUDGETS = torch.tensor([1e-6, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0], dtype=torch.float64)
TOLERANCE = 1e-12  # nats: the laws are sums of 49,152 float64 numbers, in two orders
# The first one, on all 49,152 tokens, takes the longest
WARPERS = [
    [],
    *[
        [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.95)],
        [TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.95)],
        [TopKLogitsWarper(50)],
    ]
    * 3,
]


def blocks(real_pair) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [CHUNK, V] of target and draft behind real text, with and without truncation."""
    target, draft, tokenizer = real_pair
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    for number, begin in enumerate(range(0, len(ids) - WINDOW, WINDOW)):
        text = torch.tensor([ids[begin : begin + WINDOW]])
        with torch.no_grad():
            rows = [model(text).logits[0].float() for model in (target, draft)]
        for warper in WARPERS[number % len(WARPERS)]:
            rows = [warper(text, scores) for scores in rows]
        yield from zip(*(scores.split(CHUNK) for scores in rows), strict=True)


def divergence(target: Tensor, draft: Tensor, delta: Tensor) -> Tensor:
    """KL [CHUNK] by `emitted_law`, which shares no sum with the search."""
    is_left = ((target > -torch.inf) | (draft > -torch.inf)).any(0)
    target, draft = (scores[:, is_left].softmax(-1, dtype=torch.float64) for scores in (target, draft))
    law = emitted_law(target, draft, Cactus(delta))
    return (torch.xlogy(law, law) - torch.xlogy(law, target)).sum(-1)


def test_no_budget_is_exceeded(real_pair) -> None:
    count = num_found = 0
    largest_excess, least_use, spent = -torch.inf, 1.0, 0.0
    for target, draft in blocks(real_pair):
        budget = BUDGETS[torch.arange(count, count + CHUNK) % len(BUDGETS)]
        none = torch.zeros(CHUNK, 1, dtype=torch.float64)
        found = find_deltas_of_block(target[:, None], draft[:, None], Cactus(kl_budget=budget), none)
        kl = divergence(target, draft, found.delta[:, 0])
        assert (kl <= budget + TOLERANCE).all()
        torch.testing.assert_close(found.kl[:, 0], kl, rtol=1e-9, atol=TOLERANCE)
        is_found = found.delta[:, 0].isfinite()
        largest_excess = max(largest_excess, float((kl - budget).max()))
        least_use = min([least_use, *(kl / budget)[is_found].tolist()])
        count, num_found, spent = count + CHUNK, num_found + int(is_found.sum()), spent + float(kl.sum())
        if count % 8192 == 0:
            print(f"{count} positions, none above its budget; largest KL - budget {largest_excess:.2g}", flush=True)
        if count >= NUM_POSITIONS:
            break
    print(
        f"{count} positions, at {num_found} of them a finite delta; largest KL - budget {largest_excess:.2g} nats; "
        f"at finite deltas at least {least_use:.4f} of the budget is used; mean KL {spent / count:.4f}"
    )
    assert count >= NUM_POSITIONS and num_found > count // 2 and least_use > 0.95
