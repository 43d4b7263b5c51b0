"""The options of `cactus-hf bench`, and every check on them that needs no model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..arguments import TEMPERATURE, add_models, add_sampling, check_folders, check_models, number
from ..vllm_backend import TRANSFORMERS, add_backend, check_backend, is_vllm_alone


DELTAS = (0.0, 0.5, 1.0)  # nats
MIXTURE_WEIGHT = 0.5  # of the target
MAX_NEW_TOKENS = 64
KINDS = ("plain", "stock", "cactus", "compiled", "mixture", "prompt-lookup", "auto", "economize", "flashspec")
USUAL = ("plain", "stock", "cactus", "mixture", "auto", "economize", "flashspec")
VLLM_KINDS = ("plain", "stock", "cactus", "mixture")
WITH_DELTA = ("cactus", "compiled", "auto")
SYNTHETIC = ("plain", "cactus", "compiled", "auto")  # whose acceptance can be set


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark to `parser`."""
    count, default = number(1, is_whole=True), "(default: %(default)s)"
    add_models(parser)
    parser.add_argument("--threads", type=count, metavar="N", help="of torch on a CPU (default: torch's own choice)")

    add = parser.add_argument_group("what to compare").add_argument
    add(
        "--methods",
        nargs="+",
        choices=KINDS,
        metavar="NAME",
        help=f"some of {', '.join(KINDS)} (default: all but compiled and prompt-lookup; other packages if installed)",
    )
    add("--batch-sizes", nargs="+", type=count, default=[1], metavar="B", help="rows decoded together (default: 1)")
    add(
        "--num-assistant-tokens",
        nargs="+",
        type=count,
        default=[5],
        metavar="M",
        help="drafted tokens a round (default: 5)",
    )
    add_backend(add)
    deltas = " ".join(f"{delta:g}" for delta in DELTAS)
    add("--deltas", nargs="+", type=number(0), metavar="D", help=f"budgets of Cactus in nats (default: {deltas})")
    add(
        "--mixture-weight",
        type=number(0, 1, is_open=True),
        metavar="W",
        help=f"the target's in the mixture rule (default: {MIXTURE_WEIGHT})",
    )

    add = parser.add_argument_group("prompts and sampling").add_argument
    add("--prompts", metavar="FILE", help='JSON lines with "prompt": a text or a list of messages (default: built in)')
    add("--num-prompts", type=count, metavar="N", help="the first N (default: all of a file, or enough for a batch)")
    add("--contexts", nargs="+", type=count, metavar="T", help="prompts of T tokens each, made by repeating the text")
    add("--max-new-tokens", type=count, default=MAX_NEW_TOKENS, metavar="N", help=f"of each row, no fewer {default}")
    add("--greedy", action="store_true", help="the most likely tokens instead of drawn ones")
    add_sampling(add)

    add = parser.add_argument_group("speed of a machine, whatever the weights").add_argument
    add(
        "--synthetic-acceptance",
        type=number(0, 1),
        metavar="A",
        help="keep each draft by lot with probability A: the texts mean nothing",
    )
    add(
        "--preset",
        metavar="NAME",
        help="random weights of real shapes: qwen3-0.6b+8b, ...; an unknown name lists all",
    )
    add("--layers", type=count, metavar="N", help="at most N layers of each model of the preset")

    add = parser.add_argument_group("verification alone").add_argument
    add("--verify", action="store_true", help="time the check of drafted blocks of random logits, without any model")
    add("--vocab-sizes", nargs="+", type=count, metavar="V", help="with --verify (default: 32000 151936)")

    add = parser.add_argument_group("output").add_argument
    add("--repeats", type=count, default=3, metavar="N", help=f"turns of each method {default}")
    add("--json", metavar="FILE", help="write JSON lines, one a method, batch size and draft length")
    add("--plot", metavar="FILE.png", help="write a plot of tokens/s over the batch size (needs matplotlib)")


