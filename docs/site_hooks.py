"""What MkDocs needs to know of this project: its dialect of docstrings, and the help of its commands."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

import cactus_hf
from cactus_hf import cli


# "name, other (`type` of shape [B], *optional*, defaults to `1`): ..." and the lines that go on farther to the right
ITEM = re.compile(r"^( +)([\w*, ]+?) \((`.*|\[`.*|list of .*)\):(.*(?:\n\1 +.*)*)$", re.MULTILINE)
WIDTH = 100  # columns of a command's help


class HuggingFaceDocstrings(griffe.Extension):
    """Turns Hugging Face's dialect into the one that mkdocstrings reads."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_google(obj.docstring.value)


def as_google(docstring: str) -> str:
    """Links to public names; one entry a parameter, with its type as plain words; returned values as text."""
    text = re.sub(r"\[`(\w+)`\](?!\[)", _link, ITEM.sub(_entries, docstring))
    text = text.replace("Class attributes:", "Attributes:")
    return re.sub(r"^( *)Returns:\n((?:\1 +\S.*\n?|\n(?=\1 ))+)", _returned, text, flags=re.MULTILINE)


def _link(reference: re.Match[str]) -> str:
    name = reference[1]
    return f"[`{name}`][cactus_hf.{name}]" if name in cactus_hf.__all__ else f"`{name}`"


def _entries(item: re.Match[str]) -> str:
    """An entry for each parameter; the signature says already what is optional."""
    indent, names, kind, text = item.groups()
    kind = re.sub(r",? \*optional\*|, defaults to [^,]*$", "", kind)
    kind = re.sub(r"\[`(\w+)`\]", r"\1", kind).replace("`", "")
    return "\n".join(f"{indent}{name} ({kind}):{text}" for name in names.split(", "))


def _returned(section: re.Match[str]) -> str:
    return f"{section[1]}**Returns:** {textwrap.dedent(section[2]).strip()}\n\n"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Puts the help of a command where a page says `<!-- help: NAME -->`."""
    return re.sub(r"^<!-- help: (\w+) -->$", lambda found: command_help(found[1]), markdown, flags=re.MULTILINE)


def command_help(name: str) -> str:
    parser = cli.make_parser([name])
    (commands,) = (action for action in parser._actions if isinstance(action.choices, dict))
    command = commands.choices[name]
    command.formatter_class = lambda prog: cli.argparse.HelpFormatter(prog, width=WIDTH)
    return f"```text\n{command.format_help()}```"
