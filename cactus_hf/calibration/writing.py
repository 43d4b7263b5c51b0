"""A calibration as a table, a picture, a generation config, or what JSON can hold."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..plotting import style
from ..report import aligned, json_number


if TYPE_CHECKING:
    from ..round_costs import RoundCosts
    from .checking import Check
    from .result import Answer, Calibration, Estimate, Line

LEGEND = (
    "Expected of runs with {m} drafts a round on other prompts of the same kind, with standard errors from {p} "
    "resampled prompts. acceptance: kept share of the drafts checked. AL: drafts kept a round. KL, TV: nats and total "
    "variation a checked draft, of the law emitted from the target's. ball: nats, of the law aimed at once the draft "
    "is known. limit: no rule has less KL at its acceptance."
)
POINTS = ("TypicalAcceptance", "TopK", "SpeculativeSampling")  # kinds whose settings lie on no curve
HEADINGS = ("", "acceptance", "+-", "AL", "+-", "KL", "+-", "TV", "ball")


def text(calibration: Calibration, num_assistant_tokens: int | None = None) -> str:
    """The table for people."""
    return aligned([HEADINGS, *(_cells(line) for line in calibration.table(num_assistant_tokens))])


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.label,
        *_with_error(line.position_acceptance, ".3f"),
        *_with_error(line.accepted_length, ".2f"),
        *_with_error(line.emitted_kl, ".4f"),
        f"{line.emitted_tv.value:.3f}",
        f"{line.ball_kl.value:.4f}" if line.kind == "Cactus" else "-",
    )


def _with_error(estimate: Estimate, form: str) -> tuple[str, str]:
    value, error = estimate
    return format(value, form), format(error, form) if math.isfinite(error) else "-"


def describe(answer: Answer) -> str:
    """An answer in a line."""
    low, high = answer.interval
    said = f"delta {answer.delta:.4g} ({low:.4g} to {high:.4g}), {answer.num_assistant_tokens} drafts a round: "
    said += f"KL {answer.emitted_kl}, acceptance {answer.position_acceptance}, AL {answer.accepted_length}"
    if answer.tokens_per_second is not None:
        said += f", {answer.tokens_per_second:.1f} tokens/s"
    return said


def describe_check(check: Check) -> str:
    """What came of an answer, in a line."""
    return (
        f"Reported on {check.num_prompts} other prompts: KL {check.emitted_kl} ({check.kl_ratio - 1:+.1%}), "
        f"acceptance {check.position_acceptance}, AL {check.accepted_length}"
    )


def as_json(value: Any) -> Any:
    """Estimates, lines and answers as what JSON can hold."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: as_json(each) for name, each in value._asdict().items()}
    if isinstance(value, tuple):
        return [as_json(each) for each in value]
    if isinstance(value, float):
        return None if math.isnan(value) else json_number(value)
    return value


def save_generation_config(
    folder: str | os.PathLike, answer: Answer, options: dict[str, Any], config: Any, costs: RoundCosts | None
) -> None:
    """See [`Calibration.save_generation_config`]; `options` are those of the calibration's calls."""
    from transformers import GenerationConfig

    from ..host import keep_unknown_options

    config = GenerationConfig() if config is None else copy.deepcopy(config)
    known = {name: value for name, value in options.items() if hasattr(config, name) and name != "max_new_tokens"}
    config.update(**known)
    config.num_assistant_tokens = max(1, answer.num_assistant_tokens)
    # Where drafts do not pay, the schedule "auto" makes none at these costs
    config.num_assistant_tokens_schedule = "constant" if answer.num_assistant_tokens else "auto"
    config.assistant_confidence_threshold = 0.0
    config.cactus_delta = answer.delta
    if costs is not None:
        config.speculation_costs = costs.to_dict()
    keep_unknown_options(config)
    config.save_pretrained(folder)


def plot(path: str | os.PathLike, calibration: Calibration) -> None:
    """
    Acceptance against emitted KL, both in the mean over all positions of the texts, a curve for each kind of rule.

    The limit holds for such plain means. In those of a run, which weight positions as rounds verify them, it may be
    passed by a little.
    """
    style.check_picture(path, "A plot")
    with style.picture(path, 7, 5) as figure:
        axes = figure.subplots()
        looks = itertools.cycle(zip(style.COLOURS, style.DASHES, strict=True))
        for kind, points in _curves(calibration):
            x, y = zip(*sorted(points), strict=True)
            if kind == "limit":
                axes.plot(x, y, color="black", linewidth=0.8, label=kind)
            else:
                colour, dashes = next(looks)
                linestyle = "none" if kind in POINTS else dashes
                axes.plot(x, y, marker="o", linestyle=linestyle, color=colour, label=kind, markersize=4)
        axes.set_xlabel("emitted KL, nats a position")
        axes.set_ylabel("acceptance, mean over positions")
        axes.set_xlim(left=0)
        axes.legend()


def _curves(calibration: Calibration) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """KL and acceptance of each kind of rule with a finite KL; the limit begins where the lossless rule is."""
    count, acceptance, kl, _ = calibration.positions.sum(0).unbind(-1)
    points: dict[str, list[tuple[float, float]]] = {}
    means = zip((kl / count).tolist(), (acceptance / count).tolist(), strict=True)
    for setting, (x, y) in zip(calibration.header["settings"], means, strict=True):
        if math.isfinite(x):
            points.setdefault(setting["kind"], []).append((x, y))
    if points.get("Cactus") and calibration.deltas[0] == 0 and "limit" in points:
        points["limit"].insert(0, points["Cactus"][0])
    yield from points.items()
