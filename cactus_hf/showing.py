"""`show`: the text of a call, each token in the look of how it came about, in a notebook or a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .counters import SpeculationStats, TokenKind
from .display import STYLES, Detokenizer, Markup, Piece, ansi, has_color, html, legend, marked, to_pieces
from .parameters import is_integer
from .token_streamer import LineBreaker


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .outputs import SpeculativeOutput


THEMES = ("auto", "light", "dark")
# What marks the theme of a page in JupyterLab, Colab and VS Code; elsewhere it is the reader's own setting.
HOSTS = {
    "light": ('[data-jp-theme-light="true"]', 'html[theme="light"]', ".vscode-light"),
    "dark": ('[data-jp-theme-light="false"]', 'html[theme="dark"]', ".vscode-dark"),
}
# The box brings its background along, so that no mistake about the theme makes its text unreadable.
SHEET = """
.cactus-hf {color-scheme: light dark; color: light-dark(#1f2328, #e6e6e6); background: light-dark(#ffffff, #15191f);
 border: 1px solid light-dark(#d0d7de, #3d444d); border-radius: 6px; padding: .8em 1em; line-height: 1.6;
 white-space: pre-wrap; overflow-wrap: anywhere}
.cactus-hf .text {margin-bottom: .8em}
.cactus-hf .prompt, .cactus-hf .note {color: light-dark(#59636e, #9aa4ae)}
.cactus-hf .note {font-size: .9em}
""".strip()


class Row(NamedTuple):
    """One returned row: its number, its prompt, its new tokens as pieces of text, and what was counted in it."""

    number: int
    prompt: str
    pieces: list[Piece]
    stats: SpeculationStats


@dataclass(frozen=True, repr=False, eq=False)
class ShownOutput:
    """
    What [`show`] returns. A notebook displays it as HTML, and so does `IPython.display.display`; a Python prompt and
    `print` write it with colours where standard output is a terminal, and with brackets elsewhere or with `NO_COLOR`.

    Args:
        rows (`list[Row]`): The rows, with at least one.
        stats (`SpeculationStats`): The counts of these rows together.
        theme (`str`): "auto", "light" or "dark".
    """

    rows: list[Row]
    stats: SpeculationStats
    theme: str

    def __str__(self) -> str:
        markup = ansi if has_color() else marked
        rows = "\n\n".join(self._as_text(row, markup) for row in self.rows)
        return f"{rows}\n\n{legend(markup)}\n{_caption(self.stats)}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        # Notebooks take what stands between two dollar signs for a formula, but for elements of these classes
        theme = "" if self.theme == "auto" else f" {self.theme}"
        rows = "".join(self._as_html(row) for row in self.rows)
        return (
            f'<div class="cactus-hf{theme} tex2jax_ignore mathjax_ignore"><style>{_sheet()}</style>{rows}'
            f'<div>{legend(html)}</div><div class="note">{escape(_caption(self.stats))}</div></div>'
        )

    def _as_text(self, row: Row, markup: Markup) -> str:
        lines = LineBreaker(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
        prompt, pieces = row.prompt, row.pieces
        if lines is not None:
            prompt = lines.push(prompt)
            pieces = [Piece(lines.push(text), kind) for text, kind in pieces]
        answer = "".join(map(markup, pieces))
        if not prompt:
            return self._heading(row) + answer
        prompt = marked(Piece(prompt, TokenKind.FIRST))  # without control characters
        if markup is ansi:
            return f"{self._heading(row)}\x1b[2m{prompt}\x1b[0m{answer}"
        quoted = "\n".join(f"> {line}" for line in prompt.rstrip("\n").split("\n"))
        return f"{self._heading(row)}{quoted}\n{answer}"

    def _as_html(self, row: Row) -> str:
        prompt = html(Piece(row.prompt, TokenKind.FIRST))
        heading = f'<div class="note">{self._heading(row)}</div>' if len(self.rows) > 1 else ""
        answer = "".join(map(html, row.pieces))
        return f'{heading}<div class="text" dir="auto"><span class="prompt">{prompt}</span>{answer}</div>'

    def _heading(self, row: Row) -> str:
        """Names the row where there are several."""
        return f"row {row.number}: {_acceptance(row.stats)}\n" if len(self.rows) > 1 else ""


def show(
    output: SpeculativeOutput,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int | Sequence[int] | None = None,
    prompt: bool = True,
    theme: str = "auto",
) -> ShownOutput:
    """
    Shows how each token of an answer came about: drafted and accepted, kept only thanks to the bonus (lossless
    sampling would have rejected it), drawn in place of a rejected draft, or drawn by the target after a draft that was
    kept whole. The first token, which no round yields, has no mark. A character that takes several tokens has the look
    of the last of them. Special tokens are left out.

    A line below has the figures of the rows shown: AL, the drafted tokens kept a round; acceptance, the kept share of
    the drafts checked; ball KL, how far in nats a position the laws aimed at were from the target's; and emitted KL,
    how far the law really emitted was from it, if `speculation_kl=True` had that measured.

    ```python
    output = model.generate(**inputs, assistant_model=draft, cactus_delta=0.5, return_dict_in_generate=True)
    cactus_hf.show(output, tokenizer)  # the last line of a cell; in a script, print it
    ```

    Args:
        output (`SpeculativeOutput`): What `generate(..., return_dict_in_generate=True)` of an enabled model returned.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target, or a processor that has one.
        rows (`int` or `Sequence[int]`, *optional*): Which of the returned rows to show; all by default.
        prompt (`bool`, *optional*, defaults to `True`): Whether to show the prompt, dimmed, before the answer.
        theme (`str`, *optional*, defaults to `"auto"`): Colours of the HTML: "light", "dark", or those of the page.
    Returns:
        [`ShownOutput`], which a notebook, a Python prompt and `print` display.
    Raises:
        ValueError: if the output has no statistics, or a row or theme that is asked for does not exist.
        TypeError: if `tokenizer` cannot decode.
    """
    stats = getattr(output, "speculation", None)
    if not isinstance(stats, SpeculationStats):
        raise ValueError(
            f"`show` needs an output with `.speculation`, got {_described(output)}. Pass `cactus_delta` (or an "
            "`acceptance_rule`) and `return_dict_in_generate=True` to `generate()` of a model after "
            "`cactus_hf.enable(model)`."
        )
    if not hasattr(tokenizer, "decode"):
        raise TypeError(f"`tokenizer` needs a method `decode`, got {type(tokenizer).__name__}.")
    if theme not in THEMES:
        raise ValueError(f"`theme` is one of {', '.join(THEMES)}, got {theme!r}.")
    indices = _row_indices(rows, len(stats.emitted))
    num_prompt = output.sequences.shape[1] - stats.kinds.shape[1]
    shown = []
    for index in indices:
        own = _of_rows(stats, [index])
        ids = output.sequences[index].tolist()
        context, answer = ids[:num_prompt], ids[num_prompt : num_prompt + int(own.emitted)]
        kinds = own.kinds[0, : len(answer)].tolist()
        before = tokenizer.decode(context, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        pieces = to_pieces(Detokenizer(tokenizer, context), answer, kinds)
        shown.append(Row(index, before if prompt else "", pieces, own))
    return ShownOutput(shown, _of_rows(stats, indices), theme)


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {list(output.shape)}"
    return f"{type(output).__name__} without it"


def _row_indices(rows: int | Sequence[int] | None, num_rows: int) -> list[int]:
    given: Any = range(num_rows) if rows is None else rows
    given = given.tolist() if hasattr(given, "tolist") else given  # of tensors and arrays
    chosen = list(given) if isinstance(given, Iterable) else [given]
    if not chosen or not all(is_integer(row) and 0 <= row < num_rows for row in chosen):
        raise ValueError(f"`rows` are numbers from 0 to {num_rows - 1}, at least one of them; got {rows!r}.")
    return list(map(int, chosen))


def _of_rows(stats: SpeculationStats, rows: list[int]) -> SpeculationStats:
    """The counts of some of the returned rows."""
    by_row = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return replace(stats, **{name: value[rows] for name, value in by_row.items() if value is not None})


def _acceptance(stats: SpeculationStats) -> str:
    return f"AL {stats.accepted_length:.2f}, acceptance {stats.position_acceptance:.2f}"


def _caption(stats: SpeculationStats) -> str:
    said = f"{int(stats.emitted.sum())} tokens in {int(stats.rounds.sum())} rounds: {_acceptance(stats)}"
    if stats.ball_kl > 0:  # a rule that raises nothing has none
        said += f", ball KL {stats.ball_kl:.3f}"
    emitted = "not measured" if stats.emitted_kl is None else f"{stats.emitted_kl:.3f} nats a position"
    return f"{said}, emitted KL {emitted}"


def _sheet() -> str:
    rules = [SHEET]
    for kind, style in STYLES.items():
        if kind != TokenKind.FIRST:
            rules.append(f".cactus-hf .{kind.name.lower()} {{color: light-dark({style.light}, {style.dark})}}")
    for theme, hosts in HOSTS.items():
        rules.append(f"{', '.join(f'{host} .cactus-hf' for host in hosts)} {{color-scheme: {theme}}}")
        rules.append(f".cactus-hf.{theme} {{color-scheme: {theme} !important}}")
    return "\n".join(rules)
