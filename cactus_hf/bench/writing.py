"""What `bench` found, as a table for people, JSON lines for programs, and a plot."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plotting.style import picture
from ..report import aligned, json_number
from .methods import Method
from .options import WITH_DELTA
from .running import Cell, Result


if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 100  # columns
HEADINGS = (
    "",
    "delta",
    "m",
    "tok/s",
    "+-",
    "x",
    "t/r",
    "AL",
    "acc",
    "target",
    "draft",
    "over",
    "eff",
    "ball",
    "KL",
    "MB",
)
LEGEND = {
    "delta": "budget of Cactus in nats; 0 is lossless.",
    "m": "drafts a round.",
    "tok/s": "tokens a second, all rows together, prompts included: median of the turns.",
    "+-": "fastest less slowest turn, in per cent of it.",
    "x": "times plain decoding.",
    "t/r": "tokens a round and row.",
    "AL": "drafts kept a round.",
    "acc": "kept share of the drafts checked.",
    "target, draft": "ms a pass of the model, in the loop, of its most usual width.",
    "over": "ms a round that are spent outside the models: round less passes, in the loop.",
    "eff": "time that the same passes take outside any loop, on a bare cache, / time taken.",
    "ball, KL": "nats a checked draft: KL of the law aimed at, and of the law emitted, from the target's.",
    "MB": "peak memory in 10^6 bytes, {memory}.",
    "*": "one row after another: the method takes no batch.",
}


def table(cell: Cell, results: Sequence[Result], synthetic: float | None) -> str:
    """The results of a cell in columns, under a line that says what was asked for."""
    rows = "1 row" if cell.batch_size == 1 else f"{cell.batch_size} rows a batch"
    new_tokens = results[0].new_tokens[0] // (cell.batch_size * len(cell.batches))
    title = f"{rows}, prompts of {cell.mean_prompt_len:.0f} tokens on average, {new_tokens} new tokens a row"
    lines = [HEADINGS, *(_cells(each, results, synthetic) for each in results)]
    return f"{title}\n{aligned(lines)}"


def _cells(result: Result, results: Sequence[Result], synthetic: float | None) -> tuple[str, ...]:
    counts = result.counts
    return (
        name(result, synthetic) + "*" * result.is_row_by_row,
        _written(result.method.delta, "g"),
        _written(result.method.num_drafts, "d"),
        f"{result.tokens_per_second:.1f}",
        f"{result.spread:.0%}",
        _written(times_plain(result, results), ".2f"),
        _written(counts and counts.tokens_per_round, ".2f"),
        _written(counts and counts.accepted_length, ".2f"),
        _written(counts and counts.acceptance, ".2f"),
        _written(result.pass_ms("target"), ".1f"),
        _written(result.pass_ms("draft"), ".1f"),
        _written(result.overhead_ms, ".1f"),
        _written(result.efficiency, ".2f"),
        _written(_ball_kl(result, synthetic), ".3f"),
        _written(result.emitted_kl, ".3f"),
        _written(result.peak_memory and result.peak_memory[0] / 1e6, ".0f"),
    )


def _written(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def name(result: Result, synthetic: float | None) -> str:
    """What a method is called in tables."""
    return "synthetic" if synthetic is not None and result.method.kind == "cactus" else result.method.title


def times_plain(result: Result, results: Sequence[Result]) -> float | None:
    """Speed in units of plain decoding's in the same cell and backend, if that was run."""
    alone = Method("plain", backend=result.method.backend)
    plain = next((each for each in results if each.method == alone), None)
    return None if plain is None else result.tokens_per_second / plain.tokens_per_second


def _ball_kl(result: Result, synthetic: float | None) -> float | None:
    """`None` where there is no such law, or it is not known."""
    has_law = result.method.kind in (*WITH_DELTA, "prompt-lookup") and synthetic is None
    return result.counts.ball_kl if has_law and result.counts is not None else None


def legend(cells: Sequence[tuple[Cell, Sequence[Result]]]) -> str:
    """What the columns are, without those that nothing here has."""
    results = [result for _, results in cells for result in results]
    memory = next((each.peak_memory[1] for each in results if each.peak_memory), "not known here")
    is_starred = any(result.is_row_by_row for result in results)
    said = " ".join(f"{key}: {text}" for key, text in LEGEND.items() if key != "*" or is_starred)
    return textwrap.fill(said.format(memory=memory), WIDTH)


