"""`cactus-hf plot scores`, `ablation` and `deltas`: figures of what `cactus-hf eval --json` wrote."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import check_folders
from ..json_lines import read_lines as read_json_lines
from ..vllm_backend import TRANSFORMERS
from .style import BLACK, BLUE, DASHES, GREEN, ORANGE, PURPLE, SKY, YELLOW, check_picture, picture


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
FILLS = ("full", "none", "left", "right", "top", "bottom")  # of markers, by draft length
# What a line must have, by its type, and what is null in some
FIELDS: dict[type | tuple[type, ...], tuple[str, ...]] = {
    str: ("task", "method", "pair"),
    (int, float): ("questions", "score", "error", "acceptance", "tokens_per_second", "num_assistant_tokens"),
}
OPTIONAL = ("error", "acceptance", "num_assistant_tokens")


def read_lines(paths: Sequence[str]) -> list[Line]:
    """
    The lines of the files, each a method's on a task.

    Raises:
        ValueError: for a line that `eval --json` has not written.
    """
    lines = []
    for path in paths:
        for number, text in enumerate(read_json_lines(path), start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                pair, backend = line["settings"]["models"], line.get("backend", TRANSFORMERS)
                lines.append({**line, "pair": pair if backend == TRANSFORMERS else f"{pair} ({backend})"})
                _check(lines[-1])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not of `cactus-hf eval --json`: {error!r}.") from error
    if not lines:
        raise ValueError(f"{', '.join(paths)}: no lines in there.")
    return lines


def _check(line: Line) -> None:
    """Raises `KeyError` or `TypeError` for a line that lacks what pictures are made of."""
    for kind, names in FIELDS.items():
        for name in names:
            is_absent = line[name] is None and name in OPTIONAL
            if not is_absent and not isinstance(line[name], kind):
                raise TypeError(f"{name} is {line[name]!r}")


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
    check_folders(args, "output")
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in read_lines(args.files):
        groups[line["task"], line["pair"]].append(line)
    for group in groups.values():
        if args.panel is scores and not _plain(group)["error"]:
            raise ValueError(f"{group[0]['task']}: the target's score has no error to measure by. Ask more questions.")
        if args.panel is not scores and any(line["error"] is None for line in group):
            raise ValueError(f"{group[0]['task']}: scores of one question have no error. Ask more questions.")
        if args.panel is deltas and not _by_delta(group):
            raise ValueError(f"{group[0]['task']}: no finite delta is in the files. Give sps or cactus:DELTA to eval.")
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
    for (name, m), points in _families(group).items():
        colour, marker = LOOKS.get(name, OTHER)
        x = [point["acceptance"] for point in points]
        y = [(point["score"] - plain["score"]) / plain["error"] for point in points]
        panel.plot(x, y, marker, color=colour, fillstyle=_fill(m, group), label=_label(name, m, group))
        for point, at in zip(points, zip(x, y, strict=True), strict=True):
            panel.annotate(_parameter(point), at, (4, 4), textcoords="offset points", fontsize="x-small")
    panel.set_xlabel("kept share of the checked drafts")
    panel.set_ylabel("score - target's, in standard errors")
    panel.legend(fontsize="x-small")


def ablation(panel: Axes, group: list[Line]) -> None:
    """Score against acceptance of the rules that range from the target to the draft, with error bars."""
    plain = _plain(group)
    panel.axhline(100 * plain["score"], color="0.6", linewidth=1, label="target alone")
    families = _families(group)
    for (name, m), points in families.items():
        if name in ("typical", "top-k", "sps"):
            continue
        colour, marker = LOOKS.get(name, OTHER)
        points = sorted(families.get(("sps", m), []) + points, key=lambda point: point["acceptance"])
        panel.errorbar(
            [point["acceptance"] for point in points],
            [100 * point["score"] for point in points],
            yerr=[100 * point["error"] for point in points],
            marker=marker,
            fillstyle=_fill(m, group),
            color=colour,
            capsize=3,
            label=_label(name, m, group),
        )
    panel.set_xlabel("kept share of the checked drafts")
    panel.set_ylabel("score, percent")
    panel.legend(fontsize="x-small")


def deltas(panel: Axes, group: list[Line]) -> None:
    """Score, and speed as a multiple of the target's alone, against delta."""
    plain = _plain(group)
    right = panel.twinx()
    fastest = 0.0
    for (m, points), dash in zip(_by_delta(group).items(), itertools.cycle(DASHES)):
        x = [delta for delta, _ in points]
        score, error = ([100 * line[name] for _, line in points] for name in ("score", "error"))
        panel.errorbar(x, score, error, marker="o", capsize=3, color=BLUE, linestyle=dash, label=f"{m} drafts")
        speed = [line["tokens_per_second"] / plain["tokens_per_second"] for _, line in points]
        right.plot(x, speed, marker="^", linestyle=dash, color=ORANGE)
        fastest = max(fastest, *speed)
    panel.axhline(100 * plain["score"], color=BLUE, linestyle=":", linewidth=1)
    panel.set_xlabel("delta, nats (dotted: the target alone)")
    panel.set_ylabel("score, percent", color=BLUE)
    right.set_ylim(0, 1.1 * fastest)
    right.set_ylabel("speed, times the target's", color=ORANGE)
    if len(_lengths(group)) > 1:
        panel.legend(fontsize="x-small")


def _by_delta(group: Sequence[Line]) -> dict[int, list[tuple[float, Line]]]:
    """Speculative sampling and Cactus by draft length, each by its finite delta."""
    found: dict[int, list[tuple[float, Line]]] = defaultdict(list)
    for line in group:
        delta = float(_parameter(line) or 0) if family(line) in ("sps", "cactus") else math.inf
        if delta < math.inf:
            found[line["num_assistant_tokens"]].append((delta, line))
    return {m: sorted(found[m], key=lambda each: each[0]) for m in sorted(found)}


def _lengths(group: Sequence[Line]) -> list[int]:
    """The draft lengths of a panel."""
    return sorted({line["num_assistant_tokens"] for line in group} - {None})


def _fill(m: int, group: Sequence[Line]) -> Any:
    return FILLS[_lengths(group).index(m) % len(FILLS)]


def _label(name: str, m: int, group: Sequence[Line]) -> str:
    return name if len(_lengths(group)) == 1 else f"{name}, {m} drafts"


def _plain(group: Sequence[Line]) -> Line:
    for line in group:
        if family(line) == "plain":
            return line
    raise ValueError(f"{group[0]['task']}: the target alone (`--methods plain ...`) is missing from the files.")


def _families(group: Sequence[Line]) -> dict[tuple[str, int], list[Line]]:
    """The lines with a draft by rule and draft length, each by acceptance."""
    found: dict[tuple[str, int], list[Line]] = defaultdict(list)
    drafted = [line for line in group if line["acceptance"] is not None]
    for line in sorted(drafted, key=lambda each: each["acceptance"]):
        found[family(line), line["num_assistant_tokens"]].append(line)
    return found


def _parameter(line: Line) -> str:
    return line["method"].partition(":")[2]


PICTURES = {
    "scores": (scores, "eval's scores against acceptance, in standard errors of the target's own score"),
    "ablation": (ablation, "eval's scores of the gradual rules against acceptance, with error bars"),
    "deltas": (deltas, "eval's scores, and the speed, against delta"),
}
