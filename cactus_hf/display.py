"""Shows how each token of an answer came about.

Two halves do not know each other. `Detokenizer` and `to_pieces` turn ids into pieces of text, each of one kind; a
markup, a function of a piece, turns it into what a terminal (`ansi`, `marked`) or a page (`html`) shows.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from .counters import TokenKind


if TYPE_CHECKING:
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
    tag: str = "span"  # the element of a page; says the same as the colour where a page drops its styles
    light: str = "inherit"  # colour on a light page
    dark: str = "inherit"  # colour on a dark page


# The four colours have a luminance near .18, so each stands out at about 4:1 from a white and from a black background.
# Underline, bold and italics carry the same message to those who do not see the colours apart.
STYLES = {
    TokenKind.FIRST: Style("first token", "", ("", "")),
    TokenKind.ACCEPTED: Style("accepted", "38;5;28", ("", ""), "span", "#1a7f37", "#4ac26b"),
    TokenKind.BOOSTED: Style("kept thanks to the bonus", "38;5;130;4", ("{", "}"), "u", "#9a4a00", "#f0a04b"),
    TokenKind.REPLACED: Style("rejected and replaced", "38;5;160;1", ("[", "]"), "b", "#c4202b", "#ff8a80"),
    TokenKind.EXTRA: Style("extra", "38;5;27;3", ("<", ">"), "i", "#0860ca", "#79b8ff"),
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


def html(piece: Piece) -> str:
    """Markup for pages: an element with the class of its kind, its name as a tooltip, and the text escaped."""
    style, text = _style(piece), escape(_printable(piece.text))
    if style is STYLES[TokenKind.FIRST]:
        return text
    kind = TokenKind(piece.kind).name.lower()
    return _enclose(text, f'<{style.tag} class="{kind}" title="{style.label}">', f"</{style.tag}>")


def has_color() -> bool:
    """Whether standard output is a terminal that may be sent colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


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
