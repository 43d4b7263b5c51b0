"""Answers of an evaluation in a file of JSON lines, which a run that was cut short goes on with.

The first line holds the settings that all answers share; each other line is one answer. Several processes write a
file each, and all of them are read together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..json_lines import read_lines
from ..vllm_backend import TRANSFORMERS
from .methods import Method


COUNTS = ("rounds", "drafted", "verified", "accepted", "emitted", "ball_kl_sum")  # in each `speculation`


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
        prompt_sha256 (`str`, *optional*): Of the question as it was put to the model.
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
    prompt_sha256: str | None = None

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
        self.own = part_of(self.path, rank)
        self.answers: dict[Key, Answer] = {}
        self.reload()
        _mend(self.own)
        if not self.own.exists() or not self.own.stat().st_size:
            self._write({"settings": self.settings})

    def reload(self) -> None:
        """Reads all parts again, other processes' among them."""
        for part in parts(self.path):
            settings, answers = read(part)
            if settings is not None:
                self._check(settings, part)
            self.answers |= {answer.key: answer for answer in answers}

    def check_questions(self, task: str, hashes: Mapping[int, str]) -> None:
        """Raises `ValueError` if a question that was answered, by its place, had another text than the one now."""
        for key, answer in self.answers.items():
            if key.task == task and answer.prompt_sha256 not in (None, hashes.get(key.question, answer.prompt_sha256)):
                raise ValueError(
                    f"{self.path} has an answer to another question {key.question} than the one now: give another "
                    "--output, or the same --data."
                )

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


def part_of(path: Path, rank: int) -> Path:
    """The file of process `rank`."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def parts(path: Path) -> list[Path]:
    """The files that hold answers of the run whose main file is `path`."""
    return [path] * path.exists() + sorted(path.parent.glob(f"{path.name}.rank*"))


def read(path: Path) -> tuple[dict[str, Any] | None, list[Answer]]:
    """
    Settings and answers of one file, without a last line that was cut off while it was written.

    Raises:
        ValueError: for another line that is none of ours, and for answers without settings.
    """
    settings, answers = None, []
    *lines, last = read_lines(path)
    for number, line in enumerate(lines + [last] * _is_whole(last), start=1):
        try:
            entry = json.loads(line)
            if "settings" in entry:
                settings = dict(entry["settings"])
            else:
                answers.append(_answer(entry))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no line of `cactus-hf eval`: {error}.") from error
    if answers and settings is None:
        raise ValueError(f"{path} has no line of settings, so what its answers come from is not known: give another.")
    return settings, answers


def _answer(entry: dict[str, Any]) -> Answer:
    answer = Answer(**entry)
    missing = [] if answer.speculation is None else [name for name in COUNTS if name not in answer.speculation]
    if missing or not isinstance(answer.text, str):
        raise ValueError(f"`speculation` lacks {missing[0]!r}" if missing else "`text` is no text")
    return answer


def _is_whole(line: str) -> bool:
    """Whether a line without a line break is all of what was to be written."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _mend(path: Path) -> None:
    """Makes a file end behind a whole line. One that has no other line must begin as ours do."""
    *lines, last = read_lines(path) if path.exists() else [""]
    if not last:
        return
    if _is_whole(last):
        lines.append(last)
    elif not lines and not last.startswith('{"settings"'):
        raise ValueError(f"{path} is no file of `cactus-hf eval`: give another --output.")
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
