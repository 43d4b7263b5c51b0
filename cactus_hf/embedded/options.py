"""Dataclass fields as command-line options, so that name, default and explanation stand in one place."""

from __future__ import annotations

import argparse
from dataclasses import field, fields
from functools import partial
from typing import Any, TypeVar


Config = TypeVar("Config")


def option(default: object, help: str) -> Any:
    """A dataclass field with an explanation. None as the default stands for an optional float."""
    return field(default=default, metadata={"help": help})


def add_options(parser: argparse.ArgumentParser, config: Any) -> None:
    """Adds an option for each field of the dataclass `config`; tuples are comma-separated."""
    for item in fields(config):
        default: Any = item.default
        kind: Any = float if default is None else type(default)
        if isinstance(default, tuple):
            kind = partial(parse_tuple, kind=type(default[0]))
        help = f"{item.metadata['help']} (default: {default})"
        parser.add_argument("--" + item.name.replace("_", "-"), type=kind, default=default, help=help)


def parse_tuple(text: str, kind: type) -> tuple:
    return tuple(kind(part) for part in text.split(","))


def read_options(args: argparse.Namespace, config: type[Config]) -> Config:
    """The dataclass filled from parsed arguments."""
    return config(**{item.name: getattr(args, item.name) for item in fields(config)})  # type: ignore[arg-type]
