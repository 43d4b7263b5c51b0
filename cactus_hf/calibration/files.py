"""A calibration as JSON lines: what it was made with, then the sums of each prompt as it is finished."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..json_lines import read_lines
from ..report import json_number
from .rounds import FIELDS


POSITION_FIELDS = ("positions", "acceptance", "kl", "tv")  # sums over all positions of a text


class Finished(NamedTuple):
    """What is kept of a prompt."""

    rounds: Tensor  # [S, M, 7] float64, the sums of `rounds.FIELDS`
    positions: Tensor  # [S, 4] float64, the sums of `POSITION_FIELDS`


class Record:
    """
    The prompts that are finished, and the file in which they are kept, if there is one.

    Args:
        header (`dict`): what the numbers depend on.
        path (`str` or path, *optional*): is made, or gone on with.

    Raises:
        ValueError: for a file with another header, or with something else in it.
    """

    def __init__(self, header: dict[str, Any], path: str | os.PathLike | None = None):
        self.path = None if path is None else Path(path)
        self.finished: dict[int, Finished] = {}
        if self.path is None:
            return
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.write_text(_line(header), encoding="utf-8")
            return
        found, self.finished = read(self.path)
        differing = [name for name in header if found.get(name) != header[name]]
        if differing:
            name = differing[0]
            there, now = _parted(found.get(name), header[name])
            raise ValueError(
                f"{self.path} was made with another `{name}` ({_short(there)} instead of {_short(now)}): go on with "
                "the same, or give another file."
            )
        *whole, last = read_lines(self.path)
        if last:  # a line that was being written when the run was killed
            self.path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")

    def add(self, finished: dict[int, Finished]) -> None:
        """Keep those of the prompts that are new."""
        new = {number: each for number, each in finished.items() if number not in self.finished}
        self.finished |= new
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(_line(_as_dict(number, each)) for number, each in new.items()))


def read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[int, Finished]]:
    """The header of a file, and its prompts; without a last line that was not written to its end."""
    lines = read_lines(path)[:-1]
    try:
        header, *rest = map(json.loads, lines)
        shape, numbers = (len(header["settings"]), header["longest"]), range(header["num_prompts"])
        for name in ("deltas", "num_assistant_tokens", "seed", "options"):
            header[name]
        for each in rest:
            if each["prompt"] not in numbers:
                raise ValueError(f"prompt {each['prompt']!r} is none of {len(numbers)}")
        return header, {each["prompt"]: _finished(each, shape) for each in rest}
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{path} is no calibration ({type(error).__name__}: {error}): give a file that `calibrate` wrote, or one "
            "that is not there yet."
        ) from error


def write(path: str | os.PathLike, header: dict[str, Any], finished: dict[int, Finished]) -> None:
    lines = [header, *(_as_dict(number, each) for number, each in finished.items())]
    Path(path).write_text("".join(map(_line, lines)), encoding="utf-8")


def _as_dict(number: int, finished: Finished) -> dict[str, Any]:
    numbers = {name: list(map(json_number, each.flatten().tolist())) for name, each in finished._asdict().items()}
    return {"prompt": number, **numbers}


def _finished(line: dict[str, Any], shape: tuple[int, int]) -> Finished:
    rounds, positions = (
        torch.tensor(list(map(float, line[name])), dtype=torch.float64) for name in ("rounds", "positions")
    )
    return Finished(rounds.view(*shape, len(FIELDS)), positions.view(shape[0], len(POSITION_FIELDS)))


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False) + "\n"


def _parted(one: Any, other: Any) -> tuple[Any, Any]:
    """Two values; of two lists, without what is in both."""
    if not (isinstance(one, list) and isinstance(other, list)):
        return one, other
    return [each for each in one if each not in other], [each for each in other if each not in one]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
