"""One look for all pictures, and the one place that asks for matplotlib (extra `plot`).

Figures are made without pyplot: no window, nothing set in the process, and Agg writes them whatever backend is chosen.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130
NUM_COLOURS = 64  # of a file, which makes it a third of the size
# Colours that differ also to the colour-blind (Okabe & Ito); curves differ in dashes too
BLACK, BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW = (
    "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, BLACK)
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)))
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


def check_picture(path: str | os.PathLike, option: str) -> None:
    """
    Raises what would keep `option` from writing a picture to `path`, before anything is measured for it.

    Raises:
        ValueError: for a name that does not end in .png.
        ImportError: without matplotlib.
    """
    if Path(path).suffix != ".png":
        raise ValueError(f"{option} writes a PNG picture: give a name that ends in .png instead of {str(path)!r}.")
    require_matplotlib(option)


def require_matplotlib(what: str) -> None:
    """Raises `ImportError` that says how to install it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: run `pip install 'cactus_hf[plot]'`.") from error


@contextmanager
def picture(path: str | os.PathLike, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches in the look of all; written to `path` as a PNG at the end of the `with` block."""
    import matplotlib
    from matplotlib.figure import Figure
    from PIL import Image

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=DPI)
        yield figure
        drawn = io.BytesIO()
        figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def legend_below(figure: Figure, num_columns: int) -> None:
    """One legend for all panels, of the last one's curves."""
    figure.legend(*figure.axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=num_columns)