def check_options(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: for options that contradict one another or cannot be met.
        ImportError: for a package that one of them needs.
    """
    check_models(args)
    check_backend(args)
    check_folders(args, "json", "plot")
    if args.verify:
        return _check_verify(args)
    if args.vocab_sizes:
        raise ValueError("--vocab-sizes is for --verify: models have a vocabulary of their own.")
    _check_synthetic(args)
    _check_sampling(args)
    _check_methods(args)
    if args.plot:
        from ..plotting.style import check_picture

        check_picture(args.plot, "--plot")


def _check_verify(args: argparse.Namespace) -> None:
    used = {"verify", "vocab_sizes", "batch_sizes", "num_assistant_tokens", "device", "dtype", "threads", "seed"}
    used |= {"repeats", "json", "command", "run"}
    usual = {"backend": [TRANSFORMERS], "max_new_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE, "greedy": False}
    given = [name for name, value in vars(args).items() if name not in used and value != usual.get(name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--verify times drawn logits, without models: leave {names} out.")


def _check_synthetic(args: argparse.Namespace) -> None:
    if args.preset:
        if args.pair or args.model:
            raise ValueError("--preset names both models: give either --preset, or --pair or --model.")
        if args.synthetic_acceptance is None:
            raise ValueError("--preset has random weights, of meaningless acceptance: add --synthetic-acceptance.")
        if args.prompts:
            raise ValueError("--preset has no tokenizer for --prompts: leave one of them out.")
        from .presets import check_preset

        check_preset(args.preset)
    elif args.layers:
        raise ValueError("--layers is for --preset: other models keep all of theirs.")
    if args.synthetic_acceptance is None:
        return
    if args.greedy or args.deltas:
        other = "--greedy" if args.greedy else "--deltas"
        raise ValueError(f"--synthetic-acceptance accepts by lot, where {other} means nothing: leave one out.")
    if others := set(args.methods or ()) - set(SYNTHETIC):
        raise ValueError(
            f"--synthetic-acceptance sets the acceptance of {', '.join(SYNTHETIC)} only: leave "
            f"{', '.join(sorted(others))} out of --methods."
        )


def _check_sampling(args: argparse.Namespace) -> None:
    if not args.greedy:
        return
    names = ("deltas", "mixture_weight", "top_k", "top_p")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    given += ["--temperature"] * (args.temperature != TEMPERATURE) + ["mixture"] * ("mixture" in (args.methods or ()))
    if given:
        raise ValueError(f"--greedy draws nothing and is the same under every rule: leave {', '.join(given)} out.")


def _check_methods(args: argparse.Namespace) -> None:
    named = args.methods or ()
    if args.deltas and named and not set(WITH_DELTA) & set(named):
        raise ValueError(f"--deltas is for the methods {', '.join(WITH_DELTA)}: add one of them to --methods.")
    if args.mixture_weight and named and "mixture" not in named:
        raise ValueError("--mixture-weight is for the method mixture: add it to --methods.")
    if args.mixture_weight == 1:
        raise ValueError("--mixture-weight 1 is lossless sampling: take the method cactus with --deltas 0.")
    if is_vllm_alone(args) and (others := [name for name in named if name not in VLLM_KINDS]):
        raise ValueError(
            f"vLLM runs {', '.join(VLLM_KINDS)}: leave {', '.join(others)} out of --methods, or add the backend "
            f"{TRANSFORMERS}."
        )
    from .rivals import RIVALS, check_installed

    for name in RIVALS:
        if name in named:
            check_installed(name)
            if args.top_k:
                raise ValueError(f"{name} has no top-k: leave --top-k or {name} out.")


def chosen_kinds(args: argparse.Namespace) -> Sequence[str]:
    """The methods asked for, or those that can be had."""
    from .rivals import RIVALS, is_installed

    if args.methods:
        return tuple(dict.fromkeys(args.methods))
    if is_vllm_alone(args):
        return tuple(kind for kind in VLLM_KINDS if kind != "mixture" or not args.greedy)
    kinds = tuple(kind for kind in USUAL if args.synthetic_acceptance is None or kind in SYNTHETIC)
    is_out = {"mixture": args.greedy} | {name: bool(args.top_k) or not is_installed(name) for name in RIVALS}
    return tuple(kind for kind in kinds if not is_out.get(kind))
