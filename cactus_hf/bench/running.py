"""Runs methods turn by turn on the same prompts, and sums up what was seen of each."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import measuring
from ..measuring import Counts, Speeds
from . import memory, rivals
from .forwards import BareForwards, Shape, behind_prompts, common_shapes, rounds_of
from .methods import UNSEEN, Call, Decoders, Method
from .prompts import Batch


WARM_UP_TOKENS = 16


class Cell(NamedTuple):
    """What all methods are asked for at a time."""

    batch_size: int
    context: int | None  # tokens of each prompt; `None`: as long as they are
    batches: list[Batch]

    @property
    def mean_prompt_len(self) -> float:
        return statistics.mean(float(batch.attention_mask.sum(1).float().mean()) for batch in self.batches)


class Turn(NamedTuple):
    """One run of a method over all prompts."""

    calls: list[Call]
    peak_memory: tuple[int, str] | None

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)

    @property
    def num_tokens(self) -> int:
        return sum(call.num_tokens for call in self.calls)


class PassTime(NamedTuple):
    """Passes of one shape, in ms."""

    shape: Shape
    num: int  # in all turns, those that read prompts left out
    in_situ: float | None  # median; `None` if the passes could not be seen
    bare: float | None  # median; `None` for rare shapes


@dataclass(frozen=True)
class Result(Speeds):
    """
    What the turns of one method came to. Times are medians in ms, `None` where they cannot be known, as in vLLM.

    Args:
        method (`Method`): The method and its settings.
        is_row_by_row (`bool`): Whether it took the rows of each batch one after another.
        new_tokens (`list[int]`): Tokens of each turn.
        seconds (`list[float]`): Of each turn, prompts included.
        counts (`Counts`, *optional*): What happened to drafts, over all turns.
        emitted_kl (`float`, *optional*): Nats a checked draft, from a run of its own.
        round_ms, in_forwards_ms (`float`, *optional*): A round, and what of it the passes take.
        overhead_bare_ms (`float`, *optional*): What a turn takes beyond the same passes made bare, a round.
        efficiency (`float`, *optional*): Time of the same passes made bare / time taken.
        passes (`Sequence[PassTime]`): The passes by shape.
        peak_memory (`tuple[int, str]`, *optional*): Bytes, and what they are bytes of.
    """

    method: Method
    is_row_by_row: bool
    new_tokens: list[int]
    seconds: list[float]
    counts: Counts | None
    emitted_kl: float | None = None
    round_ms: float | None = None
    in_forwards_ms: float | None = None
    overhead_bare_ms: float | None = None
    efficiency: float | None = None
    passes: Sequence[PassTime] = ()
    peak_memory: tuple[int, str] | None = None

    @property
    def overhead_ms(self) -> float | None:
        """Of a round, what is not spent in passes of the models."""
        if self.round_ms is None or self.in_forwards_ms is None:
            return None
        return self.round_ms - self.in_forwards_ms

    def pass_ms(self, role: str) -> float | None:
        """A pass of "target" or "draft" of the most usual shape."""
        passes = (each for each in self.passes if each.shape.role == role)
        usual = max(passes, key=lambda each: each.num, default=None)
        return None if usual is None else usual.in_situ


def measure(
    decoders: Decoders, cell: Cell, methods: Sequence[Method], seed: int, repeats: int, progress: Callable[[str], Any]
) -> list[Result]:
    """
    Args:
        decoders (`Decoders`): The models.
        cell (`Cell`): The prompts.
        methods (`Sequence[Method]`): What to compare.
        seed (`int`): Seed of the first turn; turns have seeds `seed`, `seed` + 1, ...
        repeats (`int`): Turns.
        progress (`Callable`): Called with the name of what has been done, `1 + repeats` times a method.
    """
    device = decoders.target.device
    is_in_step = works_in_step(device)
    kl = {method: _warm_up(decoders, cell, method, seed, progress) for method in methods}
    new_tokens = decoders.options["max_new_tokens"]
    width = max(batch.input_ids.shape[1] for batch in cell.batches)
    bare = BareForwards(decoders.models, round(cell.mean_prompt_len + new_tokens / 2), width)
    turns: dict[Method, list[Turn]] = defaultdict(list)
    timed: dict[Method, list[Call]] = defaultdict(list)
    for turn in measuring.turns(repeats):
        for method in methods:
            memory.reset_peak(device)
            calls = decoders.run(method, cell.batches, seed + turn, is_timing=is_in_step)
            turns[method].append(Turn(calls, memory.peak(device)))
            # Elsewhere waiting for each pass would slow the turn, so passes are timed in one of their own
            if is_in_step:
                timed[method] += calls
            elif turn == 0:
                timed[method] = decoders.run(method, cell.batches, seed, is_timing=True)
            progress(method.kind)
        shapes = {shape for method in methods for shape in _common(turns[method])}
        bare.measure(shapes, {key for method in methods for key in _prompt_passes(turns[method])})
    alone = {method for method in methods if cell.batch_size > 1 and not decoders.takes_batches(method.kind)}
    return [_sum_up(method, method in alone, turns[method], timed[method], bare, kl[method]) for method in methods]


def works_in_step(device: torch.device) -> bool:
    """Whether a pass is done when its call returns, so that its time can be noted without waiting for it."""
    return device.type == "cpu"


def _warm_up(
    decoders: Decoders, cell: Cell, method: Method, seed: int, progress: Callable[[str], Any]
) -> float | None:
    """Runs the method once; the emitted KL, where it is known how to measure it and means something."""
    is_ours = method.kind not in ("plain", "stock", *rivals.RIVALS)
    has_kl = is_ours and decoders.options["do_sample"] and decoders.acceptance is None
    if method.kind == "compiled":
        torch.compiler.reset()  # it leaves a function uncompiled after a few shapes, which the last cell may have had
    if has_kl:  # it costs time, so no turn measures it
        calls = decoders.run(method, cell.batches, seed, is_timing=False, speculation_kl=True)
        sums = [(call.emitted_kl or 0.0) * call.counts.verified for call in calls if call.counts]
        num_verified = sum(call.counts.verified for call in calls if call.counts)
    else:
        wanted = decoders.options["max_new_tokens"]  # all of them, where each shape that comes up is compiled
        few = wanted if method.kind == "compiled" else min(WARM_UP_TOKENS, wanted)
        decoders.run(method, cell.batches[:1], seed, is_timing=False, max_new_tokens=few)
    progress(method.kind)
    return sum(sums) / num_verified if has_kl and num_verified else None


def _common(turns: Sequence[Turn]) -> set[Shape]:
    calls = [call for turn in turns for call in turn.calls]
    return common_shapes(each for call in calls for each in behind_prompts(call.forwards))


def _prompt_passes(turns: Sequence[Turn]) -> set[tuple[str, int]]:
    forwards = [each for turn in turns for call in turn.calls for each in call.forwards]
    return {(each.shape.role, each.shape.rows) for each in forwards}


def _sum_up(
    method: Method,
    is_row_by_row: bool,
    turns: Sequence[Turn],
    timed: Sequence[Call],
    bare: BareForwards,
    emitted_kl: float | None,
) -> Result:
    calls = [call for turn in turns for call in turn.calls]
    counts = None
    if calls[0].counts is not None:
        counts = Counts()
        for call in calls:
            counts = counts.plus(call.counts or Counts())
    is_seen = method.kind not in UNSEEN
    rounds = [rounds_of(call.forwards) for call in timed] if is_seen else []
    durations = [each for call in rounds for each in call.durations]
    in_forwards = [each for call in rounds for each in call.in_forwards]
    least = [bare.least_seconds(call.forwards for call in turn.calls) for turn in turns]
    num_rounds = [sum(_num_target_passes(call) for call in turn.calls) for turn in turns]
    shares = [seconds / turn.seconds for seconds, turn in zip(least, turns, strict=True)]
    beyond = [
        (turn.seconds - seconds) / max(1, count) for turn, seconds, count in zip(turns, least, num_rounds, strict=True)
    ]
    is_compared = any(least)
    peaks = [turn.peak_memory for turn in turns if turn.peak_memory is not None]
    return Result(
        method,
        is_row_by_row,
        [turn.num_tokens for turn in turns],
        [turn.seconds for turn in turns],
        counts,
        emitted_kl,
        1e3 * statistics.median(durations) if durations else None,
        1e3 * statistics.median(in_forwards) if durations else None,
        1e3 * statistics.median(beyond) if is_compared else None,
        statistics.median(shares) if is_compared else None,
        _pass_times(calls, timed if is_seen else [], bare),
        max(peaks, default=None),
    )


def _num_target_passes(call: Call) -> int:
    return sum(each.shape.role == "target" for each in behind_prompts(call.forwards))


def _pass_times(calls: Sequence[Call], timed: Sequence[Call], bare: BareForwards) -> list[PassTime]:
    counts: dict[Shape, int] = defaultdict(int)
    for call in calls:
        for each in behind_prompts(call.forwards):
            counts[each.shape] += 1
    in_situ: dict[Shape, list[float]] = defaultdict(list)
    for call in timed:
        for each in behind_prompts(call.forwards):
            in_situ[each.shape].append(1e3 * each.seconds)
    return [
        PassTime(
            shape,
            count,
            statistics.median(in_situ[shape]) if in_situ[shape] else None,
            None if (seconds := bare.seconds(shape)) is None else 1e3 * seconds,
        )
        for shape, count in sorted(counts.items())
    ]
