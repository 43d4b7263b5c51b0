"""Figures of what `eval --json` wrote: score against acceptance, for every rule or the gradual ones; against delta."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = dict[str, Any]
# Colour-blind safe (Okabe & Ito), with a marker each
LOOKS = {
    "plain": ("#000000", "_"),
    "sps": ("#000000", "s"),
    "cactus": ("#0072B2", "o"),
    "mixture": ("#D55E00", "^"),
    "typical": ("#009E73", "D"),
    "top-k": ("#CC79A7", "v"),
    "lenience": ("#56B4E9", "P"),
    "mentored": ("#E69F00", "X"),
    "kl": ("#999933", "*"),
}


def read_lines(paths: Sequence[str]) -> list[Line]:
    """
    The lines of the files, each a method's on a task.

    Raises:
        ValueError: for a line that `eval --json` has not written.
    """
    lines = []
    for path in paths:
        for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                line = json.loads(text)
                lines.append({**line, "pair": line["settings"]["models"]})
                family(lines[-1]), lines[-1]["score"], lines[-1]["accepted_length"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not of `cactus-hf eval --json`: {error!r}.") from error
    if not lines:
        raise ValueError(f"{', '.join(paths)}: no lines in there.")
    return lines


def family(line: Line) -> str:
    """The rule's name without its parameter."""
    return line["method"].partition(":")[0]


def panels(lines: Sequence[Line], draw: Callable[[Axes, list[Line]], None], height: float = 4.0) -> Figure:
    """A panel for each task and pair."""
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        groups[line["task"], line["pair"]].append(line)
    figure = Figure(figsize=(0.6 + 4.6 * len(groups), height), layout="constrained")
    for panel, ((task, pair), group) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        draw(panel, group)
        panel.set_title(f"{task}, n = {min(line['questions'] for line in group)}\n{_short(pair)}", fontsize="small")
    return figure


def _short(pair: str) -> str:
    """The models' names without their folders."""
    return " + ".join(Path(part).name for part in pair.split(" + "))


def scores(lines: Sequence[Line]) -> Figure:
    """Score against acceptance, as in the paper's figure 1: the score's distance from the target's, in its errors."""

    def draw(panel: Axes, group: list[Line]) -> None:
        plain = _plain(group)
        panel.axhspan(-1, 1, color="0.92", label="1 standard error of the target")
        panel.axhline(0, color="0.6", linewidth=1)
        for name, points in _families(group).items():
            colour, marker = LOOKS.get(name, ("#666666", "x"))
            x = [point["acceptance"] for point in points]
            y = [(point["score"] - plain["score"]) / plain["error"] for point in points]
            panel.plot(x, y, marker, color=colour, label=name)
            for point, at in zip(points, zip(x, y, strict=True), strict=True):
                panel.annotate(_parameter(point), at, (4, 4), textcoords="offset points", fontsize="x-small")
        panel.set_xlabel("kept share of the checked drafts")
        panel.set_ylabel("score - target's, in standard errors")
        panel.legend(fontsize="x-small")

    return panels(lines, draw)


def ablation(lines: Sequence[Line]) -> Figure:
    """Score against acceptance of the rules that range from the target to the draft, with error bars."""

    def draw(panel: Axes, group: list[Line]) -> None:
        plain = _plain(group)
        panel.axhline(100 * plain["score"], color="0.6", linewidth=1, label="target alone")
        sps = [line for line in group if family(line) == "sps"]
        for name, points in _families(group).items():
            if name in ("typical", "top-k", "sps"):
                continue
            colour, marker = LOOKS.get(name, ("#666666", "x"))
            points = sorted(sps + points, key=lambda point: point["acceptance"])
            panel.errorbar(
                [point["acceptance"] for point in points],
                [100 * point["score"] for point in points],
                yerr=[100 * point["error"] for point in points],
                marker=marker,
                color=colour,
                capsize=3,
                label=name,
            )
        panel.set_xlabel("kept share of the checked drafts")
        panel.set_ylabel("score, percent")
        panel.legend(fontsize="x-small")

    return panels(lines, draw)


def deltas(lines: Sequence[Line]) -> Figure:
    """Score, and speed as a multiple of the target's alone, against delta."""

    def draw(panel: Axes, group: list[Line]) -> None:
        plain = _plain(group)
        found = [(float(_parameter(line) or 0), line) for line in group if family(line) in ("sps", "cactus")]
        points = sorted((each for each in found if each[0] < math.inf), key=lambda each: each[0])
        x = [delta for delta, _ in points]
        score = [100 * line["score"] for _, line in points]
        blue, orange = LOOKS["cactus"][0], LOOKS["mixture"][0]
        panel.errorbar(x, score, [100 * line["error"] for _, line in points], marker="o", capsize=3, color=blue)
        panel.axhline(100 * plain["score"], color=blue, linestyle=":", linewidth=1)
        panel.set_xlabel("delta, nats (dotted: the target alone)")
        panel.set_ylabel("score, percent", color=blue)
        right = panel.twinx()
        speed = [line["tokens_per_second"] / plain["tokens_per_second"] for _, line in points]
        right.plot(x, speed, "^--", color=orange)
        right.set_ylim(bottom=0)
        right.set_ylabel("speed, times the target's", color=orange)

    return panels(lines, draw)


def _plain(group: Sequence[Line]) -> Line:
    for line in group:
        if family(line) == "plain":
            return line
    raise ValueError(f"{group[0]['task']}: the target alone (`--methods plain ...`) is missing from the files.")


def _families(group: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines with a draft by rule, each by acceptance."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in sorted(
        (line for line in group if line["acceptance"] is not None), key=lambda each: each["acceptance"]
    ):
        found[family(line)].append(line)
    return found


def _parameter(line: Line) -> str:
    return line["method"].partition(":")[2]
