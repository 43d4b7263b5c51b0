"""The clamp law: within its budget, on its edge, and nearest to the target for the acceptance that it has."""

from __future__ import annotations

import math

import pytest
import torch
from law_pairs import PAIRS, random_pairs

from cactus_hf import Cactus, Mentored, emitted_law
from cactus_hf.clamp import clamp_bounds, clamp_law
from cactus_hf.divergences import DIVERGENCES


BUDGETS = (0.0, 1e-9, 1e-3, 0.05, 0.3, 1.0, math.inf)


def mentored(target: torch.Tensor, draft: torch.Tensor, budget: float, name: str = "kl") -> torch.Tensor:
    return clamp_law(target, draft, clamp_bounds(target, draft, budget, name))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_keeps_its_budget_and_uses_it_up(name: str) -> None:
    terms = DIVERGENCES[name].terms
    for target, draft in PAIRS:
        widest = terms(mentored(target, draft, math.inf, name), target).sum().item()
        for budget in BUDGETS:
            below, above = clamp_bounds(target, draft, budget, name).tolist()
            assert 0 <= below <= 1 <= above
            law = mentored(target, draft, budget, name)
            assert law.sum().item() == pytest.approx(1.0, abs=1e-12) and (law[target == 0] == 0).all()
            used = terms(law, target).sum().item()
            assert used <= budget + 1e-12
            # A mass below 2^-53 cannot be told from none: where so little is worth so much, some budget is left over
            if budget < widest < 10 and min(x for x in target.tolist() if x > 0) > 1e-6 and draft.min() > 0:
                assert used == pytest.approx(budget, rel=1e-6, abs=1e-12)
            assert torch.equal(law, target) if budget == 0 else True


@pytest.mark.parametrize("name", ["kl", "chi2", "tv"])
def test_is_the_draft_where_that_is_within_the_budget(name: str) -> None:
    for target, draft in PAIRS:
        distance = DIVERGENCES[name].terms(draft, target).sum()
        if distance.isfinite() and draft[target == 0].sum() == 0:
            assert torch.equal(mentored(target, draft, distance.item() * 1.01 + 1e-9, name), draft)
            if distance > 1e-6:
                assert not torch.equal(mentored(target, draft, distance.item() * 0.5, name), draft)


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
            assert torch.equal(bounds[row, i], clamp_bounds(target[row, i], draft[row, i], budget[row].item(), "kl"))
    assert clamp_bounds(target[:, :0], draft[:, :0], 0.1, "kl").shape == (3, 0, 2)


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name not in ("reverse_kl", "neyman")])
@pytest.mark.parametrize("delta", [1e-3, 0.1, 1.0])
def test_no_rule_is_nearer_for_the_same_acceptance(name: str, delta: float) -> None:
    """Cactus among them: give the clamp the divergence of the law it emits, and the clamp keeps at least as much."""
    terms = DIVERGENCES[name].terms
    for target, draft in random_pairs(24, 8, seed=4):
        law = emitted_law(target, draft, Cactus(delta))
        best = mentored(target, draft, terms(law, target).sum().item() + 1e-12, name)
        kept, most = (torch.minimum(h, draft).sum() for h in (law, best))
        assert kept <= most + 1e-9


def test_mentored_emits_it() -> None:
    for name in DIVERGENCES:
        for target, draft in PAIRS[::3]:
            law = emitted_law(target, draft, Mentored(0.1, name))
            torch.testing.assert_close(law, mentored(target, draft, 0.1, name), rtol=0, atol=1e-12)
