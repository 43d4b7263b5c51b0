"""What the answers of each method come to: score with its error, acceptance, divergence, speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..measuring import Counts
from .methods import Method
from .records import Answer


@dataclass(frozen=True)
class Summary:
    """
    What one method's answers to a task's questions came to.

    Args:
        task (`str`): Name of the task.
        method (`Method`): How they were decoded.
        scores (`dict[int, float]`): Of each question.
        answers (`list[Answer]`): To the same questions.
        counts (`Counts`, *optional*): What happened to drafts; `None` for the target alone.
        emitted_kl, emitted_tv (`float`, *optional*): Mean divergence in nats, and total variation, of the emitted law
            a checked draft, if they were measured.
    """

    task: str
    method: Method
    scores: dict[int, float]
    answers: list[Answer]
    counts: Counts | None
    emitted_kl: float | None
    emitted_tv: float | None

    @property
    def score(self) -> float:
        return sum(self.scores.values()) / len(self.scores)

    @property
    def error(self) -> float:
        """Standard error of the score: of a mean of independent questions."""
        return _standard_error(list(self.scores.values()))

    @property
    def wasted(self) -> float | None:
        """Rej: drafts that were thrown away, an emitted token."""
        if not self.counts or not self.counts.rounds:
            return None
        length = self.counts.drafted / self.counts.rounds
        accepted = self.counts.accepted / self.counts.rounds
        return (length - accepted) / (accepted + 1)

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.new_tokens for answer in self.answers) / sum(answer.seconds for answer in self.answers)

    @property
    def mean_length(self) -> float:
        """New tokens an answer."""
        return sum(answer.new_tokens for answer in self.answers) / len(self.answers)

    @property
    def cut(self) -> float:
        """Share of the answers that ran into the limit of new tokens."""
        return sum(answer.is_cut for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Difference:
    """
    A method's score minus another's, on the questions that both answered.

    Args:
        value (`float`): Of the means.
        error (`float`): Its standard error, from the differences of each question.
        num_better, num_worse (`int`): Questions on which it scored higher, and lower.
        p_value (`float`): Of the sign test (for scores of 0 and 1: McNemar's exact test), two-sided.
    """

    value: float
    error: float
    num_better: int
    num_worse: int
    p_value: float


def summarise(task: str, method: Method, answers: Sequence[Answer], scores: Mapping[int, float]) -> Summary:
    """The summary of `answers`, all of one method, with the score of each question."""
    rows = [answer.speculation for answer in answers if answer.speculation is not None]
    counts = Counts()
    for row in rows:
        emitted = row["emitted"] - (row["emitted"] > 0)  # the first token belongs to no round
        counts = counts.plus(
            Counts(row["rounds"], row["drafted"], row["verified"], row["accepted"], emitted, row["ball_kl_sum"])
        )
    means: list[float | None] = []
    for name in ("emitted_kl_sum", "emitted_tv_sum"):
        has_all = bool(rows) and counts.verified > 0 and all(name in row for row in rows)
        means.append(sum(row[name] for row in rows) / counts.verified if has_all else None)
    own = {answer.question: scores[answer.question] for answer in answers}
    return Summary(task, method, own, list(answers), counts if rows else None, *means)


def compare(summary: Summary, other: Summary) -> Difference | None:
    """How much `summary` scores above `other`; `None` if no question is in both."""
    common = summary.scores.keys() & other.scores.keys()
    if not common:
        return None
    differences = [summary.scores[question] - other.scores[question] for question in sorted(common)]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    value = sum(differences) / len(differences)
    return Difference(value, _standard_error(differences), better, worse, sign_test(better, worse))


def sign_test(num_better: int, num_worse: int) -> float:
    """Two-sided p-value of as uneven a split of fair coins."""
    num = num_better + num_worse
    tail = sum(math.comb(num, k) for k in range(min(num_better, num_worse) + 1)) / 2**num
    return min(1.0, 2 * tail)


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean; NaN for a single one."""
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
