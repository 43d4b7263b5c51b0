"""Predictions held against what runs report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .result import Answer, Estimate, ratio_estimate, resamples
from .sampling import Texts


class Check(NamedTuple):
    """What calls with an answer's delta and draft length reported."""

    answer: Answer
    num_prompts: int
    emitted_kl: Estimate
    position_acceptance: Estimate
    accepted_length: Estimate

    @property
    def kl_ratio(self) -> float:
        """The KL reported over the one predicted; NaN where none was predicted."""
        predicted = self.answer.emitted_kl.value
        return self.emitted_kl.value / predicted if predicted else float("nan")


def check(texts: Texts, prompts: Sequence[list[int]], answer: Answer, batch_size: int, seed: int) -> Check:
    """Decodes `prompts` with the answer's delta and draft length, and counts what is reported."""
    rows = []
    for begin in range(0, len(prompts), batch_size):
        batch = prompts[begin : begin + batch_size]
        output = texts.write(
            batch,
            [seed * 2**32 + begin + number for number in range(len(batch))],
            answer.delta,
            speculation_kl=True,
            num_assistant_tokens=answer.num_assistant_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        counts = output.speculation
        assert counts.emitted_kl_sum is not None
        rows.append(torch.stack([counts.emitted_kl_sum, counts.accepted, counts.verified, counts.rounds], -1).double())
    kl, accepted, verified, rounds = torch.cat(rows).unbind(-1)
    drawn = resamples(len(prompts), seed)
    ratios = ((kl, verified), (accepted, verified), (accepted, rounds))
    return Check(answer, len(prompts), *(ratio_estimate(torch.stack(each, -1), drawn) for each in ratios))
