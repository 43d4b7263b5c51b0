"""`cactus-hf calibrate`: which delta has which divergence, acceptance and speed, on one's own prompts."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import (
    add_models,
    add_sampling,
    check_folders,
    check_models,
    encode,
    load,
    make_output_folder,
    number,
    pad_token_id,
    sampling_options,
)


if TYPE_CHECKING:
    from ..round_costs import RoundCosts
    from .checking import Check
    from .result import Answer, Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of calibration to `parser`."""
    count, default = number(1, is_whole=True), "(default: %(default)s)"
    add_models(parser)

    add = parser.add_argument_group("what to ask").add_argument
    add("--kl", nargs="+", type=number(0), default=[], metavar="E", help="deltas with a mean emitted KL of E nats")
    add("--acceptance", nargs="+", type=number(0, 1), default=[], metavar="A", help="deltas that keep a share A")
    add(
        "--costs",
        metavar="DIR",
        help="folder that `cactus-hf tune --output` wrote: also the fastest delta and draft length within each --kl",
    )
    add("--num-assistant-tokens", type=count, default=5, metavar="M", help=f"drafted tokens a round {default}")
    add("--deltas", nargs="+", type=number(0), metavar="D", help="budgets to try, in nats (default: 14, from 0 to 2)")
    add(
        "--check",
        type=count,
        metavar="N",
        help="decode the N prompts behind the --num-prompts ones with each answer, and compare what is reported",
    )

    add = parser.add_argument_group("prompts and sampling").add_argument
    add("--prompts", metavar="FILE", help='JSON lines with "prompt": a text or a list of messages (default: built in)')
    add("--num-prompts", type=count, metavar="N", help="the first N (default: all, or all that --check leaves)")
    add("--max-new-tokens", type=count, default=128, metavar="N", help=f"of each text {default}")
    add("--batch-size", type=count, default=8, metavar="B", help=f"prompts read together {default}")
    add_sampling(add)

    add = parser.add_argument_group("output").add_argument
    add("--resume", metavar="FILE", help="keep finished prompts in FILE, and go on with it if it is there")
    add("--output", metavar="DIR", help="write a generation config of the first answer, with --costs of the fastest")
    add("--plot", metavar="FILE.png", help="plot acceptance against emitted KL for every rule (needs matplotlib)")
    add("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Calibrates, and returns the exit status."""
    costs = _check_options(args)
    from ..bench.prompts import BUILT_IN, read_prompts

    prompts = read_prompts(args.prompts) if args.prompts else list(BUILT_IN)
    num_checked = args.check or 0
    num_prompts = args.num_prompts or max(1, len(prompts) - num_checked)
    if num_prompts + num_checked > len(prompts):
        raise ValueError(
            f"{num_prompts} prompts to calibrate and {num_checked} to check are more than the {len(prompts)} there "
            "are: give a file with more, or ask for fewer."
        )
    pair = load(args)
    from .. import report
    from . import writing
    from .measuring import DELTAS, calibrate
    from .sampling import check_pair

    options = sampling_options(args) | {"pad_token_id": pad_token_id(pair.tokenizer)}
    rest = [encode(pair.tokenizer, prompt) for prompt in prompts[num_prompts : num_prompts + num_checked]]
    if rest:
        check_pair(pair.target, pair.draft, rest, args.max_new_tokens)
    found = calibrate(
        pair.target,
        pair.draft,
        prompts[:num_prompts],
        tokenizer=pair.tokenizer,
        deltas=args.deltas or DELTAS,
        max_new_tokens=args.max_new_tokens,
        num_assistant_tokens=args.num_assistant_tokens,
        longest=max(20, args.num_assistant_tokens),
        batch_size=args.batch_size,
        seed=args.seed,
        resume=args.resume,
        **options,
    )
    try:
        answers = _answers(found, args, costs)
    except ValueError:  # an answer that there is not; the rest has taken its time, and tells what there is
        if not args.json:
            print(found)
        raise
    checks = _checks(pair, rest, answers, args, options)
    if args.output:
        # With costs the fastest one comes last
        answer = answers[-1] if costs else answers[0]
        found.save_generation_config(args.output, answer, pair.target.generation_config, costs)
    if args.plot:
        found.plot(args.plot)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("run", "command", "json")}
        facts: dict[str, Any] = {"settings": settings, "pair": pair.name, "device": report.device_name(pair.target)}
        facts |= {"dtype": report.dtype_name(pair.target), "versions": report.versions()}
        facts |= {"num_prompts": found.num_prompts, "table": writing.as_json(tuple(found.table()))}
        facts |= {"answers": writing.as_json(tuple(answers)), "checks": writing.as_json(tuple(checks))}
        print(json.dumps(facts, allow_nan=False))
        return 0
    print(f"{report.describe(pair.name, pair.target, pair.draft)}\n\n{found}\n")
    legend = writing.LEGEND.format(m=args.num_assistant_tokens, p=found.num_prompts)
    print(textwrap.fill(legend, report.WIDTH))
    for answer in answers:
        print(f"\n{textwrap.fill(writing.describe(answer), report.WIDTH)}")
        for check in checks:
            if check.answer is answer:
                print(textwrap.fill(writing.describe_check(check), report.WIDTH))
    if args.output:
        print(f"\nWritten to {args.output}; see docs/calibration.md.")
    return 0


def _check_options(args: argparse.Namespace) -> RoundCosts | None:
    """Refuses what cannot be met before models are loaded; the costs of rounds, if a folder with them was given."""
    check_models(args)
    has_answers = bool(args.kl or args.acceptance or args.costs)
    for option in ("check", "output"):
        if getattr(args, option) and not has_answers:
            raise ValueError(f"--{option} is for an answer: ask for one by --kl, --acceptance or --costs.")
    make_output_folder(args)
    check_folders(args, "resume", "plot")
    if args.plot:
        from ..plotting.style import check_picture

        check_picture(args.plot, "--plot")
    return _costs(args.costs) if args.costs else None


def _costs(folder: str) -> RoundCosts:
    from transformers import GenerationConfig

    from ..round_costs import RoundCosts

    if not Path(folder, "generation_config.json").is_file():
        raise ValueError(
            f"--costs {folder}: there is no generation_config.json. Give what `cactus-hf tune --output` wrote."
        )
    costs = getattr(GenerationConfig.from_pretrained(folder, local_files_only=True), "speculation_costs", None)
    if costs is None:
        raise ValueError(f"--costs {folder}: its generation config has no `speculation_costs`. Run `cactus-hf tune`.")
    return RoundCosts.from_dict(costs)


def _answers(found: Calibration, args: argparse.Namespace, costs: RoundCosts | None) -> list[Answer]:
    answers = [found.delta_for(kl=kl) for kl in args.kl]
    answers += [found.delta_for(acceptance=share) for share in args.acceptance]
    if costs is not None:
        answers += [found.best(costs, kl=kl, batch_size=args.batch_size) for kl in args.kl or [None]]
    return answers


def _checks(
    pair: Any, prompts: list[list[int]], answers: list[Answer], args: argparse.Namespace, options: dict[str, Any]
) -> list[Check]:
    if not prompts:
        return []
    from .checking import check
    from .sampling import Texts, enabled

    with enabled(pair.target) as target:
        texts = Texts(target, pair.draft, options | {"do_sample": True, "max_new_tokens": args.max_new_tokens})
        drafting = [answer for answer in answers if answer.num_assistant_tokens > 0]
        return [check(texts, prompts, answer, args.batch_size, args.seed + 1) for answer in drafting]
