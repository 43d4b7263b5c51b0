"""`cactus-hf tune`: the draft length and delta that are fastest for a pair of models here, and a generation config."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from .arguments import (
    add_models,
    add_sampling,
    check_models,
    check_room,
    encode,
    load,
    make_output_folder,
    number,
    pad_token_id,
    sampling_options,
)


if TYPE_CHECKING:
    from .bench.prompts import Batch
    from .tuning import Found, Setting, Tuner


LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
NUM_MEASURED = 3  # of the settings with the best prediction
NOTES = (
    "m: drafts a round. draft, verify: milliseconds of drafting m tokens, and of the rest of a round, which checks "
    "m + 1. Then, for each delta, tokens a round and tokens/s of all rows together behind the first token of each, "
    "predicted from these; in brackets measured. *: the fastest."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of tuning to `parser`."""
    count, default = number(1, is_whole=True), "(default: %(default)s)"
    add_models(parser)

    add = parser.add_argument_group("what to try").add_argument
    add(
        "--lengths",
        nargs="+",
        type=number(0, is_whole=True),
        default=list(LENGTHS),
        metavar="M",
        help=f"drafted tokens a round; 0 is decoding without drafts, which is always tried (default: "
        f"{' '.join(map(str, LENGTHS))})",
    )
    add(
        "--deltas",
        nargs="+",
        type=number(0),
        default=[0.0],
        metavar="D",
        help="budgets of Cactus in nats whose texts you would take: the larger, the faster, and the further from the "
        "target's law (default: 0)",
    )
    add("--batch-sizes", nargs="+", type=count, default=[1], metavar="B", help="rows decoded together (default: 1)")

    add = parser.add_argument_group("prompts and sampling").add_argument
    add("--prompts", metavar="FILE", help='JSON lines with "prompt": a text or a list of messages (default: built in)')
    add("--num-prompts", type=count, metavar="N", help="the first N (default: as many as a batch has rows, or 2)")
    add("--max-new-tokens", type=count, default=64, metavar="N", help=f"of each text {default}")
    add_sampling(add)

    add = parser.add_argument_group("output").add_argument
    add(
        "--measure",
        action="store_true",
        help=f"measure the speed of all settings (default: of the {NUM_MEASURED} that are best by prediction)",
    )
    add("--repeats", type=count, default=3, metavar="N", help=f"runs of each that is measured {default}")
    add("--output", metavar="DIR", help="write a generation config of the fastest setting, with the costs of rounds")
    add("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Tunes, and returns the exit status."""
    check_models(args)
    make_output_folder(args)
    if max(args.lengths) == 0:
        raise ValueError("--lengths 0 alone drafts nothing: give others as well.")
    from tqdm import tqdm

    from .bench.prompts import BUILT_IN, read_prompts

    prompts = read_prompts(args.prompts) if args.prompts else list(BUILT_IN)
    pair = load(args)
    from . import report
    from .tuning import Tuner

    lengths, deltas = sorted({0, *args.lengths}), list(dict.fromkeys(args.deltas))
    # Texts go on to the same length whatever is in them
    options = {
        "max_new_tokens": args.max_new_tokens,
        "pad_token_id": pad_token_id(pair.tokenizer),
        "eos_token_id": None,
    }
    options |= sampling_options(args)
    ids = [encode(pair.tokenizer, prompt) for prompt in prompts[: args.num_prompts]]
    used = ids[: args.num_prompts or max(2, *args.batch_sizes)]
    check_room(
        pair.target.config, max(map(len, used)) + args.max_new_tokens, "give fewer --max-new-tokens or shorter prompts"
    )
    found = []
    with tqdm(desc="Tuning", unit="call", leave=False, disable=None) as bar:

        def progress(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        tuner = Tuner(pair.target, pair.draft, options, args.seed, progress)
        for size in args.batch_sizes:
            found.append(_tuned(tuner, ids, size, lengths, deltas, args))
    best = found[0].fastest()
    if args.output:
        write_config(args.output, pair.target, found, best, sampling_options(args))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("run", "command", "json")}
        settings["deltas"] = list(map(report.json_number, args.deltas))
        facts = {"settings": settings, "pair": pair.name, "device": report.device_name(pair.target)}
        facts |= {"dtype": report.dtype_name(pair.target), "versions": report.versions()}
        print(json.dumps(facts | {"batch_sizes": [as_json(each) for each in found]}, allow_nan=False))
        return 0
    print(report.describe(pair.name, pair.target, pair.draft))
    for each in found:
        print(f"\n{table(each)}")
    print(f"\n{textwrap.fill(NOTES, report.WIDTH)}")
    if args.output:
        print(f"\nWritten to {args.output}; see docs/draft_length.md.")
    return 0


def _tuned(
    tuner: Tuner, ids: list[list[int]], size: int, lengths: list[int], deltas: list[float], args: argparse.Namespace
) -> Found:
    from .bench.prompts import batches

    usual = args.num_prompts or max(2, size)
    groups: list[Batch] = batches(ids[:usual], size, tuner.options["pad_token_id"], tuner.target.device)
    tuner.generate(groups[0], None, max_new_tokens=2)  # warms up
    found = tuner.explore(groups, lengths, deltas)
    ranked = found.ranked()
    tuner.measure(found, groups, ranked if args.measure else ranked[:NUM_MEASURED], args.repeats)
    return found


def table(found: Found) -> str:
    """One batch size as aligned text."""
    from .tuning import Setting

    deltas, best = list(found.acceptance), found.fastest()
    lines = [["m", "draft", "verify", *(f"delta {delta:g}" for delta in deltas)]]
    for length, rounds in sorted(found.rounds.items()):
        cells = [str(length), *(f"{1000 * part:.1f}" for part in rounds)]
        for delta in deltas:
            setting = Setting(length, delta)
            measured = f" ({found.measured[setting]:.1f})" if setting in found.measured else ""
            mark = "*" if setting == best else ""
            cells.append(f"{found.tokens(setting):.2f} {found.predicted(setting):.1f}{measured}{mark}")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"batch size {found.batch_size}: plain generate() {found.plain:.1f} tokens/s"]
    for setting, rate in found.measured.items():
        if setting.length is None:
            text[0] += f', "auto" at delta {setting.delta:g} {rate:.1f}'
    return "\n".join(text + ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines])


