"""Shows how each token of an answer came about.

Two halves do not know each other. `Detokenizer` and `to_pieces` turn ids into pieces of text, each of one kind; a
markup, a function of a piece, turns it into what a terminal (`ansi`, `marked`) or another medium shows.
"""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from .counters import TokenKind


if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class Piece(NamedTuple):
    """A stretch of text whose tokens came about in the same way."""

    text: str
    kind: int  # a TokenKind


class Style(NamedTuple):
    """How one kind of token looks and what it is called."""

    label: str
    sgr: str  # parameters of the terminal's "select graphic rendition" sequence; empty for the default look
    marks: tuple[str, str]  # what encloses it where there is no colour


# The four colours have a luminance near .18, so each stands out at about 4:1 from a white and from a black background.
# Underline, bold and italics carry the same message to those who do not see the colours apart.
STYLES = {
    TokenKind.FIRST: Style("first token", "", ("", "")),
    TokenKind.ACCEPTED: Style("accepted", "38;5;28", ("", "")),
    TokenKind.BOOSTED: Style("kept thanks to the bonus", "38;5;130;4", ("{", "}")),
    TokenKind.REPLACED: Style("rejected and replaced", "38;5;160;1", ("[", "]")),
    TokenKind.EXTRA: Style("extra", "38;5;27;3", ("<", ">")),
}
Markup = Callable[[Piece], str]


def _style(piece: Piece) -> Style:
    return STYLES.get(TokenKind(piece.kind), STYLES[TokenKind.FIRST])


def _enclose(text: str, before: str, after: str) -> str:
    """Puts `before` and `after` round the visible part of `text`: white space is not to be underlined."""
    visible = text.strip()
    if not visible:
        return text
    start = text.index(visible)
    return text[:start] + before + visible + after + text[start + len(visible) :]


def _printable(text: str) -> str:
    """Replaces control characters by their pictures: a model must not be able to steer the reader's terminal."""
    return "".join(_picture(character) if unicodedata.category(character) == "Cc" else character for character in text)


def _picture(control: str) -> str:
    if control in "\n\t":
        return control
    return chr(0x2400 + ord(control)) if control < " " else "\N{SYMBOL FOR DELETE}"


def ansi(piece: Piece) -> str:
    """Markup for terminals: colours and underline, bold or italics."""
    sgr, text = _style(piece).sgr, _printable(piece.text)
    return _enclose(text, f"\x1b[{sgr}m", "\x1b[0m") if sgr else text


def marked(piece: Piece) -> str:
    """Markup without colour: {bonus}, [replaced], <extra>; accepted text stands as it is."""
    return _enclose(_printable(piece.text), *_style(piece).marks)


def legend(markup: Markup) -> str:
    """One line that names every kind of token in its own look."""
    kinds = (kind for kind in STYLES if kind != TokenKind.FIRST)
    return "   ".join(markup(Piece(STYLES[kind].label, kind)) for kind in kinds)


class Detokenizer:
    """
    Turns a stream of token ids into a stream of text, without ever showing half a character.

    A token's text depends on its neighbours: byte tokens join into characters, and many tokenizers drop the space
    before the first word. So each token is decoded together with the ones just before it, and bytes that do not make
    up a character yet are held back until the tokens that complete it arrive.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the model that wrote the ids.
        context (`Sequence[int]`, *optional*, defaults to `()`): Ids that stand before the first one pushed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(context)[-4:]
        self._num_shown = len(self._decode())  # characters of the window's text that are not to be returned any more

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty where it ends inside a character."""
        self._window.append(token)
        text = self._decode()
        # A character has at most 4 bytes, so no more than 3 can be waiting; beyond that the bytes are truly invalid.
        num_unfinished = min(len(text) - len(text.rstrip("\N{REPLACEMENT CHARACTER}")), 3)
        end = len(text) - num_unfinished
        new = text[self._num_shown : end]
        if num_unfinished:
            self._num_shown = max(self._num_shown, end)
        else:
            self._window = [token]
            self._num_shown = len(self._decode())
        return new


def to_pieces(detokenizer: Detokenizer, tokens: Iterable[int], kinds: Iterable[int]) -> list[Piece]:
    """
    The text that a block of tokens completes, neighbours of one kind joined. A character that takes several tokens is
    of the kind of the last of them.
    """
    pieces: list[Piece] = []
    for token, kind in zip(tokens, kinds, strict=True):
        text = detokenizer.push(token)
        if text and pieces and pieces[-1].kind == kind:
            pieces[-1] = Piece(pieces[-1].text + text, kind)
        elif text:
            pieces.append(Piece(text, kind))
    return pieces


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
