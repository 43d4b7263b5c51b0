"""`cactus-hf plot`: pictures, by the module of their name."""

from __future__ import annotations

import argparse

from . import scores, theory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="pictures", dest="picture", metavar="PICTURE", required=True)
    summary = "how gamma depends on q, what delta bounds, and acceptance against divergence for every rule"
    theory.add_arguments(kinds.add_parser("theory", help=summary, description=summary[0].upper() + summary[1:] + "."))
    scores.add_arguments(kinds)


def run(args: argparse.Namespace) -> None:
    args.draw(args)
