"""`cactus-hf plot theory`: the figures of docs/theory.md, from formulas and synthetic laws."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, Cactus, Mixture
from ..bounded_rules import Lenience, Mentored
from ..calibration.laws import Rows, limit_laws
from ..divergences import DIVERGENCES, SOLVERS, raise_prob
from ..kl_budget import binary_kl
from ..law import emission, law_ratio
from .style import (
    BLACK,
    BLUE,
    COLOURS,
    DASHES,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    legend_below,
    picture,
    require_matplotlib,
)


if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "kl": "KL",
    "chi2": "Pearson chi²",
    "reverse_kl": "reverse KL",
    "neyman": "Neyman chi²",
    "tv": "total variation",
    "hellinger": "squared Hellinger",
    "js": "Jensen-Shannon",
}
POINTS = 400  # of a curve over q
PAIRS, VOCAB_SIZE, NOISE = 32, 1000, 0.8
BUDGETS = [0.0, *torch.logspace(-6, 1.2, 24, dtype=torch.float64).tolist()]


class Curve(NamedTuple):
    """Rules that differ in one number."""

    label: str
    colour: str
    dash: str | tuple
    rules: Sequence[AcceptanceRule]


def exact(name: str) -> list[AcceptanceRule]:
    return [Cactus(delta, divergence=name, solver="exact") for delta in BUDGETS]


CURVES = (
    Curve("Mentored, KL", BLACK, "-", [Mentored(budget) for budget in BUDGETS]),
    Curve("Mixture", YELLOW, ":", [Mixture(1 - step / 24) for step in range(1, 24)]),
    Curve("Lenience", SKY, "-.", [Lenience(10 ** (-step / 8)) for step in range(24)]),
    Curve("Cactus, the default", BLUE, "-", [Cactus(delta) for delta in BUDGETS]),
    Curve("Cactus, KL, exact", ORANGE, "--", exact("kl")),
    Curve("Cactus, reverse KL, exact", GREEN, "-.", exact("reverse_kl")),
    Curve("Cactus, total variation", PURPLE, ":", exact("tv")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", default=".", metavar="FOLDER", help="where the PNG pictures go (default: this folder)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the synthetic laws (default 0)")
    parser.set_defaults(draw=draw)


def draw(args: argparse.Namespace) -> None:
    """Writes gamma.png, ball.png and tradeoff.png, and prints their names."""
    require_matplotlib("plot theory")
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    laws = synthetic_laws(args.seed)
    for name, height, draw_on in (
        ("gamma", 4.0, draw_gamma),
        ("ball", 3.4, draw_ball),
        ("tradeoff", 4.6, lambda figure: draw_tradeoff(figure, *laws)),
    ):
        path = folder / f"{name}.png"
        with picture(path, 7.4, height) as figure:
            draw_on(figure)
        print(path)


def draw_gamma(figure: Figure, delta: float = 0.1) -> None:
    """gamma against q for every divergence: by its second order, and exactly."""
    q = torch.linspace(0, 1, POINTS + 1, dtype=torch.float64)[1:]
    panels = figure.subplots(1, 2, sharey=True)
    for panel, solver in zip(panels, SOLVERS, strict=True):
        panel.plot(q, q, color="0.6", linewidth=1, label="q itself (delta 0)")
        for name, colour, dash in zip(DIVERGENCES, COLOURS, DASHES, strict=True):
            if solver == "exact" or DIVERGENCES[name].curvature is not None:
                panel.plot(q, raise_prob(q, delta, name, solver), color=colour, linestyle=dash, label=NAMES[name])
        panel.set_title(f'delta {delta:g}, solver="{solver}"', fontsize="medium")
        panel.set_xlabel("q, the target's probability of the drafted token")
        panel.set_xlim(0, 1)
        panel.set_ylim(0, 1.01)
    panels[0].set_ylabel("gamma, what it is raised to")
    legend_below(figure, num_columns=4)


def draw_ball(figure: Figure, deltas: Sequence[float] = (0.1, 0.5, 1.0)) -> None:
    """KL(h || q) of the law aimed at, against q, next to delta and to ln(1 + 2 delta)."""
    q = torch.linspace(0, 1, 2 * POINTS + 1, dtype=torch.float64)[1:-1]
    panels = figure.subplots(1, len(deltas))
    for panel, delta in zip(panels, deltas, strict=True):
        for solver, colour, dash in zip(SOLVERS, (BLUE, ORANGE), ("-", "--"), strict=True):
            kl = binary_kl(q, raise_prob(q, delta, "kl", solver))
            panel.plot(q, kl, color=colour, linestyle=dash, label=f'solver="{solver}"')
        panel.axhline(delta, color=BLACK, linewidth=1, linestyle=":", label="delta")
        panel.axhline(math.log1p(2 * delta), color=BLACK, linewidth=1, linestyle="-.", label="ln(1 + 2 delta)")
        panel.set_title(f"delta {delta:g}", fontsize="medium")
        panel.set_xlabel("q of the drafted token")
        panel.set_xlim(0, 1)
        panel.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
        panel.set_ylim(0, 1.15 * math.log1p(2 * delta))
    panels[0].set_ylabel("KL(h || q), nats")
    legend_below(figure, num_columns=4)


def draw_tradeoff(figure: Figure, target: Tensor, draft: Tensor) -> None:
    """Acceptance against the KL of the emitted law, the mean over pairs of laws `[N, V]`: a curve a rule, and the
    limit.
    """
    panel = figure.subplots()
    limit = [acceptance_and_kl(target, law, torch.minimum(draft, law)) for law in best_laws(target, draft)]
    panel.plot(*zip(*limit, strict=True), color="0.75", linewidth=5, label="best possible")
    for curve in CURVES:
        points = [acceptance_and_kl(target, *emission(target, draft, rule)) for rule in curve.rules]
        panel.plot(*zip(*points, strict=True), color=curve.colour, linestyle=curve.dash, label=curve.label)
    panel.set_xlabel("KL of the emitted law from the target's, nats a position")
    panel.set_ylabel("acceptance")
    panel.set_xlim(left=0)
    panel.legend(loc="lower right")


def acceptance_and_kl(target: Tensor, law: Tensor, kept: Tensor) -> tuple[float, float]:
    """Means over the rows `[N, V]`: KL(h || q) in nats, and the chance that a draft is kept."""
    return DIVERGENCES["kl"].terms(law, target).sum(-1).mean().item(), kept.sum(-1).mean().item()


def best_laws(target: Tensor, draft: Tensor) -> Iterator[Tensor]:
    """Laws with the least mean KL for their mean acceptance, from the target to the draft."""
    ratio, order = law_ratio(target, draft).sort(-1)
    rows = Rows(target.gather(-1, order), draft.gather(-1, order), ratio, order[:, :1])
    for law in limit_laws(rows, [0.0, *torch.logspace(-1.5, 1.2, 30).tolist()]):
        yield torch.empty_like(law).scatter_(-1, order, law)


def synthetic_laws(seed: int) -> tuple[Tensor, Tensor]:
    """Pairs `[N, V]` somewhat like those of models: Zipf's law, more and less steep, and a draft with noisy logits."""
    generator = torch.Generator().manual_seed(seed)
    zipf = -torch.arange(1, VOCAB_SIZE + 1, dtype=torch.float64).log()
    steepness = 1 + 1.5 * torch.rand(PAIRS, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, PAIRS, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    target = steepness * zipf + NOISE * noise[0]
    return target.softmax(-1), (target + NOISE * noise[1]).softmax(-1)
