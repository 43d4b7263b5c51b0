"""What a round costs at each draft length: given, or learnt from the rounds of a call."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .parameters import is_integer


Curve = tuple[float, ...]
EXAMPLE = '{"1": {"draft": [.01, .02], "verify": [.04, .04, .05]}}'


@dataclass(frozen=True)
class RoundCosts:
    """
    Seconds of the two parts of a round, at one or several batch sizes.

    Args:
        batch_sizes (`tuple` of `int`): rows in a batch, in ascending order.
        draft (`tuple` of M `float` for each batch size): seconds in which m = 1 ... M tokens a row are drafted.
        verify (`tuple` of M + 1 `float` for each batch size): seconds of the rest of a round that checks a block of
            k = 1 ... M + 1 tokens a row: m drafts and the token before them.
    """

    batch_sizes: tuple[int, ...]
    draft: tuple[Curve, ...]
    verify: tuple[Curve, ...]

    @classmethod
    def from_dict(cls, value: Any) -> RoundCosts:
        """
        Args:
            value (`dict`): for each batch size the lists `draft` (M seconds) and `verify` (M + 1), as `to_dict` gives
                it. Batch sizes may be strings, as in JSON.

        Raises:
            ValueError: if it is anything else.
        """
        if not isinstance(value, Mapping) or not value:
            raise _error(value, "no dictionary with an entry for each batch size")
        curves = {_batch_size(key): _curves(key, entry) for key, entry in value.items()}
        if len(curves) < len(value):
            raise _error(value, "a batch size given twice")
        sizes = tuple(sorted(curves))
        if len({len(curves[size][0]) for size in sizes}) > 1:
            raise _error(value, "lists of different lengths for different batch sizes")
        return cls(sizes, tuple(curves[size][0] for size in sizes), tuple(curves[size][1] for size in sizes))

    def to_dict(self) -> dict[str, dict[str, list[float]]]:
        """The same as JSON can hold it."""
        parts = zip(self.batch_sizes, self.draft, self.verify, strict=True)
        return {str(size): {"draft": list(draft), "verify": list(verify)} for size, draft, verify in parts}

    @property
    def longest(self) -> int:
        """M, the largest draft length with a known cost."""
        return len(self.draft[0])

    def seconds(self, batch_size: int) -> list[float]:
        """Of a round at each draft length m = 0 ... M; between two batch sizes on the line through both, beyond the
        first and last as theirs.
        """
        above = next((i for i, size in enumerate(self.batch_sizes) if size >= batch_size), len(self.batch_sizes) - 1)
        below = above if above == 0 or self.batch_sizes[above] <= batch_size else above - 1
        if above == below:
            return self._at(above)
        low, high = self.batch_sizes[below], self.batch_sizes[above]
        share = (batch_size - low) / (high - low)
        return [x + share * (y - x) for x, y in zip(self._at(below), self._at(above), strict=True)]

    def _at(self, index: int) -> list[float]:
        draft = (0.0, *self.draft[index])
        return [d + v for d, v in zip(draft, self.verify[index], strict=True)]


def _batch_size(key: Any) -> int:
    size = int(key) if isinstance(key, str) and key.isdecimal() else key
    if not is_integer(size) or size < 1:
        raise _error(key, "no batch size")
    return int(size)


def _curves(key: Any, entry: Any) -> tuple[Curve, Curve]:
    if not isinstance(entry, Mapping) or set(entry) != {"draft", "verify"}:
        raise _error(entry, f'no "draft" and "verify" for batch size {key}')
    draft, verify = entry["draft"], entry["verify"]
    if not all(isinstance(curve, Sequence) and all(map(_is_seconds, curve)) for curve in (draft, verify)):
        raise _error(entry, f"lists that are not of positive numbers of seconds for batch size {key}")
    if not draft or len(verify) != len(draft) + 1:
        raise _error(entry, f"{len(draft)} values of draft and {len(verify)} of verify for batch size {key}")
    return tuple(map(float, draft)), tuple(map(float, verify))


def _is_seconds(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:  # a Python integer may be larger than any float
        return False


def _error(value: Any, problem: str) -> ValueError:
    return ValueError(
        "`speculation_costs` must give for each batch size the seconds of drafting 1 ... M tokens and of checking "
        f"1 ... M + 1, such as {EXAMPLE}, but there is {problem}: {value!r}. `cactus-hf tune --output` writes them."
    )
