"""A row of the table of options, and docs/options.md made from the table: `python tests/options_page.py` writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny


PAGE = Path(__file__).parents[1] / "docs" / "options.md"
Call = dict[str, Any] | Callable[[tiny.Prompts], dict[str, Any]]  # options of a call; some depend on the prompts

STATUS = {
    "equal": "as in plain `generate()`: the same greedy text, and the same law to sample from at each position",
    "honoured": "says how we draft, verify or return; the text's law is what README.md says of the rule",
    "refused": "an error before the first forward pass",
}


@dataclass(frozen=True)
class Option:
    """
    Args:
        name (`str`): of the parameter or argument.
        status (`str`): a key of `STATUS`.
        note (`str`): what it does here, and its limits.
        calls (list of calls): those whose text and law are plain `generate()`'s.
        is_inert (`bool`): whether these change nothing in plain generation either.
        refused (list of calls, each with a pattern): those that are errors, and words of the error.
        tests (list of `str`): other tests of it, as `file::name`.
    """

    name: str
    status: str
    note: str
    calls: tuple[Call, ...] = ()
    is_inert: bool = False
    refused: tuple[tuple[Call, str], ...] = ()
    tests: tuple[str, ...] = ()


def equal(name: str, note: str, *values: Any, beside: dict | None = None, **rest: Any) -> Option:
    """Plain `generate()`'s text and law under each of the option's `values`, with the options `beside` it."""
    calls = rest.pop("calls", tuple({name: value, **(beside or {})} for value in values))
    return Option(name, "equal", note, calls=calls, **rest)


def inert(name: str, note: str, *values: Any, **rest: Any) -> Option:
    """The same, of an option that has no effect on the text, in plain generation neither."""
    return equal(name, note, *values, is_inert=True, **rest)


def honoured(name: str, note: str, *values: Any, tests: tuple[str, ...], **rest: Any) -> Option:
    """An option with tests of its own; greedy texts do not depend on its `values`."""
    calls = tuple({name: value} for value in values)
    return Option(name, "honoured", note, calls=calls, is_inert=True, tests=tests, **rest)


def refused(name: str, note: str, value: Any, words: str, **beside: Any) -> Option:
    return Option(name, "refused", note, refused=(({name: value, **beside}, f"{name}.*{words}"),))


def page(sections: dict[str, tuple[Option, ...]]) -> str:
    """The text of docs/options.md."""
    parts = [
        "# Options\n\n",
        "What becomes of every parameter of transformers' `GenerationConfig` and every argument of `generate()` in\n",
        "a call with `cactus_delta`, `cactus_kl` or `acceptance_rule`. A call without them is transformers' own.\n",
        "The tests run every line, for one prompt and for a ragged batch.\n\n",
        *(f"* **{status}**: {meaning}\n" for status, meaning in STATUS.items()),
    ]
    for title, options in sections.items():
        rows = (f"| `{option.name}` | {option.status} | {option.note} |\n" for option in options)
        parts += [f"\n## {title}\n\n", "| option | status | here |\n|---|---|---|\n", *rows]
    return "".join(parts)


if __name__ == "__main__":
    from options_table import SECTIONS

    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(SECTIONS), encoding="utf-8")
