"""Divergences and gamma for each of them: against the slow twin, and at the ends of every range."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_pairs import PAIRS

from cactus_hf import Cactus, gamma
from cactus_hf.acceptance import Drafted
from cactus_hf.divergences import DIVERGENCES, _searched


INF = math.inf
NAMES = tuple(DIVERGENCES)
CLOSED = [name for name in NAMES if DIVERGENCES[name].root is not None]
EXPANDED = [name for name in NAMES if DIVERGENCES[name].curvature is not None]
PROBS = torch.tensor([1e-300, 1e-12, 1e-3, 0.1, 1 / 3, 0.5, 0.75, 0.9, 0.999, 1 - 1e-12, 1.0], dtype=torch.float64)
DELTAS = (1e-9, 1e-3, 0.1, 0.3, 0.5, 1.0, 3.0)


def distance(name: str, raised: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    terms = DIVERGENCES[name].terms
    return terms(raised, q) + terms(1 - raised, 1 - q)


@pytest.mark.parametrize("name", NAMES)
def test_terms_sum_to_the_divergence(name: str) -> None:
    for target, draft in PAIRS:
        law = torch.where(target > 0, draft, 0.0)
        if law.sum() == 0 or target[target > 0].min() < 1e-100:  # whose square would be 0
            continue
        law = law / law.sum()
        terms = DIVERGENCES[name].terms(law, target)
        assert (terms >= -1e-16).all()
        expected = reference.f_divergence(name, law.tolist(), target.tolist())
        assert terms.sum().item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_exact_gamma_is_as_far_as_the_budget_allows(name: str) -> None:
    for delta in DELTAS:
        raised = gamma(PROBS, delta, name, "exact")
        assert (raised >= PROBS).all() and (raised <= 1).all()
        reached = distance(name, raised, PROBS)
        # Near 1 a unit in the last place of gamma is worth more than the rounding of the sum
        slack = 1e-9 * delta + 1e-15
        inside = (PROBS > 1e-4) & (PROBS < 0.9999)
        assert (reached <= delta + slack)[inside].all()
        is_root = inside & (raised < 1 - 1e-6)
        torch.testing.assert_close(reached[is_root], torch.full_like(reached, delta)[is_root], rtol=1e-5, atol=1e-13)
        assert (distance(name, torch.ones_like(PROBS), PROBS) <= delta + slack)[inside & (raised == 1)].all()


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-6, 1 - 1e-6), st.floats(1e-6, 5), st.sampled_from(NAMES))
def test_exact_gamma_is_that_of_the_slow_twin(q: float, delta: float, name: str) -> None:
    expected = reference.gamma(q, delta, name, "exact")
    assert gamma(q, delta, name, "exact") == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_are_roots(name: str) -> None:
    kind = DIVERGENCES[name]
    for delta in DELTAS:
        searched = _searched(kind, PROBS, torch.full_like(PROBS, delta))
        torch.testing.assert_close(gamma(PROBS, delta, name, "exact"), searched, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", EXPANDED)
def test_the_expansion_is_the_limit_of_small_budgets(name: str) -> None:
    q = torch.tensor([0.05, 0.3, 0.6, 0.9], dtype=torch.float64)
    for delta in (1e-6, 1e-8):
        bonus, exact = (gamma(q, delta, name, solver) - q for solver in ("taylor", "exact"))
        assert ((bonus / exact - 1).abs() < 20 * math.sqrt(delta)).all()  # the next term of the series


def test_the_default_is_the_exact_chi2_ball_of_twice_the_radius() -> None:
    for delta in DELTAS:
        assert torch.equal(gamma(PROBS, delta), gamma(PROBS, 2 * delta, "chi2", "exact"))


@pytest.mark.parametrize("solver", ["taylor", "exact"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends(name: str, solver: str, dtype: torch.dtype) -> None:
    if solver == "taylor" and name not in EXPANDED:
        return
    q = torch.tensor([0.0, 1e-30, 0.2, 0.7, 1.0], dtype=dtype)
    assert torch.equal(gamma(q, 0.0, name, solver), q)
    assert gamma(q, INF, name, solver).tolist() == [0, 1, 1, 1, 1]
    previous = q
    for delta in DELTAS:
        raised = gamma(q, delta, name, solver)
        assert raised.dtype == dtype and raised[0] == 0 and raised[-1] == 1
        assert (raised >= previous).all()
        previous = raised


def test_the_guard_is_needed_where_the_ball_reaches_beyond_the_support() -> None:
    delta = 0.3
    reached = {"reverse_kl": 1 - math.exp(-delta), "neyman": delta / (1 + delta), "tv": delta}
    reached["hellinger"] = 1 - (1 - delta) ** 2
    for name, limit in reached.items():
        assert gamma(1e-14, delta, name, "exact") == pytest.approx(limit, abs=1e-5)
        assert gamma(0.0, delta, name, "exact") == 0.0
    assert gamma(1e-14, delta, "js", "exact") > 0.1 and gamma(0.0, delta, "js", "exact") == 0.0
    assert gamma(1e-300, delta, "kl", "exact") < 1e-3 and gamma(1e-300, delta, "chi2", "exact") < 1e-100


def test_kl_is_capped_from_exp_of_minus_delta_on() -> None:
    for delta in (0.1, 1.0):
        edge = math.exp(-delta)
        assert gamma(edge + 1e-9, delta, solver="exact") == 1.0 and gamma(edge - 1e-9, delta, solver="exact") < 1.0


def test_budgets_broadcast() -> None:
    q, delta = torch.tensor([[0.1], [0.5]]), torch.tensor([0.0, 0.2, INF])
    for name, solver in (("kl", "exact"), ("neyman", "exact"), ("js", "taylor")):
        raised = gamma(q, delta, name, solver)
        assert raised.shape == (2, 3) and raised.dtype == q.dtype
        for row, column in ((0, 0), (1, 1), (0, 2)):
            assert raised[row, column] == gamma(q[row], delta[column].item(), name, solver)


@pytest.mark.parametrize("solver", ["taylor", "exact"])
def test_shapes_that_do_not_broadcast(solver: str) -> None:
    with pytest.raises(ValueError, match=r"`q` has the shape \[2\] and `delta` \[3\].*one for each `q`"):
        gamma([0.1, 0.2], [0.1, 0.2, 0.3], solver=solver)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"divergence": "KL"}, "`divergence` must be one of 'kl', 'chi2', .*; got 'KL'"),
        ({"divergence": None}, "`divergence` must be one of"),
        ({"solver": "newton"}, "`solver` must be one of 'taylor', 'exact'; got 'newton'"),
        ({"divergence": "tv"}, 'no second-order expansion .* pass `solver="exact"`'),
    ],
)
def test_unknown_names(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gamma(0.5, 0.1, **arguments)
    with pytest.raises(ValueError, match=message):
        Cactus(0.1, **arguments)


def test_the_rule_raises_to_gamma_row_by_row() -> None:
    q = torch.tensor([[0.1, 0.4], [0.2, 0.9]], dtype=torch.float64)
    for name, solver in (("kl", "exact"), ("tv", "exact"), ("js", "taylor")):
        raised = Cactus([0.1, 0.5], divergence=name, solver=solver).raised_prob(Drafted(q, q))
        assert torch.equal(raised, torch.stack([gamma(q[0], 0.1, name, solver), gamma(q[1], 0.5, name, solver)]))
