"""Laws of whole texts: three tokens of a vocabulary of 8, so 512 cells, for each of 4 prompts of different lengths.

A correct sampler fails a comparison of frequencies with probability `LEVEL` or less.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from rounds import round_law
from torch import Tensor
from transformers import PreTrainedModel

import tiny
from cactus_hf import AcceptanceRule


LEVEL = 1e-4
PROMPTS = tiny.ragged_prompts((1, 4, 7, 3), vocab=8)
Law = Callable[[list[int]], Tensor]  # probabilities [8] behind a text, prompt included


def frequencies(target: PreTrainedModel, num_calls: int, **options) -> Tensor:
    """Counts [4, 8, 8, 8] of the first three new tokens, from batches of 256 rows."""
    inputs = {name: value.repeat(64, 1) for name, value in PROMPTS.inputs.items()}
    options = {"do_sample": True, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, **options}
    counts = torch.zeros(4, 512)
    for _ in range(num_calls):
        tokens = target.generate(**inputs, **options)[:, -6:-3]
        cell = (tokens * torch.tensor([64, 8, 1])).sum(1).view(64, 4)
        counts += torch.stack([torch.bincount(cell[:, row], minlength=512) for row in range(4)])
    return counts.view(4, 8, 8, 8)


@torch.no_grad()
def law_of(model: PreTrainedModel) -> Law:
    return lambda text: model(torch.tensor([text])).logits[0, -1].softmax(-1)


@torch.no_grad()
def exact(target: Law, draft: Law, rule: AcceptanceRule, num_drafts: int) -> Tensor:
    """The law [4, 8, 8, 8] of the same tokens, from whole rounds enumerated in float64."""
    law = torch.zeros(4, 8, 8, 8, dtype=torch.float64)
    for row in range(4):
        prompt = PROMPTS.row(row).input_ids[0].tolist()
        laws = round_law(
            lambda text, prompt=prompt: target(prompt + list(text)).tolist(),
            lambda text, prompt=prompt: draft(prompt + list(text)).tolist(),
            rule,
            num_drafts,
            num_tokens=3,
        )
        for text, chance in laws.items():
            law[row][text] = chance
    return law


def assert_follows(counts: Tensor, law: Tensor) -> None:
    statistic = degrees = 0.0
    for observed, chances in zip(counts.flatten(1), law.flatten(1), strict=True):
        expected = chances * observed.sum()
        is_rare = expected < 5  # pooled into one cell
        cells = [
            (observed[~is_rare], expected[~is_rare]),
            (observed[is_rare].sum()[None], expected[is_rare].sum()[None]),
        ]
        for o, e in cells:
            o, e = o[e > 0], e[e > 0]
            statistic += float(((o - e) ** 2 / e).sum())
            degrees += len(e)
        degrees -= 1
    chance = torch.special.gammaincc(*torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64))
    assert chance > LEVEL


def assert_next_tokens_follow(target: PreTrainedModel, options: dict[str, Any]) -> None:
    """Vocabulary 8, delta 0: the second and the third token of 400 texts have the target's law.

    For sources that draft for one row at a time, whose texts are too slow for more. `options` say what drafts.
    """
    torch.manual_seed(7)
    tokens = target.generate(
        torch.tensor([[3, 5, 2, 6]]), **options, do_sample=True, cactus_delta=0.0, max_new_tokens=3, eos_token_id=None,
        pad_token_id=0, num_return_sequences=400,
    )  # fmt: skip
    texts = torch.tensor([[3, 5, 2, 6, first, second] for first, second in product(range(8), repeat=2)])
    with torch.no_grad():
        laws = target(texts).logits[:, 3:].double().softmax(-1).view(8, 8, 3, 8)
    joint = laws[0, 0, 0, :, None] * laws[:, 0, 1]  # of the first two tokens
    second, third = joint.sum(0), torch.einsum("ab,abc->c", joint, laws[:, :, 2])
    for column, law in ((5, second), (6, third)):
        counts, expected = torch.bincount(tokens[:, column], minlength=8).double(), 400 * law
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert expected.min() > 5
        assert torch.special.gammaincc(torch.tensor(3.5).double(), statistic / 2) > 1e-4
