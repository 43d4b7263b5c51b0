"""A comparison in words and numbers: a table and a verdict for a reader, or facts for JSON."""

from __future__ import annotations

import math
import platform
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .comparison import Row, Run
from .counters import TokenKind
from .display import Detokenizer


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


WIDTH = 80  # columns
MIN_RUNS = 3  # of each method, for a verdict on speed
VISIBLE_KL = 0.1  # nats a position; texts with a weak draft were visibly damaged at a mean of 0.15
NOTES = textwrap.fill(
    "tokens/s: median of the runs, prefill included; spread: fastest less slowest run, in per cent of it. AL: drafts "
    "kept a round. acceptance: kept share of the drafts checked. emitted KL: nats a position between the law the "
    "tokens were drawn from and the target's own, in the answer shown; delta does not bound it. A larger delta buys "
    "speed with KL: read the two together.",
    WIDTH,
)


def describe(name: str, target: PreTrainedModel, draft: PreTrainedModel) -> str:
    """One line: which models, how large, on what."""
    sizes = " + ".join(f"{model.num_parameters() / 1e6:,.0f} M" for model in (target, draft))
    return f"{name} ({sizes} parameters), {dtype_name(target)} on {device_name(target)}"


def device_name(model: PreTrainedModel) -> str:
    import torch

    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    if model.device.type == "cpu":
        num_threads = torch.get_num_threads()
        return f"CPU, {num_threads} thread{'s' if num_threads > 1 else ''}"
    return str(model.device)


def dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def versions() -> dict[str, str]:
    import torch
    import transformers

    from . import __version__

    return {
        "cactus_hf": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def table(rows: list[Row]) -> str:
    """The comparison as aligned text."""
    lines: list[tuple[str, ...]] = [
        ("", "delta", "tokens/s", "spread", "x plain", "AL", "acceptance", "emitted KL", "tokens")
    ]
    for row in rows:
        lines.append(
            (
                row.method,
                "-" if row.delta is None else f"{row.delta:g}",
                f"{row.tokens_per_second:.1f}",
                f"{row.spread:.0%}" if len(row.rates) > 1 else "-",
                f"{row.tokens_per_second / rows[0].tokens_per_second:.2f}",
                "-" if row.accepted_length is None else f"{row.accepted_length:.2f}",
                "-" if row.acceptance is None else f"{row.acceptance:.2f}",
                "-" if row.emitted_kl is None else f"{row.emitted_kl:.3f}",
                "-".join(map(str, sorted({min(row.new_tokens), max(row.new_tokens)}))),
            )
        )
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]], gap: str = " ") -> str:
    """Cells in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        line[0].ljust(widths[0])
        + "".join(gap + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def verdict(rows: list[Row]) -> str:
    """What the runs of plain decoding (first row) and of Cactus (last row) say, and no more than that."""
    plain, cactus = rows[0], rows[-1]
    num_runs = len(plain.rates)
    ratio = f"{cactus.tokens_per_second / plain.tokens_per_second:.2f} times"
    if num_runs < MIN_RUNS:
        said = f"With {num_runs} of each method there are too few runs to tell a difference in speed from noise."
    elif min(cactus.rates) > max(plain.rates):
        said = f"Cactus was {ratio} as fast as plain decoding here, in {num_runs} runs of each."
    elif max(cactus.rates) < min(plain.rates):
        said = (
            f"Cactus was not faster than plain decoding here, but {ratio} as fast: a round cost more than the tokens "
            "it saved. Speculation pays where the draft is much cheaper than the target and checking several tokens "
            "costs about as much as writing one, as on a GPU or with a larger target."
        )
    else:
        said = f"No clear difference in speed between Cactus and plain decoding here: {ratio}, but the runs overlap."
    if cactus.emitted_kl is not None and cactus.emitted_kl > VISIBLE_KL:
        said += (
            f" At delta {cactus.delta:g} its text is drawn from a law {cactus.emitted_kl:.2f} nats a position away "
            "from the target's: read it before you trust the speed, and see a smaller --delta or a better draft."
        )
    return textwrap.fill(said, WIDTH)


def as_json(
    rows: list[Row],
    shown: Run,
    tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedModel,
    draft: PreTrainedModel,
) -> dict[str, Any]:
    """
    The comparison and its surroundings as what JSON can hold.

    Args:
        rows (`list[Row]`): The methods; the first is plain decoding.
        shown (`Run`): The run of a method with a draft whose text is to be reported, token by token.
        tokenizer (`PreTrainedTokenizerBase`): Turns its ids into text.
        target, draft (`PreTrainedModel`): The models.
    """
    assert shown.stats is not None
    detokenizer = Detokenizer(tokenizer)
    tokens = [
        {"id": token, "text": detokenizer.push(token), "kind": TokenKind(kind).name.lower()}
        for token, kind in zip(shown.tokens, shown.stats.kinds[0].tolist(), strict=True)
    ]
    return {
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "device": device_name(target),
        "dtype": dtype_name(target),
        "versions": versions(),
        "rows": [
            {
                "method": row.method,
                "delta": row.delta if row.delta is None else json_number(row.delta),
                "tokens_per_second": row.tokens_per_second,
                "times_plain": row.tokens_per_second / rows[0].tokens_per_second,
                "accepted_length": row.accepted_length,
                "acceptance": row.acceptance,
                "emitted_kl": row.emitted_kl,
                "new_tokens": row.new_tokens,
                "seconds": row.seconds,
            }
            for row in rows
        ],
        "text": tokenizer.decode(shown.tokens, skip_special_tokens=True),
        "tokens": tokens,
    }


def json_number(value: float) -> float | str:
    """`value`, or "inf": JSON has no infinity."""
    return value if math.isfinite(value) else "inf"