def records(
    cells: Sequence[tuple[Cell, Sequence[Result]]], synthetic: float | None, facts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """One a method, batch size and draft length, each with all that `facts` say of the run."""
    for cell, results in cells:
        for result in results:
            counts = result.counts
            yield {
                "method": result.method.kind,
                "backend": result.method.backend,
                "delta": None if result.method.delta is None else json_number(result.method.delta),
                "num_assistant_tokens": result.method.num_drafts,
                "batch_size": cell.batch_size,
                "context": cell.context,
                "mean_prompt_len": cell.mean_prompt_len,
                "is_row_by_row": result.is_row_by_row,
                "synthetic_acceptance": synthetic,
                "tokens_per_second": result.tokens_per_second,
                "spread": result.spread,
                "times_plain": times_plain(result, results),
                "rounds": counts and counts.rounds,
                "tokens_per_round": counts and counts.tokens_per_round,
                "accepted_length": counts and counts.accepted_length,
                "acceptance": counts and counts.acceptance,
                "verified": counts and counts.verified,
                "target_ms": result.pass_ms("target"),
                "draft_ms": result.pass_ms("draft"),
                "round_ms": result.round_ms,
                "in_forwards_ms": result.in_forwards_ms,
                "overhead_ms": result.overhead_ms,
                "overhead_bare_ms": result.overhead_bare_ms,
                "efficiency": result.efficiency,
                "ball_kl": _ball_kl(result, synthetic),
                "emitted_kl": result.emitted_kl,
                "peak_memory_bytes": result.peak_memory and result.peak_memory[0],
                "peak_memory_kind": result.peak_memory and result.peak_memory[1],
                "new_tokens": result.new_tokens,
                "seconds": result.seconds,
                "forwards": [
                    {**each.shape._asdict(), "count": each.num, "in_situ_ms": each.in_situ, "bare_ms": each.bare}
                    for each in result.passes
                ],
                **facts,
            }


def write_json_lines(path: str, lines: Iterator[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    Path(path).write_text(text, encoding="utf-8")


def plot(path: str, cells: Sequence[tuple[Cell, Sequence[Result]]], synthetic: float | None, title: str) -> None:
    """Tokens a second over the batch size, a panel for each context, with the range of the turns."""
    contexts = list(dict.fromkeys(cell.context for cell, _ in cells))
    with picture(path, 1 + 5 * len(contexts), 5) as figure:
        panels = figure.subplots(1, len(contexts), squeeze=False)[0]
        for panel, context in zip(panels, contexts, strict=True):
            _draw(panel, [(cell, results) for cell, results in cells if cell.context == context], synthetic)
            panel.set_title("prompts as they are" if context is None else f"prompts of {context} tokens")
        figure.suptitle(title, fontsize="small")


def _draw(panel: Axes, cells: Sequence[tuple[Cell, Sequence[Result]]], synthetic: float | None) -> None:
    lines: dict[str, list[tuple[int, Result]]] = defaultdict(list)
    for cell, results in cells:
        for result in results:
            lines[label(result, synthetic)].append((cell.batch_size, result))
    for text, points in lines.items():
        sizes, median = [size for size, _ in points], [each.tokens_per_second for _, each in points]
        below = [each.tokens_per_second - min(each.rates) for _, each in points]
        above = [max(each.rates) - each.tokens_per_second for _, each in points]
        panel.errorbar(sizes, median, yerr=[below, above], marker="o", capsize=3, label=text)
    panel.set_xscale("log", base=2)
    sizes = sorted({cell.batch_size for cell, _ in cells})
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.set_xlabel("rows a batch")
    panel.set_ylabel("tokens/s")
    panel.set_ylim(bottom=0)
    panel.legend()


def label(result: Result, synthetic: float | None) -> str:
    """A method with its settings, for a plot."""
    num_drafts, delta = result.method.num_drafts, result.method.delta
    settings = [] if delta is None else [f"delta {delta:g}"]
    settings += [] if num_drafts is None else [f"m {num_drafts}"]
    return " ".join([name(result, synthetic), *settings]) + " (row by row)" * result.is_row_by_row
