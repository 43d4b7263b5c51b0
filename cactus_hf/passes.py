"""`cactus-hf passes`: what a forward pass costs at each number of new tokens, and what packing its layers changes."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
from typing import TYPE_CHECKING

from .arguments import check_room, number
from .measuring import timed


if TYPE_CHECKING:
    from transformers import PreTrainedModel


KINDS = {
    "ordinary": "torch's own layers",
    "packed": "`pack_linears`",
    "float16": "the same with weights in float16",
    "bfloat16": "the model cast to it, and packed",
}
WIDTHS = "1x1 1x2 1x3 1x4 1x5 1x6 1x8 1x11 8x1 8x5 1x100"


def width(text: str) -> tuple[int, int]:
    """An argparse type: rows and new tokens a row, as in "8x5"."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"needs rows and new tokens a row, such as 8x5, got {text!r}")
    return int(parts[0]), int(parts[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to `parser`."""
    add, default = parser.add_argument, "(default: %(default)s)"
    count = number(1, is_whole=True)
    add("--model", metavar="ID", help="a folder or an id on the Hub (default: the embedded target)")
    add("--draft", action="store_true", help="the embedded draft instead of the embedded target")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help=f"of the weights {default}")
    kinds = ", ".join(f"{kind} ({what})" for kind, what in KINDS.items())
    add(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=["ordinary", "packed"],
        metavar="KIND",
        help=f"layers to compare: {kinds} (default: ordinary packed)",
    )
    add("--widths", nargs="+", type=width, metavar="RxT", help=f"rows x new tokens of a pass (default: {WIDTHS})")
    add("--cached", type=count, default=100, metavar="T", help=f"tokens in the cache before the pass {default}")
    add("--repeats", type=count, default=15, metavar="N", help=f"passes of each kind, taking turns {default}")
    add("--threads", type=count, metavar="N", help="threads that torch computes with (default: torch's choice)")
    add("--json", action="store_true", help="print one line of JSON with all times instead of the table")


def run(args: argparse.Namespace) -> int:
    import torch
    from transformers import AutoModelForCausalLM, __version__

    from . import pairs
    from .embedded.draft import load_draft
    from .embedded.pair import load_target

    if args.draft and args.model:
        raise ValueError("--draft is the embedded one, and --model names another: give either.")
    if args.dtype != "float32" and "float16" in args.kinds:
        raise ValueError(f"The kind float16 rounds weights of float32: leave it or --dtype {args.dtype} out.")
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if args.model is None:
        model, _ = load_target(device="cpu", dtype=dtype)
        if args.draft:
            model = load_draft(model)
    else:
        model = pairs.from_pretrained(AutoModelForCausalLM, args.model, dtype=dtype).eval()
    widths = args.widths or [width(text) for text in WIDTHS.split()]
    check_room(
        model.config, args.cached + max(num_new for _, num_new in widths), "give fewer --cached or smaller --widths"
    )
    models = {kind: made(model, kind) for kind in dict.fromkeys(args.kinds)}
    times = measure(models, widths, args.cached, args.repeats)
    described = {
        "model": args.model or f"embedded {'draft' if args.draft else 'target'}",
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": __version__,
        "cached": args.cached,
    }
    compared = differences(models)
    if args.json:
        print(json.dumps(described | {"differences": compared, "ms": times}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    print("ms a pass of rows x new tokens".ljust(30) + "".join(f"{name:>9}" for name in next(iter(times.values()))))
    for kind, of_kind in times.items():
        for name, summary in (("fastest", min), ("median", statistics.median)):
            print(f"{kind}, {name}".ljust(30) + "".join(f"{summary(each):9.1f}" for each in of_kind.values()))
    for kind, each in compared.items():
        print(
            f"{kind} against {args.kinds[0]}: logits differ by at most {each['logits']:.2g}, laws overlap by "
            f"{each['overlap']:.5f}"
        )
    return 0


def made(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """The model with layers of one of the `KINDS`, a copy but for "ordinary"."""
    import torch

    from .packed_linears import pack_linears

    if kind == "ordinary":
        return model
    model = copy.deepcopy(model)
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    return pack_linears(model, torch.float16 if kind == "float16" else None)


def measure(
    models: dict[str, PreTrainedModel], widths: list[tuple[int, int]], num_cached: int, num_repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of forward passes, by model and width; the models take turns."""
    import torch
    from tqdm import tqdm
    from transformers import DynamicCache

    from .host import CACHE_NAME

    config = next(iter(models.values())).config
    rows = max(num_rows for num_rows, _ in widths)
    columns = num_cached + max(num_new for _, num_new in widths)
    ids = torch.randint(config.vocab_size, (rows, columns), generator=torch.Generator().manual_seed(0))

    times: dict[str, dict[str, list[float]]] = {kind: {} for kind in models}
    with torch.inference_mode():
        filled = {(kind, num_rows): DynamicCache(config=config) for kind in models for num_rows, _ in widths}
        for (kind, num_rows), cache in filled.items():
            models[kind](ids[:num_rows, :num_cached], **{CACHE_NAME: cache})
        for repeat in tqdm(range(num_repeats + 1), desc="Passes", unit="repeat", leave=False, disable=None):
            for num_rows, num_new in widths:
                for kind, model in models.items():
                    new = ids[:num_rows, num_cached : num_cached + num_new]
                    call = functools.partial(model, new, **{CACHE_NAME: copy.deepcopy(filled[kind, num_rows])})
                    _, seconds = timed(call, model.device)
                    if repeat > 0:  # the first is warm-up
                        times[kind].setdefault(f"{num_rows}x{num_new}", []).append(1e3 * seconds)
    return times


def differences(models: dict[str, PreTrainedModel]) -> dict[str, dict[str, float]]:
    """Of each other model from the first, over 64 random tokens: the largest of the logits, and the mean overlap of
    the laws, the share that speculative sampling would keep of one's drafts for the other.
    """
    import torch

    vocab_size = next(iter(models.values())).config.vocab_size
    ids = torch.randint(vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = {kind: model(ids).logits.float() for kind, model in models.items()}
    first, *others = logits
    found = {}
    for kind in others:
        # A trimmed draft has logits of minus infinity, which differ by nan
        largest = (logits[kind] - logits[first]).abs().nan_to_num(0).max()
        overlap = torch.minimum(logits[kind].softmax(-1), logits[first].softmax(-1)).sum(-1).mean()
        found[kind] = {"logits": float(largest), "overlap": float(overlap)}
    return found
