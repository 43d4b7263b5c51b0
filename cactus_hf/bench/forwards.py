"""Where the time of a call goes: passes of the models as they happen, and the same passes made bare.

* **In situ**: [`ForwardClock`] hooks the two models and notes each pass of a call of `generate()`: its shape, and how
  long the module's `forward` took there, over the cache and with the masks that the method gave it.
* **Bare**: [`BareForwards`] makes passes of the same shapes outside any loop, over transformers' own `DynamicCache`
  holding texts of the mean length, without padding or masks: what a loop without any cost of its own would pay.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..host import Host
from ..measuring import synchronize, timed


COVERED = 0.9  # share of a method's passes whose shapes are measured bare; a rare shape takes the nearest of them
BARE_PASSES = 3  # of each shape, a turn


class Shape(NamedTuple):
    """Kind of a pass behind the prompts."""

    role: str  # "target" or "draft"
    rows: int
    width: int  # tokens a row


class Forward(NamedTuple):
    """A pass that happened."""

    shape: Shape
    seconds: float  # NaN where only shapes are noted
    end: float  # on the clock of `time.perf_counter`


@dataclass
class ForwardClock:
    """Notes the passes of models while it is entered, by hooks that torch provides for that.

    Args:
        models (`dict[str, nn.Module]`): "target" and, if there is one, "draft".
        is_timing (`bool`): whether to time them too. On a device that works behind the host's back each pass is then
            waited for, which slows the call: its total says nothing.
    """

    models: Mapping[str, nn.Module]
    device: torch.device
    is_timing: bool
    forwards: list[Forward] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)
    _start: float = 0.0

    def __enter__(self) -> ForwardClock:
        for role, model in self.models.items():
            self._hooks += [
                model.register_forward_pre_hook(self._begin),
                model.register_forward_hook(lambda *call, role=role: self._end(role, *call), with_kwargs=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def take(self) -> list[Forward]:
        """The passes since the last time."""
        forwards, self.forwards = self.forwards, []
        return forwards

    def _begin(self, *call: Any) -> None:
        if self.is_timing:
            synchronize(self.device)
        self._start = time.perf_counter()

    def _end(self, role: str, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if self.is_timing:
            synchronize(self.device)
        end = time.perf_counter()
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        seconds = end - self._start if self.is_timing else float("nan")
        self.forwards.append(Forward(Shape(role, *ids.shape), seconds, end))


class Rounds(NamedTuple):
    """The rounds of a call behind its prompts, in seconds: each is one pass of the target and all since the last."""

    durations: list[float]
    in_forwards: list[float]  # of those, spent in passes


def behind_prompts(forwards: Sequence[Forward]) -> list[Forward]:
    """Without the first pass of each model, which reads the prompts."""
    first = {each.shape.role: each for each in reversed(forwards)}
    return [each for each in forwards if each is not first[each.shape.role]]


def rounds_of(forwards: Sequence[Forward]) -> Rounds:
    """The rounds of one call, timed from where both models had read the prompts.

    Stock assisted generation lets the target read prompts and first drafts at once: that round is not among them.
    """
    first = {each.shape.role: each.end for each in reversed(forwards)}
    durations, in_forwards = [], []
    start, spent = max(first.values(), default=0.0), 0.0
    for each in forwards:
        if each.end <= max(first.values()):
            continue
        spent += each.seconds
        if each.shape.role == "target":
            durations.append(each.end - start)
            in_forwards.append(spent)
            start, spent = each.end, 0.0
    return Rounds(durations, in_forwards)


def common_shapes(forwards: Iterable[Forward]) -> set[Shape]:
    """The shapes that make up `COVERED` of the passes behind the prompts, and the most usual of each model."""
    counts = Counter(each.shape for each in forwards)
    chosen: set[Shape] = set()
    num_covered = 0
    for shape, count in counts.most_common():
        if num_covered < COVERED * counts.total() or shape.role not in {other.role for other in chosen}:
            chosen.add(shape)
            num_covered += count
    return chosen


class BareForwards:
    """Times passes over a `DynamicCache` that holds `context` tokens of each row.

    Args:
        models (`dict[str, PreTrainedModel]`): "target" and "draft".
        context (`int`): mean length of the texts while they grow.
        prompt_len (`int`): columns of the prompts.
    """

    def __init__(self, models: Mapping[str, Any], context: int, prompt_len: int):
        self.hosts = {role: Host(model) for role, model in models.items()}
        self.context, self.prompt_len = context, prompt_len
        self.samples: dict[Shape, list[float]] = {}
        self.prompt_samples: dict[tuple[str, int], list[float]] = {}  # of role and rows

    @torch.no_grad()
    def measure(self, shapes: Iterable[Shape], readers: Iterable[tuple[str, int]]) -> None:
        """Adds samples of passes of `shapes`, and of passes that read the prompts, for each (role, rows)."""
        wanted = sorted(shapes)
        for role, rows in sorted({*readers, *((shape.role, shape.rows) for shape in wanted)}):
            cache, _ = self._read(role, rows, self.context)
            self.prompt_samples.setdefault((role, rows), []).append(self._read(role, rows, self.prompt_len)[1])
            for shape in wanted:
                if (shape.role, shape.rows) == (role, rows):
                    self.samples.setdefault(shape, []).extend(self._time(shape, cache))

    def _time(self, shape: Shape, cache: Any) -> list[float]:
        host = self.hosts[shape.role]
        call = {"input_ids": self._tokens(*shape), host.cache_name: cache, "use_cache": True}
        seconds = []
        for _ in range(BARE_PASSES + 1):
            seconds.append(timed(lambda: host.model(**call), host.device)[1])
            cache.crop(-shape.width)
        return seconds[1:]  # the first of a shape pays for more than itself

    def _read(self, role: str, rows: int, length: int) -> tuple[Any, float]:
        """A cache that holds `length` tokens a row, and the seconds it took to read them."""
        host = self.hosts[role]
        cache = host.whole_cache()
        call = {"input_ids": self._tokens(role, rows, length), host.cache_name: cache, "use_cache": True}
        if host.takes("logits_to_keep"):
            call["logits_to_keep"] = 1
        return cache, timed(lambda: host.model(**call), host.device)[1]

    def _tokens(self, role: str, rows: int, width: int) -> torch.Tensor:
        host = self.hosts[role]
        return torch.randint(host.vocab_size, (rows, width), device=host.device)

    def seconds(self, shape: Shape) -> float | None:
        """Median; `None` if that shape was not measured."""
        return statistics.median(self.samples[shape]) if shape in self.samples else None

    def least_seconds(self, calls: Iterable[Sequence[Forward]]) -> float:
        """What the passes of some calls would take bare."""
        total = 0.0
        for forwards in calls:
            firsts = {each.shape.role: each.shape.rows for each in reversed(forwards)}
            total += sum(statistics.median(self.prompt_samples[key]) for key in firsts.items())
            total += sum(self._nearest(each.shape) for each in behind_prompts(forwards))
        return total

    def _nearest(self, shape: Shape) -> float:
        if shape in self.samples:
            return statistics.median(self.samples[shape])
        same = [other for other in self.samples if other.role == shape.role]
        near = min(same, key=lambda other: (abs(other.rows - shape.rows), abs(other.width - shape.width)))
        return statistics.median(self.samples[near])
