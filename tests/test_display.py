"""Text of token streams: characters never come in halves, and every kind can be told apart with and without colour."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from html import unescape

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from cactus_hf import TokenKind
from cactus_hf.display import STYLES, Detokenizer, Piece, _printable, ansi, html, legend, marked, to_pieces
from cactus_hf.token_streamer import LineBreaker, TokenStreamer


BYTES = tiny.byte_tokenizer()
KINDS = [kind for kind in TokenKind if kind != TokenKind.PAD]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # surrogates are no characters


def byte_ids(text: str) -> list[int]:
    return BYTES(text, add_special_tokens=False)["input_ids"]


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama 2's: words carry their leading space, which decoding drops at the start; bytes stand for the rest."""
    pieces = ["<unk>", "▁the", "▁sky", "▁is", "blue", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@given(ANY_TEXT)
def test_bytes_join_into_the_text_and_never_into_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for token in byte_ids(text):
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    assert shown == text.rstrip("\N{REPLACEMENT CHARACTER}") or shown == text


def test_characters_appear_with_their_last_byte() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(token) for token in byte_ids("aé🌵b")] == ["a", "", "é", "", "", "", "🌵", "b"]


def test_bytes_that_are_no_text_do_not_block_the_stream() -> None:
    detokenizer = Detokenizer(BYTES)
    continuation = byte_ids("é")[1]
    shown = "".join(detokenizer.push(token) for token in [continuation] * 20 + byte_ids("sky"))
    assert shown == "\N{REPLACEMENT CHARACTER}" * 20 + "sky"


def test_leading_spaces_depend_on_the_context() -> None:
    tokenizer = metaspace_tokenizer()
    sky_is_blue = [2, 3, 4]
    assert "".join(map(Detokenizer(tokenizer).push, sky_is_blue)) == "sky isblue"
    assert "".join(map(Detokenizer(tokenizer, context=[1]).push, sky_is_blue)) == " sky isblue"


def test_byte_fallback_waits_for_all_bytes() -> None:
    detokenizer = Detokenizer(metaspace_tokenizer(), context=[1])
    cactus = [5 + byte for byte in "🌵".encode()]
    assert [detokenizer.push(token) for token in [2, *cactus, 3]] == [" sky", "", "", "", "🌵", " is"]


def test_special_tokens_are_not_shown() -> None:
    detokenizer = Detokenizer(BYTES, context=[tiny.BOS])
    assert "".join(map(detokenizer.push, [*byte_ids("sky"), tiny.EOS])) == "sky"


@pytest.mark.parametrize("markup", [ansi, marked])
def test_a_model_cannot_steer_the_terminal(markup) -> None:
    assert markup(Piece("a\x1b[2J\x07\x9b\x7f\r\n\tb", TokenKind.FIRST)) == "a␛[2J␇␡␡␍\n\tb"


def test_pieces_join_neighbours_of_one_kind() -> None:
    tokens = byte_ids("ab🌵c")
    kinds = [1, 1, 1, 2, 2, 3, 3]  # the cactus takes four tokens, the last of kind 3
    assert to_pieces(Detokenizer(BYTES), tokens, kinds) == [Piece("ab", 1), Piece("🌵c", 3)]


@pytest.mark.parametrize("markup", [ansi, marked, html])
def test_every_kind_looks_different(markup) -> None:
    shown = [markup(Piece("word", kind)) for kind in KINDS]
    plain = {TokenKind.FIRST, TokenKind.ACCEPTED} if markup is marked else {TokenKind.FIRST}
    assert [text == "word" for text in shown] == [kind in plain for kind in KINDS]
    assert len(set(shown)) == len(KINDS) - len(plain) + 1


