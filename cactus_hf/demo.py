"""`cactus-hf demo`: writes an answer while showing how each token came about, then what that cost and what it gave."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


PROMPT = "Explain in a few sentences why the sky is blue."
DELTA = 0.02  # nats
NUM_ASSISTANT_TOKENS = 3
MAX_NEW_TOKENS = 96


class Pair(NamedTuple):
    """What the demo runs on."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def number(
    lowest: float, highest: float = math.inf, *, is_whole: bool = False, is_open: bool = False
) -> Callable[[str], float]:
    """An argparse type: a number in [lowest, highest], or only above `lowest` where `is_open`."""

    def parse(text: str) -> float:
        try:
            value = int(text) if is_whole else float(text)
        except ValueError:
            value = math.nan
        if not (lowest < value <= highest or (value == lowest and not is_open)):
            bounds = f"{'above' if is_open else 'of at least'} {lowest:g}"
            bounds += f" and at most {highest:g}" if highest < math.inf else ""
            raise argparse.ArgumentTypeError(f"needs a {'whole ' * is_whole}number {bounds}, got {text!r}")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo to `parser`."""
    add = parser.add_argument_group("models", "without any of these: the embedded pair").add_argument
    add("--pair", metavar="NAME", help="a pair on the Hub, such as qwen3-8b; an unknown name lists all")
    add("--model", metavar="ID", help="target: a folder or an id on the Hub")
    add("--assistant", metavar="ID", help="draft with the target's tokenizer: a folder or an id on the Hub")
    add("--device", help="cpu, cuda, cuda:1, ... (default: the GPU if there is one)")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="of the weights (default: the checkpoint's on a GPU, float32 on a CPU)")

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
    add("--temperature", type=number(0, is_open=True), default=0.7, metavar="T", help=default)
    add("--top-k", type=count, metavar="K", help="(default: off)")
    add("--top-p", type=number(0, 1, is_open=True), metavar="P", help="(default: off)")
    add("--seed", type=number(0, is_whole=True), default=0, help=default)

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
    pair = load(args)
    # Late, like all that needs torch: help and mistakes in the options are told at once
    from . import display, report
    from .comparison import Comparison, Method
    from .generation import enable

    comparison = Comparison(enable(pair.target), pair.draft, encode(pair, args.prompt), *generate_options(pair, args))
    plain, lossless, cactus = Method("plain", None), Method("lossless", 0.0), Method("cactus", args.delta)
    options: dict[str, Any] = {"speculation_kl": True}
    if not args.json:
        markup = display.ansi if has_color(args) else display.marked
        models = report.describe(pair.name, pair.target, pair.draft)
        print(f"{models}\n\n{display.legend(markup)}\n\n> {args.prompt}\n")
        options["streamer"] = display.TokenStreamer(pair.tokenizer, markup)
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


def check_models(args: argparse.Namespace) -> None:
    """Refuses options that name two pairs, or half of one."""
    if args.pair and (args.model or args.assistant):
        raise ValueError("--pair names both models: give either --pair, or --model and --assistant.")
    if bool(args.model) != bool(args.assistant):
        missing = "--assistant (the draft)" if args.model else "--model (the target)"
        raise ValueError(f"--model and --assistant belong together: {missing} is missing.")


def load(args: argparse.Namespace) -> Pair:
    """The pair that the options name, or else the embedded one."""
    import torch

    from . import pairs

    names = pairs.named(args.pair) if args.pair else (args.model, args.assistant)
    device = pairs.find_device(args.device)
    dtype = args.dtype and getattr(torch, args.dtype)
    if all(names):
        return Pair(" + ".join(names), *pairs.load(*names, device=device, dtype=dtype))
    from . import embedded

    return Pair("embedded pair", *embedded.load_pair(device=device, dtype=dtype))


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
    """Options of `generate()` for every method, and those only for methods with a draft."""
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


def has_color(args: argparse.Namespace) -> bool:
    is_refused = args.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not is_refused and sys.stdout.isatty()
