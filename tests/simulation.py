"""Texts written by a draft that is kept with known chances, and rounds of known costs: no models."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cactus_hf.draft_length import DraftLength, LengthSchedule, Schedule


LONGEST = 20
Chance = Callable[
    [int, int], float
]  # of a draft at a position of the block, and of the text, if those before it were kept


class Curve(NamedTuple):
    """Seconds of drafting 1 ... 20 tokens, and of checking 1 ... 21."""

    draft: list[float]
    verify: list[float]

    def round(self, length: int) -> float:
        return (self.draft[length - 1] if length else 0.0) + self.verify[length]

    @property
    def costs(self) -> dict:
        return {"1": {"draft": self.draft, "verify": self.verify}}


def curve(draft_step: float, verify: Callable[[int], float]) -> Curve:
    return Curve([draft_step * m for m in range(1, LONGEST + 1)], [verify(k) for k in range(1, LONGEST + 2)])


# The last is a 1.5 B model with a .5 B draft on 2 CPU cores in float32: 4 tokens take longer than 8
IRREGULAR = {1: 1.4, 2: 5.1, 3: 5.8, 4: 6.5, 5: 6.6, 6: 6.6, 7: 6.6}
CURVES = {
    "flat": curve(0.1, lambda k: 1 + 0.005 * (k - 1)),
    "free drafts": curve(0.02, lambda k: 1 + 0.02 * (k - 1)),
    "linear": curve(0.1, lambda k: 1 + 0.3 * (k - 1)),
    "hopeless": curve(0.3, lambda k: 1 + 0.8 * (k - 1)),
    "irregular": curve(0.3, lambda k: IRREGULAR.get(k, 2.2 + 0.15 * (k - 8))),
}


class Text:
    """The chances of one text: whether a draft is kept at a place of it does not depend on how it got there."""

    def __init__(self, chance: Chance, length: int, seed: int):
        self.chance, self.length = chance, length
        generator = random.Random(seed)
        self.draws = [generator.random() for _ in range(length + LONGEST)]

    def num_kept(self, begin: int, num_drafts: int) -> int:
        kept = 0
        while kept < num_drafts and self.draws[begin + kept] < self.chance(kept, begin + kept):
            kept += 1
        return kept


def write(
    schedule: Schedule, texts: Sequence[Text], curve: Curve, pass_time: Callable[[float], None] = lambda seconds: None
) -> tuple[float, list[int]]:
    """Seconds until all texts are written, and the length of each round."""
    ends, seconds, lengths = [1] * len(texts), 0.0, []
    while active := [i for i, text in enumerate(texts) if ends[i] < text.length]:
        rows = torch.tensor(active)
        drafts = schedule.lengths(rows, torch.tensor([texts[i].length - ends[i] for i in active]))
        lengths.append(int(drafts.max()))
        seconds += curve.round(lengths[-1])
        pass_time(curve.round(lengths[-1]))
        kept = [texts[i].num_kept(ends[i], num) for i, num in zip(active, drafts.tolist(), strict=True)]
        for i, count in zip(active, kept, strict=True):
            ends[i] += count + 1
        schedule.update(rows, drafts, torch.tensor(kept))
    return seconds, lengths


def fixed(texts: Sequence[Text], curve: Curve, num_drafts: int) -> float:
    """Seconds in which all texts are written one by one, always with as many drafts."""
    schedule = LengthSchedule(DraftLength(max(1, num_drafts)), 1)
    schedule.length[:] = num_drafts
    return sum(write(schedule, [text], curve)[0] for text in texts)


def fastest(texts: Sequence[Text], curve: Curve) -> float:
    """The same, with the best number of drafts."""
    return min(fixed(texts, curve, num_drafts) for num_drafts in (*range(13), 14, 16, 18, 20))
