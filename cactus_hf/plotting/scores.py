"""`cactus-hf plot scores`, `ablation` and `deltas`: figures of what `cactus-hf eval --json` wrote."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..vllm_backend import TRANSFORMERS
from .style import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW, check_picture, picture


if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = dict[str, Any]
LOOKS = {
    "plain": (BLACK, "_"),
    "sps": (BLACK, "s"),
    "cactus": (BLUE, "o"),
    "mixture": (ORANGE, "^"),
    "typical": (GREEN, "D"),
    "top-k": (PURPLE, "v"),
    "lenience": (SKY, "P"),
    "mentored": (YELLOW, "X"),
    "kl": (BLUE, "*"),
}
OTHER = ("#666666", "x")


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
                pair, backend = line["settings"]["models"], line.get("backend", TRANSFORMERS)
                lines.append({**line, "pair": pair if backend == TRANSFORMERS else f"{pair} ({backend})"})
                family(lines[-1]), lines[-1]["score"], lines[-1]["accepted_length"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not of `cactus-hf eval --json`: {error!r}.") from error
    if not lines:
        raise ValueError(f"{', '.join(paths)}: no lines in there.")
    return lines


def family(line: Line) -> str:
    """The rule's name without its parameter."""
    return line["method"].partition(":")[0]


def add_arguments(kinds: Any) -> None:
    """Adds the pictures to `plot`'s subparsers."""
    for name, (draw, summary) in PICTURES.items():
        parser = kinds.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        parser.add_argument("files", nargs="+", metavar="FILE", help="what `cactus-hf eval --json` wrote")
        parser.add_argument("--output", required=True, metavar="FILE.png", help="the picture")
        parser.set_defaults(draw=run, panel=draw)


def run(args: argparse.Namespace) -> None:
    """Draws one of the pictures, with a panel for each task and pair."""
    check_picture(args.output, "--output")
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in read_lines(args.files):
        groups[line["task"], line["pair"]].append(line)
    for group in groups.values():
        if not _plain(group)["error"]:
            raise ValueError(f"{group[0]['task']}: the target's score has no error to measure by. Ask more questions.")
    with picture(args.output, 0.6 + 4.6 * len(groups), 4.0) as figure:
        panels = figure.subplots(1, len(groups), squeeze=False)[0]
        for panel, ((task, pair), group) in zip(panels, groups.items(), strict=True):
            args.panel(panel, group)
            panel.set_title(f"{task}, {_numbers(group)} questions\n{_short(pair)}", fontsize="small")


def _numbers(group: Sequence[Line]) -> str:
    """How many questions were answered, by all methods or by some."""
    least, most = (choose(line["questions"] for line in group) for choose in (min, max))
    return str(least) if least == most else f"{least} to {most}"


def _short(pair: str) -> str:
    """The models' names without their folders."""
    return " + ".join(Path(part).name for part in pair.split(" + "))


def scores(panel: Axes, group: list[Line]) -> None:
    """Score against acceptance, as in the paper's figure 1: the score's distance from the target's, in its errors."""
    plain = _plain(group)
    panel.axhspan(-1, 1, color="0.92", label="1 standard error of the target")
    panel.axhline(0, color="0.6", linewidth=1)
    for name, points in _families(group).items():
        colour, marker = LOOKS.get(name, OTHER)
        x = [point["acceptance"] for point in points]
        y = [(point["score"] - plain["score"]) / plain["error"] for point in points]
        panel.plot(x, y, marker, color=colour, label=name)
        for point, at in zip(points, zip(x, y, strict=True), strict=True):
            panel.annotate(_parameter(point), at, (4, 4), textcoords="offset points", fontsize="x-small")
    panel.set_xlabel("kept share of the checked drafts")
    panel.set_ylabel("score - target's, in standard errors")
    panel.legend(fontsize="x-small")


def ablation(panel: Axes, group: list[Line]) -> None:
    """Score against acceptance of the rules that range from the target to the draft, with error bars."""
    plain = _plain(group)
    panel.axhline(100 * plain["score"], color="0.6", linewidth=1, label="target alone")
    sps = [line for line in group if family(line) == "sps"]
    for name, points in _families(group).items():
        if name in ("typical", "top-k", "sps"):
            continue
        colour, marker = LOOKS.get(name, OTHER)
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


def deltas(panel: Axes, group: list[Line]) -> None:
    """Score, and speed as a multiple of the target's alone, against delta."""
    plain = _plain(group)
    found = [(float(_parameter(line) or 0), line) for line in group if family(line) in ("sps", "cactus")]
    points = sorted((each for each in found if each[0] < math.inf), key=lambda each: each[0])
    x = [delta for delta, _ in points]
    score = [100 * line["score"] for _, line in points]
    panel.errorbar(x, score, [100 * line["error"] for _, line in points], marker="o", capsize=3, color=BLUE)
    panel.axhline(100 * plain["score"], color=BLUE, linestyle=":", linewidth=1)
    panel.set_xlabel("delta, nats (dotted: the target alone)")
    panel.set_ylabel("score, percent", color=BLUE)
    right = panel.twinx()
    speed = [line["tokens_per_second"] / plain["tokens_per_second"] for _, line in points]
    right.plot(x, speed, "^--", color=ORANGE)
    right.set_ylim(0, 1.1 * max(speed))
    right.set_ylabel("speed, times the target's", color=ORANGE)


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


PICTURES = {
    "scores": (scores, "eval's scores against acceptance, in standard errors of the target's own score"),
    "ablation": (ablation, "eval's scores of the gradual rules against acceptance, with error bars"),
    "deltas": (deltas, "eval's scores, and the speed, against delta"),
}
