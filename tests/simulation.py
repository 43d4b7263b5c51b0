"""Texts written by a draft that is kept with known chances, and rounds of known costs: no models."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cactus_hf.auto_length import LONGEST, AutoSchedule
from cactus_hf.draft_length import Schedule
from cactus_hf.round_costs import RoundCosts


Chance = Callable[[int, int], float]


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
    # Checks as in docs/cpu.md, packed float32, with drafts of about the share of such passes in docs/benchmarks.md
    "embedded pair": curve(8.8, lambda k: {1: 65.0, 2: 78.0}.get(k, 67 + 1.9 * (k - 3))),
    "embedded pair, 8 rows": curve(14.0, lambda k: 82 + 27.0 * (k - 1)),
    "Qwen pair": curve(105.0, lambda k: {1: 317.0, 2: 392.0, 3: 348.0}.get(k, 304 + 14.0 * max(0, k - 6))),
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
    seconds = 0.0
    for text in texts:
        end = 1
        while end < text.length:
            length = min(num_drafts, text.length - end - 1)
            seconds += curve.round(length)
            end += text.num_kept(end, length) + 1
    return seconds


def fastest(texts: Sequence[Text], curve: Curve) -> float:
    """The same, with the best number of drafts."""
    return min(fixed(texts, curve, num_drafts) for num_drafts in (*range(9), 10, 12, 14, 16, 20))


def texts(chance, length: int, count: int) -> list[Text]:
    return [Text(chance if callable(chance) else lambda place, end: chance, length, seed) for seed in range(count)]


def seconds(texts: list[Text], curve: Curve, is_given: bool, noise: float = 0.0) -> float:
    """Of writing the texts one by one, each by a schedule of its own."""
    total = 0.0
    for text in texts:
        schedule, clock = make(curve, is_given, noise)
        total += write(schedule, [text], curve, clock)[0]
    return total


def make(curve: Curve, is_given: bool = True, noise: float = 0.0, num_rows: int = 1, start: int = 5):
    now, generator = [0.0], random.Random(0)

    def pass_time(each: float) -> None:
        now[0] += each * generator.lognormvariate(0, noise) * (3 if noise and generator.random() < 0.02 else 1)

    costs = RoundCosts.from_dict(curve.costs) if is_given else None
    return AutoSchedule(num_rows, start, 0, LONGEST, costs, lambda: now[0]), pass_time


CHANCES = {
    "never": 0.05,
    "half": 0.5,
    "often": 0.8,
    "almost always": 0.95,
    "less behind": lambda place, end: 0.8 * 0.9**place,
    "more behind": lambda place, end: min(0.95, 0.5 + 0.1 * place),
    "changing": lambda place, end: 0.9 if end // 100 % 2 else 0.2,
}


def table(counts: tuple[int, ...], num_texts: int) -> str:
    """How "auto" compares with the best fixed length of each kind of text, and with plain decoding."""
    lines = [
        "| costs | tokens | of the best fixed length: mean | worst | of plain decoding: worst |",
        "|---|---|---|---|---|",
    ]
    for is_given, count in itertools.product((True, False), counts):
        shares, plain = [], []
        for curve, chance in itertools.product(CURVES.values(), CHANCES.values()):
            written = texts(chance, count, num_texts)
            took = seconds(written, curve, is_given, noise=0.0 if is_given else 0.12)
            shares.append(fastest(written, curve) / took)
            plain.append(fixed(written, curve, 0) / took)
        name = "given" if is_given else "timed"
        mean = sum(shares) / len(shares)
        lines.append(f"| {name} | {count} | {mean:.2f} | {min(shares):.2f} | {min(plain):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table((100, 300, 1000), num_texts=6))
