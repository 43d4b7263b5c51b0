"""The command line, `cactus-hf`: finds the module of a command and leaves the rest to it."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from . import __version__


class Command(NamedTuple):
    """A sub-command; its module has `add_arguments(parser)` and `run(args) -> int | None`."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("demo", "cactus_hf.demo", "watch an answer being written; compare plain, lossless and Cactus decoding"),
    Command("bench", "cactus_hf.bench.command", "measure how fast each way to decode is, and where the time goes"),
    Command("passes", "cactus_hf.passes", "time forward passes over 1, 2, ... tokens on the CPU, packed and not"),
    Command("tune", "cactus_hf.tune", "find the fastest draft length of a pair on this device, and write it down"),
    Command("calibrate", "cactus_hf.calibration.command", "find the delta for a divergence, acceptance or speed"),
    Command("eval", "cactus_hf.evaluation.command", "score acceptance rules on benchmark tasks"),
    Command("plot", "cactus_hf.plotting.command", "draw the theory, or the scores of eval, as PNG pictures"),
    Command("distill", "cactus_hf.embedded.distill", "make the embedded draft anew by distillation"),
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage block in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser(argv: Sequence[str]) -> Parser:
    """The parser for `argv`. Only the module of the command in `argv` is imported, so that help comes at once."""
    parser = Parser(prog="cactus-hf", description="Cactus speculative sampling for transformers' generate().")
    parser.add_argument("--version", action="version", version=f"cactus-hf {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for command in COMMANDS:
        description = command.summary[0].upper() + command.summary[1:] + "."
        subparser = commands.add_parser(command.name, help=command.summary, description=description)
        if command.name == chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `cactus-hf` and returns its exit status: 0, 2 for a mistake of the user's, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what an ASCII terminal cannot show
    try:
        args = make_parser(argv).parse_args(argv)
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        return 141
    except (ValueError, OSError, ImportError) as error:
        print(f"cactus-hf {argv[0]}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
