"""`cactus-hf demo`: writes an answer while showing how each token came about, then what that cost and what it gave."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .arguments import (
    HALF,
    Pair,
    add_models,
    add_sampling,
    check_models,
    encode,
    load,
    number,
    pad_token_id,
    sampling_options,
)


if TYPE_CHECKING:
    import torch


PROMPT = "Explain in a few sentences why the sky is blue."
DELTA = 0.02  # nats
NUM_ASSISTANT_TOKENS = 3
MAX_NEW_TOKENS = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo to `parser`."""
    add_models(parser)
    add = parser.add_argument_group("decoding").add_argument
    default = "(default: %(default)s)"
    add("--prompt", default=PROMPT, help=f"what to answer {default}")
    add(
        "--delta",
        type=number(0),
        default=DELTA,
        help="budget of Cactus in nats: 0 is lossless, a larger one keeps more drafts and departs further from the "
        f"target's law {default}",
    )
    count = number(1, is_whole=True)
    add("--max-new-tokens", type=count, default=MAX_NEW_TOKENS, metavar="N", help=f"length of an answer {default}")
    add(
        "--num-assistant-tokens",
        type=count,
        default=NUM_ASSISTANT_TOKENS,
        metavar="M",
        help=f"drafted tokens a round {default}",
    )
    add_sampling(add)

    add = parser.add_argument_group("output").add_argument
    add(
        "--repeats",
        type=count,
        default=3,
        metavar="N",
        help=f"timed runs of each method; fewer where they would take minutes {default}",
    )
    add("--json", action="store_true", help="print one JSON object instead")
    add(
        "--no-color",
        action="store_true",
        help="brackets instead of colours; so do NO_COLOR in the environment and an output that is not a terminal",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo and returns the exit status."""
    check_models(args)
    # Late, like all that needs torch: help and mistakes in the options are told at once
    from . import display, report
    from .comparison import Comparison, Method
    from .generation import enable
    from .packed_layers import missing_fbgemm
    from .pairs import find_device
    from .token_streamer import TokenStreamer

    if args.pack is None:
        args.pack = find_device(args.device).type == "cpu" and args.dtype in (None, "float32")
        is_named = args.pair or args.model or args.assistant_dtype
        if args.pack and args.assistant_pack is None and not (is_named or missing_fbgemm()):
            args.assistant_pack = HALF  # the embedded draft's weights are known to fit, and its law may be any
    pair = load(args)
    prompt = prompt_inputs(pair, args.prompt)
    comparison = Comparison(enable(pair.target), pair.draft, prompt, *generate_options(pair, args))
    plain, lossless, cactus = Method("plain", None), Method("lossless", 0.0), Method("cactus", args.delta)
    options: dict[str, Any] = {"speculation_kl": True}
    if not args.json:
        markup = display.ansi if display.has_color() and not args.no_color else display.marked
        models = report.describe(pair.name, pair.target, pair.draft)
        print(f"{models}\n\n{display.legend(markup)}\n\n> {args.prompt}\n")
        options["streamer"] = TokenStreamer(pair.tokenizer, markup)
    shown = comparison.generate(cactus, args.seed, **options)
    rows = comparison.rows((plain, lossless, cactus), args.seed, args.repeats, {cactus: shown})
    if args.json:
        facts = report.as_json(rows, shown, pair.tokenizer, pair.target, pair.draft)
        settings = {name: value for name, value in vars(args).items() if name not in ("run", "command", "json")}
        settings["delta"] = report.json_number(args.delta)
        print(json.dumps({"settings": settings, "pair": pair.name, **facts}, allow_nan=False))
    else:
        print(f"\n{report.table(rows)}\n\n{report.verdict(rows)}\n\n{report.NOTES}")
    return 0


def prompt_inputs(pair: Pair, prompt: str) -> dict[str, torch.Tensor]:
    """Ids and mask of `prompt`, [1, T]."""
    import torch

    ids = torch.tensor([encode(pair.tokenizer, prompt)], device=pair.target.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate_options(pair: Pair, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `generate()` for every method, and those only for methods with a draft."""
    options = {"max_new_tokens": args.max_new_tokens, "pad_token_id": pad_token_id(pair.tokenizer)}
    return options | sampling_options(args), {"num_assistant_tokens": args.num_assistant_tokens}
