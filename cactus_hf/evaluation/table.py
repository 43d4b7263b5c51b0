"""The table that `eval` prints, as in the paper, and the same as JSON lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..report import aligned, json_number
from .methods import PLAIN, Method
from .summary import Summary, compare


HEADS = (
    "method", "m", "n", "score", "error", "vs. target", "p", "AL", "acc.", "Rej", "ball KL", "KL", "tok/s", "length",
    "cut",
)  # fmt: skip
LEGEND = """\
score: percent, with its standard error over the n questions; vs. target: difference from the target alone on the same
questions (in the same backend), with its error; p: sign test of it. AL: kept drafts a round; acc.: kept share of the
checked drafts; Rej: wasted drafts a token, as a multiple of speculative sampling's at the same m. ball KL: of the law
aimed at, KL: of the law emitted, nats a checked draft. length: tokens an answer; cut: answers that were too long."""


def table(summaries: Sequence[Summary]) -> str:
    """One task's methods as text."""
    return aligned([HEADS, *(_cells(summary, summaries) for summary in summaries)], gap="  ")


def _cells(summary: Summary, all_of_task: Sequence[Summary]) -> tuple[str, ...]:
    facts = entry(summary, all_of_task)

    def shown(name: str, form: str, factor: float = 1.0) -> str:
        value = facts[name]
        return "-" if value is None else format(float(value) * factor, form)

    against = "-"
    if facts["difference"] is not None:
        against = f"{facts['difference'] * 100:+.1f} ({shown('difference_error', '.1f', 100)})"
    return (
        summary.method.title,
        shown("num_assistant_tokens", ".0f"),
        shown("questions", ".0f"),
        shown("score", ".1f", 100),
        shown("error", ".1f", 100),
        against,
        shown("p_value", ".2f"),
        shown("accepted_length", ".2f"),
        shown("acceptance", ".3f"),
        shown("rejected_relative", ".2f"),
        shown("ball_kl", ".3f"),
        shown("emitted_kl", ".3f"),
        shown("tokens_per_second", ".1f"),
        shown("mean_length", ".0f"),
        shown("cut", ".0%"),
    )


def entry(summary: Summary, all_of_task: Sequence[Summary]) -> dict[str, Any]:
    """One method's line of JSON. Shares and scores are from 0 to 1."""
    alone = Method(PLAIN, None, summary.method.backend)
    plain = next((each for each in all_of_task if each.method == alone), None)
    lossless = next((each for each in all_of_task if each.method == summary.method._replace(name="sps")), None)
    difference = compare(summary, plain) if plain is not None and plain is not summary else None
    wasted, least = summary.wasted, None if lossless is None else lossless.wasted
    counts = summary.counts
    return {
        "task": summary.task,
        "method": summary.method.name,
        "backend": summary.method.backend,
        "num_assistant_tokens": summary.method.num_drafts,
        "questions": len(summary.scores),
        "score": summary.score,
        "error": _or_none(summary.error),
        "difference": difference and difference.value,
        "difference_error": difference and _or_none(difference.error),
        "better": difference and difference.num_better,
        "worse": difference and difference.num_worse,
        "p_value": difference and difference.p_value,
        "accepted_length": counts and counts.accepted_length,
        "acceptance": counts and counts.acceptance,
        "rejected": wasted,
        "rejected_relative": wasted / least if wasted is not None and least else None,
        "ball_kl": counts and counts.ball_kl,
        "emitted_kl": None if summary.emitted_kl is None else json_number(summary.emitted_kl),
        "emitted_tv": summary.emitted_tv,
        "tokens_per_second": summary.tokens_per_second,
        "mean_length": summary.mean_length,
        "cut": summary.cut,
    }


def _or_none(value: float) -> float | None:
    """The error of a single question is not known."""
    return None if math.isnan(value) else value