def luminance(colour: int) -> float:
    """Relative luminance of an entry of the colour cube of xterm's palette."""
    steps = [0, 95, 135, 175, 215, 255]
    return relative_luminance(steps[(colour - 16) // divisor % 6] / 255 for divisor in (36, 6, 1))


def relative_luminance(levels: Iterable[float]) -> float:
    """As WCAG 2 defines it, of shares of red, green and blue."""
    linear = [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]
    return sum(weight * level for weight, level in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_colours_read_on_white_and_on_black(kind: TokenKind) -> None:
    shade = luminance(int(STYLES[kind].sgr.split(";")[2]))
    # The best that both can have is 4.6; 3 is what WCAG asks of large text and of symbols
    assert min(1.05 / (shade + 0.05), (shade + 0.05) / 0.05) > 3.5


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize(("page", "colour"), [("#ffffff", "light"), ("#15191f", "dark")])
def test_colours_of_a_page_read_as_ordinary_text(kind: TokenKind, page: str, colour: str) -> None:
    shades = [
        relative_luminance(int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))
        for code in (page, getattr(STYLES[kind], colour))
    ]
    assert (max(shades) + 0.05) / (min(shades) + 0.05) >= 4.5  # what WCAG asks of ordinary text


def test_colour_is_not_the_only_difference() -> None:
    marked_kinds = KINDS[1:]
    assert len({re.sub(r"38;5;\d+;?", "", STYLES[kind].sgr) for kind in marked_kinds}) == len(marked_kinds)
    assert len({STYLES[kind].tag for kind in marked_kinds}) == len(marked_kinds)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])), st.sampled_from(KINDS))
def test_colours_leave_the_text_alone(text: str, kind: TokenKind) -> None:
    assert re.sub(r"\x1b\[[\d;]*m", "", ansi(Piece(text, kind))) == text


@given(ANY_TEXT, st.sampled_from(KINDS))
def test_a_page_shows_the_text_and_nothing_it_says(text: str, kind: TokenKind) -> None:
    shown = unescape(re.sub(r"<[^>]*>", "", html(Piece(text, kind))))
    assert shown == _printable(text)
    assert "<" not in re.sub(r"<(u|b|i|span) class[^>]*>|</(u|b|i|span)>", "", html(Piece(text, kind)))


def test_white_space_stays_outside() -> None:
    assert marked(Piece(" the sky\n", TokenKind.REPLACED)) == " [the sky]\n"
    assert ansi(Piece(" \n ", TokenKind.BOOSTED)) == " \n "


@pytest.mark.parametrize("markup", [ansi, marked, html])
def test_legend_shows_each_kind_in_its_look(markup) -> None:
    for kind in KINDS[1:]:
        assert markup(Piece(STYLES[kind].label, kind)) in legend(markup)


def test_streamer_writes_blocks_as_they_come() -> None:
    file = io.StringIO()
    streamer = TokenStreamer(BYTES, marked, file)
    streamer.put(torch.tensor([byte_ids("the prompt")]))
    assert file.getvalue() == ""
    streamer.put_block(torch.tensor(byte_ids("A")), torch.tensor([TokenKind.FIRST]))
    block = byte_ids(" big 🌵")
    streamer.put_block(torch.tensor(block[:-2]), torch.full((len(block) - 2,), TokenKind.ACCEPTED))
    assert file.getvalue() == "A big "
    streamer.put_block(torch.tensor(block[-2:]), torch.tensor([TokenKind.ACCEPTED, TokenKind.EXTRA]))
    streamer.put(torch.tensor(byte_ids("!")))
    streamer.end()
    assert file.getvalue() == "A big <🌵>!\n"


@given(st.lists(st.text("ab", min_size=1, max_size=8), min_size=1), st.booleans())
def test_lines_break_between_words_only(words: list[str], is_whole: bool) -> None:
    lines = LineBreaker(8)
    text = " ".join(words)
    parts = [text] if is_whole else re.findall(r" ?\S+", text)
    broken = "".join(map(lines.push, parts))
    assert broken.split() == words and all(len(line) <= 8 for line in broken.split("\n"))
    assert not re.search(r"\n | \n|\n\n", broken), "a break stands for a space"


def test_lines_fill_the_terminal() -> None:
    lines = LineBreaker(12)
    assert [lines.push(text) for text in ("The", " sky is", " blue", "\nand", " 仙人掌", " 仙人")] == [
        "The",
        " sky is",
        "\nblue",
        "\nand",
        " 仙人掌",
        "\n仙人",
    ]


def test_long_words_and_indentation_stay() -> None:
    lines = LineBreaker(8)
    assert lines.push("ab abcdefghijkl\n        return") == "ab abcdefghijkl\n        return"


def test_streamer_can_be_used_again() -> None:
    file = io.StringIO()
    streamer = TokenStreamer(BYTES, marked, file)
    for _ in range(2):
        streamer.put(torch.tensor(byte_ids("prompt")))
        streamer.put_block(torch.tensor(byte_ids("é")[:1]), torch.tensor([TokenKind.FIRST]))  # cut inside a character
        streamer.end()
    assert file.getvalue() == "\n\n"
