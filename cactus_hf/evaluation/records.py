"""Answers of an evaluation in a file of JSON lines, which a run that was cut short goes on with.

The first line holds the settings that all answers share; each other line is one answer. Several processes write a
file each, and all of them are read together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..vllm_backend import TRANSFORMERS
from .methods import Method


class Key(NamedTuple):
    """What an answer answers, and how it was decoded."""

    task: str
    question: int  # place among the task's questions
    method: Method


@dataclass(frozen=True)
class Answer:
    """
    One answer.

    Args:
        task (`str`): Name of the task.
        question (`int`): Place among the task's questions, from 0.
        method (`str`): How it was decoded.
        num_assistant_tokens (`int`, *optional*): m; `None` for the target alone.
        text (`str`): The answer as scored: cut at a stop string, without what a model thinks before it.
        prompt_tokens, new_tokens (`int`): Lengths.
        is_cut (`bool`): Whether it ran into the limit of new tokens.
        seconds (`float`): Its batch's time, divided by the rows.
        batch_rows (`int`): Rows decoded together.
        speculation (`dict`, *optional*): Counts and sums of its row, see [`SpeculationStats`].
        backend (`str`): What decoded it.
    """

    task: str
    question: int
    method: str
    num_assistant_tokens: int | None
    text: str
    prompt_tokens: int
    new_tokens: int
    is_cut: bool
    seconds: float
    batch_rows: int
    speculation: dict[str, Any] | None = field(default=None)
    backend: str = TRANSFORMERS

    @property
    def key(self) -> Key:
        return Key(self.task, self.question, Method(self.method, self.num_assistant_tokens, self.backend))


class Records:
    """
    The answers of a file and of its parts, and where this process adds its own.

    Args:
        path (`str`): The file; process r > 0 of several writes to the same name with `.rank{r}` behind it.
        settings (`dict`): What all answers have in common.
        rank (`int`): Of this process.

    Raises:
        ValueError: if the file holds answers that were given with other settings, or a line that is no answer.
    """

    def __init__(self, path: str, settings: dict[str, Any], rank: int = 0) -> None:
        self.path = Path(path)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.own = _part(self.path, rank)
        self.answers: dict[Key, Answer] = {}
        self.reload()
        if not self.own.exists() or not self.own.stat().st_size:
            self._write({"settings": self.settings})

    def reload(self) -> None:
        """Reads all parts again, other processes' among them."""
        for part in parts(self.path):
            settings, answers = read(part)
            if settings is not None:
                self._check(settings, part)
            self.answers |= {answer.key: answer for answer in answers}

    def add(self, answers: Iterable[Answer]) -> None:
        """Writes answers at once, so that no more than a batch can be lost."""
        for answer in answers:
            self.answers[answer.key] = answer
            self._write(asdict(answer))

    def _write(self, line: dict[str, Any]) -> None:
        with self.own.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _check(self, settings: dict[str, Any], part: Path) -> None:
        names = sorted(settings.keys() | self.settings.keys())
        changed = [name for name in names if settings.get(name) != self.settings.get(name)]
        if changed:
            differences = "; ".join(f"{n}: {settings.get(n)!r} there, {self.settings.get(n)!r} now" for n in changed)
            raise ValueError(
                f"{part} was written with other settings ({differences}). Its answers cannot be compared with new "
                "ones: give another --output, or the same settings."
            )


def _part(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def parts(path: Path) -> list[Path]:
    """The files that hold answers of the run whose main file is `path`."""
    return [path] * path.exists() + sorted(path.parent.glob(f"{path.name}.rank*"))


def read(path: Path) -> tuple[dict[str, Any] | None, list[Answer]]:
    """
    Settings and answers of one file. A last line that was cut off while it was written is left aside and removed.

    Raises:
        ValueError: for another line that is none of ours.
    """
    settings, answers = None, []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if "settings" in entry:
                settings = entry["settings"]
            else:
                answers.append(Answer(**entry))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                path.write_text("".join(lines[:-1]), encoding="utf-8")
                break
            raise ValueError(f"{path}, line {number} is no line of `cactus-hf eval`: {error}.") from error
    return settings, answers