def as_json(found: Found) -> dict[str, Any]:
    """One batch size as what JSON can hold."""
    from .report import json_number

    def as_facts(setting: Setting) -> dict[str, Any]:
        return {"length": setting.length, "delta": json_number(setting.delta)}

    return {
        "batch_size": found.batch_size,
        "plain": found.plain,
        "costs": found.costs(),
        "acceptance": [
            {"delta": json_number(delta), "by_position": chances} for delta, chances in found.acceptance.items()
        ],
        "auto": [as_facts(each) | {"measured": rate} for each, rate in found.measured.items() if each.length is None],
        "best": as_facts(found.fastest()),
        "cells": [
            {
                **as_facts(setting),
                "tokens_per_round": found.tokens(setting),
                "predicted": found.predicted(setting),
                "measured": found.measured.get(setting),
            }
            for setting in found.ranked()
        ],
    }


def write_config(folder: str, target: Any, found: list[Found], best: Setting, sampling: dict[str, Any]) -> None:
    """Saves what `GenerationConfig.from_pretrained` loads: the target's own with the best setting, and the costs."""
    import copy

    from .host import keep_unknown_options
    from .tuning import all_costs

    config = copy.deepcopy(target.generation_config)
    config.update(do_sample=True, **sampling)
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = max(1, best.length or 0), "auto"
    config.cactus_delta, config.speculation_costs = best.delta, all_costs(found).to_dict()
    keep_unknown_options(config)
    config.save_pretrained(folder)
