"""The clamp law: within its budget, on its edge, and nearest to the target for the acceptance that it has."""

from __future__ import annotations

import math

import pytest
import torch
from law_pairs import PAIRS, random_pairs

from cactus_hf import Cactus, Mentored, emitted_law
from cactus_hf.clamp import clamp_bounds, clamp_law
from cactus_hf.divergences import DIVERGENCES


BUDGETS = torch.tensor([0.0, 1e-9, 1e-3, 0.05, 0.3, 1.0, math.inf], dtype=torch.float64)


def mentored(
    target: torch.Tensor, draft: torch.Tensor, budget: float | torch.Tensor, name: str = "kl"
) -> torch.Tensor:
    return clamp_law(target, draft, clamp_bounds(target, draft, budget, name))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_keeps_its_budget_and_uses_it_up(name: str) -> None:
    for pair in PAIRS[::2]:
        target, draft = (probs.expand(len(BUDGETS), -1) for probs in pair)
        below, above = clamp_bounds(target, draft, BUDGETS, name).unbind(-1)
        assert ((below >= 0) & (below <= 1) & (above >= 1)).all()
        laws = mentored(target, draft, BUDGETS, name)
        torch.testing.assert_close(laws.sum(-1), torch.ones_like(BUDGETS), rtol=0, atol=1e-12)
        assert (laws[target == 0] == 0).all() and torch.equal(laws[0], pair[0])
        used = DIVERGENCES[name].terms(laws, target).sum(-1)
        assert (used <= BUDGETS + 1e-12).all()
        # A mass below 2^-53 cannot be told from none: where so little is worth so much, some budget is left over
        if pair[0].min() > 1e-6 and pair[1].min() > 1e-6:
            is_tight = BUDGETS < used[-1]
            torch.testing.assert_close(used[is_tight], BUDGETS[is_tight], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["kl", "chi2", "tv"])
def test_is_the_draft_where_that_is_within_the_budget(name: str) -> None:
    for target, draft in PAIRS[::2]:
        distance = DIVERGENCES[name].terms(draft, target).sum()
        if distance.isfinite() and draft[target == 0].sum() == 0:
            torch.testing.assert_close(
                mentored(target, draft, distance.item() + 1e-9, name), draft, rtol=1e-15, atol=0
            )
            if distance > 1e-6:
                assert (mentored(target, draft, distance.item() * 0.5, name) - draft).abs().max() > 1e-9


def test_budget_of_infinity_keeps_all_that_the_target_can_emit() -> None:
    for target, draft in PAIRS:
        law = mentored(target, draft, math.inf)
        assert torch.minimum(law, draft).sum().item() == pytest.approx(draft[target > 0].sum().item(), abs=1e-12)


def test_rows_are_apart_and_budgets_go_with_them() -> None:
    pairs = random_pairs(24, 8, seed=3)[:12]
    target, draft = (torch.stack(rows).reshape(3, 4, 8) for rows in zip(*pairs, strict=True))
    budget = torch.tensor([0.0, 0.1, math.inf], dtype=torch.float64)
    bounds = clamp_bounds(target, draft, budget[:, None], "kl")
    assert bounds.shape == (3, 4, 2)
    for row in range(3):
        for i in range(4):
            alone = clamp_bounds(target[row, i], draft[row, i], budget[row].item(), "kl")
            torch.testing.assert_close(bounds[row, i], alone, rtol=1e-12, atol=0)
    assert clamp_bounds(target[:, :0], draft[:, :0], 0.1, "kl").shape == (3, 0, 2)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("delta", [1e-3, 0.1, 1.0])
def test_no_rule_is_nearer_for_the_same_acceptance(name: str, delta: float) -> None:
    """Cactus among them: give the clamp the divergence of the law it emits, and the clamp keeps at least as much."""
    pairs = [pair for pair in random_pairs(48, 8, seed=4) if min(law.min() for law in pair) > 1e-9]
    target, draft = (torch.stack(rows) for rows in zip(*pairs, strict=True))
    law = emitted_law(target, draft, Cactus(delta))
    best = mentored(target, draft, DIVERGENCES[name].terms(law, target).sum(-1) + 1e-12, name)
    kept, most = (torch.minimum(h, draft).sum(-1) for h in (law, best))
    assert (kept <= most + 1e-9).all()
    if name != "tv" and delta < 1:  # all laws between the two have one total variation for an acceptance
        assert (kept < most - 1e-3).any()


def test_mentored_emits_it() -> None:
    for name in DIVERGENCES:
        for target, draft in PAIRS[::6]:
            law = emitted_law(target, draft, Mentored(0.1, name))
            torch.testing.assert_close(law, mentored(target, draft, 0.1, name), rtol=0, atol=1e-12)
