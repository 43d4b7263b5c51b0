"""Writing an answer while it is made: a streamer for `generate()`, and line breaks between words."""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from typing import TYPE_CHECKING, TextIO

from .counters import TokenKind
from .display import Detokenizer, Markup, Piece, ansi, to_pieces


if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class LineBreaker:
    """
    Breaks lines between words as text comes, where a terminal would break inside them.

    Args:
        width (`int`): Columns of the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0

    def push(self, text: str) -> str:
        """`text`, with the space before a word that no longer fits turned into a line break."""
        broken = ""
        for spaces, word in re.findall(r"(\s*)(\S*)", text):
            if spaces == " " and self._column + 1 + columns(word) > self._width >= columns(word):
                spaces = "\n"
            chunk = spaces + word
            broken += chunk
            _, line_break, line = chunk.rpartition("\n")
            self._column = columns(line) + (0 if line_break else self._column)
            if self._column > self._width:  # the terminal has broken inside the word
                self._column %= self._width
        return broken


def columns(text: str) -> int:
    """How wide a terminal shows `text`, which has no control characters but tabs and line breaks."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text.expandtabs())


class TokenStreamer:
    """
    A streamer for `generate(streamer=...)`: writes the answer while it is made, each token in the look of its kind.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        markup (`Callable[[Piece], str]`, *optional*, defaults to `ansi`): How a piece of text is shown.
        file (`TextIO`, *optional*): Where to write; standard output by default. Where that is a terminal, lines are
            broken between words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markup: Markup = ansi, file: TextIO | None = None) -> None:
        self._tokenizer = tokenizer
        self._markup = markup
        self._file = file if file is not None else sys.stdout
        self._detokenizer: Detokenizer | None = None  # until the prompt is here
        is_terminal = self._file.isatty()
        self._lines = LineBreaker(shutil.get_terminal_size().columns) if is_terminal else None

    def put(self, tokens: Tensor) -> None:
        """Takes the prompt, which is not written, and later tokens whose kind is not known."""
        ids = tokens.reshape(-1).tolist()
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(self._tokenizer, context=ids)
        else:
            self._write(ids, [int(TokenKind.FIRST)] * len(ids))

    def put_block(self, tokens: Tensor, kinds: Tensor) -> None:
        """Takes a committed block: `tokens` int64 [n] and their `kinds` [n]."""
        self._write(tokens.tolist(), kinds.tolist())

    def end(self) -> None:
        """Ends the line. Bytes that never became a character are dropped."""
        self._detokenizer = None
        print(file=self._file, flush=True)

    def _write(self, tokens: list[int], kinds: list[int]) -> None:
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(self._tokenizer)
        pieces = to_pieces(self._detokenizer, tokens, kinds)
        if self._lines is not None:
            pieces = [Piece(self._lines.push(text), kind) for text, kind in pieces]
        print("".join(self._markup(piece) for piece in pieces), end="", file=self._file, flush=True)
