"""Checks the kernels on a GPU and measures them: `python -m cactus_hf.kernels.check`.

First the results for blocks of real sizes, against the reference, then the laws of what is drawn; then a roofline.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import cast

import torch
import transformers
import triton
from torch import Tensor

from .. import __version__
from ..acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling
from ..heuristic_rules import TopK, TypicalAcceptance
from ..law import emitted_law
from ..verification import verify_block
from .roofline import Inputs, make_inputs, measure, table
from .tiles import TILE
from .verify import verify_block as verify_fused


RULES = (
    Cactus(0.0),
    Cactus(0.3),
    Cactus(float("inf")),
    SpeculativeSampling(),
    TypicalAcceptance(),
    TypicalAcceptance(recovery="sample"),
    TopK(5),
    Mixture(0.4),
)
SHAPES = ((1, 5, 151_936), (8, 5, 151_936), (64, 5, 151_936), (3, 7, 50_257), (1, 0, 151_936))  # B, m, V
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROUNDING = 1e-5  # sums of float32 probabilities in another order
LEVEL = 1e-4  # chance that right frequencies fail


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 1 if a check failed and 2 where it cannot run."""
    args = make_parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("cactus_hf.kernels.check: it needs a CUDA device, and torch sees none.", file=sys.stderr)
        return 2
    began = time.monotonic()
    with torch.inference_mode():
        failures = [*check_agreement(), *check_laws()]
        for failure in failures:
            print(f"FAILED: {failure}")
        print(f"results and laws: {'wrong' if failures else 'right'} ({time.monotonic() - began:.0f} s)", flush=True)
        for tile in args.tiles:
            dtype = DTYPES[args.dtype]
            found = measure(args.batch_sizes, args.num_drafted, args.vocab_size, dtype, args.repeats, tile)
            bandwidth = found[0].copy_bandwidth / 1e9
            print(
                f"\nm = {args.num_drafted}, V = {args.vocab_size}, {args.dtype}, tiles of {tile}; "
                f"a copy moves {bandwidth:.0f} GB/s"
            )
            print(table(found, args.vocab_size), flush=True)
            for one in found:
                print(json.dumps({**versions(), **vars(args), "tile": tile, **one._asdict(), "of_copy": one.of_copy}))
    return 1 if failures else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cactus_hf.kernels.check",
        description="Check the fused verification on this machine's GPU, and measure it: a table and JSON lines.",
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64], metavar="B")
    parser.add_argument("--num-drafted", type=int, default=5, metavar="M", help="drafted tokens a round (default 5)")
    parser.add_argument("--vocab-size", type=int, default=151_936, metavar="V", help="default 151,936, as Qwen's")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of the logits")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="timed runs of each (default 50)")
    parser.add_argument(
        "--tiles", type=int, nargs="+", default=[TILE], metavar="LOGITS", help="tile sizes to try, powers of 2"
    )
    return parser


def versions() -> dict[str, str]:
    return {
        "cactus_hf": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(),
    }


def check_agreement(
    shapes: Sequence[tuple[int, int, int]] = SHAPES, dtypes: Sequence[str] = tuple(DTYPES), tile: int = TILE
) -> list[str]:
    """Where the kernels do not agree with the reference in float64 for the same uniforms; empty if all is well."""
    failures = []
    for seed, (batch_size, num_drafted, vocab_size) in enumerate(shapes):
        for dtype in dtypes:
            inputs = make_inputs(batch_size, num_drafted, vocab_size, DTYPES[dtype], device(), seed)
            for rule in RULES:
                for draft in (inputs.draft, None):
                    names = disagreements(inputs._replace(draft=draft), rule, tile)
                    if names:
                        failures.append(
                            f"{names} of {rule} at B {batch_size}, m {num_drafted}, V {vocab_size}, {dtype}"
                        )
    return failures


def disagreements(inputs: Inputs, rule: AcceptanceRule, tile: int = TILE) -> list[str]:
    """
    Names of the fields that differ from the reference's by more than rounding.

    What is kept and the next token are monotone in the uniforms, so they must lie between the reference's for slightly
    smaller and slightly larger ones. The other fields are compared where these two agree on what is kept.
    """
    got = verify_fused(*inputs.arguments(rule), tile=tile)
    wide = inputs._replace(
        target=inputs.target.double(), draft=None if inputs.draft is None else inputs.draft.double()
    )
    low, high = (
        verify_block(*wide._replace(uniforms=(wide.uniforms + shift).clamp(0, 1 - 2**-53)).arguments(rule))
        for shift in (-ROUNDING, ROUNDING)
    )
    is_clear = (low.num_accepted == high.num_accepted) & (low.is_boosted == high.is_boosted).all(1)
    names = [
        name
        for name in ("num_accepted", "num_verified", "draft_lengths", "bad_target", "is_boosted")
        if not torch.equal(getattr(got, name)[is_clear], getattr(low, name)[is_clear])
    ]
    if not ((high.num_accepted <= got.num_accepted) & (got.num_accepted <= low.num_accepted)).all():
        names.append("num_accepted")
    if not torch.allclose(got.ball_kl[is_clear], low.ball_kl[is_clear], atol=ROUNDING, rtol=ROUNDING):
        names.append("ball_kl")
    is_between = (low.next_token <= got.next_token) & (got.next_token <= high.next_token)
    if not is_between[is_clear].all():
        names.append("next_token")
    return names


def check_laws(
    rules: Sequence[AcceptanceRule] = RULES, size: int = 100_000, vocab_size: int = 1000, tile: int = TILE
) -> list[str]:
    """Where the frequencies of the kernels' tokens are not those of the exact laws; empty if all is well."""
    failures = []
    one = make_inputs(1, 1, vocab_size, torch.float32, device())
    draft = cast(Tensor, one.draft)
    (q, q_next), p = one.target[0].double().softmax(-1), draft[0, 0].double().softmax(-1)
    generator = torch.Generator(device()).manual_seed(1)
    inputs = Inputs(
        one.target.expand(size, -1, -1),
        torch.multinomial(p, size, replacement=True, generator=generator)[:, None],
        draft.expand(size, -1, -1),
        torch.ones(size, dtype=torch.long, device=device()),
        torch.rand(size, 2, generator=generator, dtype=torch.float64, device=device()),
    )
    for rule in rules:
        result = verify_fused(*inputs.arguments(rule), tile=tile)
        is_kept = result.num_accepted == 1
        first = torch.where(is_kept, inputs.tokens[:, 0], result.next_token)
        for what, tokens, law in (
            ("first token", first, emitted_law(q, p, rule)),
            ("extra token", result.next_token[is_kept], q_next),
        ):
            chance = chance_of(torch.bincount(tokens, minlength=vocab_size).double(), law)
            if chance < LEVEL:
                failures.append(f"{what} of {rule}: frequencies of probability {chance:.1e}")
    return failures


def chance_of(counts: Tensor, law: Tensor) -> float:
    """The p-value of a chi-square test of counts [V], tokens expected less than 5 times taken together."""
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    expected = law * counts.sum()
    is_rare = expected < 5
    observed, expected = (torch.cat([x[~is_rare], x[is_rare].sum()[None]]) for x in (counts, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.full_like(statistic, max(1, len(expected) - 1))
    return torch.special.gammaincc(degrees / 2, statistic / 2).item()


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    sys.exit(main())
