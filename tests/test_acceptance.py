"""Rules as functions of a few scalars: gamma and its ball, acceptance and residual, parameters."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cactus_hf.acceptance import AcceptanceRule, Cactus, Drafted, Mixture, SpeculativeSampling
from cactus_hf.bounded_rules import Lenience, Mentored
from cactus_hf.divergences import DIVERGENCES, gamma
from cactus_hf.heuristic_rules import TopK, TypicalAcceptance
from cactus_hf.parameters import check_num_rows, move_rule, repeat_rows, select_rows


INF = math.inf
DELTAS = (0.0, 1e-12, 1e-6, 0.01, 0.1, 0.5, 1.0, 1.2564, 3.0, INF)
# From the smallest normal numbers to the last ones below 1; 1 - q is then exact in float64.
PROBS = (0.0, 1e-300, 1e-12, 1e-3, 0.1, 1 / 3, 0.5, 0.75, 0.9, 0.999, 1 - 1e-12, 1 - 2**-53, 1.0)
DTYPES = (torch.float32, torch.float64)
deltas = st.one_of(st.sampled_from(DELTAS), st.floats(0, 1e6))
probs = st.one_of(st.sampled_from(PROBS), st.floats(0, 1))


class TestGamma:
    @settings(deadline=None)
    @given(probs, deltas)
    def test_is_the_formula(self, q: float, delta: float) -> None:
        assert gamma(q, delta) == pytest.approx(reference.gamma(q, delta), rel=1e-15, abs=0)

    @settings(deadline=None)
    @given(probs, deltas, deltas)
    def test_grows_from_q_to_1(self, q: float, delta: float, other: float) -> None:
        small, large = gamma(q, min(delta, other)), gamma(q, max(delta, other))
        assert q <= small <= large <= 1

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keeps_dtype_and_shape(self, dtype: torch.dtype) -> None:
        q = torch.tensor([[0.0, 0.25], [0.5, 1.0]], dtype=dtype)
        for delta in (0.5, torch.tensor(0.5), torch.tensor([[0.5], [0.5]], dtype=torch.float64)):
            raised = gamma(q, delta)
            assert raised.dtype == dtype and raised.shape == q.shape
            expected = [[reference.gamma(x, 0.5) for x in row] for row in q.tolist()]
            torch.testing.assert_close(raised, torch.tensor(expected, dtype=dtype))
        assert gamma(torch.tensor(0.25, dtype=dtype), 0.5).dtype == dtype

    def test_number_with_several_budgets(self) -> None:
        expected = torch.tensor([0.2, 0.6, 1.0], dtype=torch.float64)
        for delta in ([0.0, 0.5, INF], torch.tensor([0.0, 0.5, INF]), torch.tensor([0.0, 0.5, INF]).double()):
            torch.testing.assert_close(gamma(0.2, delta), expected)
        torch.testing.assert_close(gamma([0.2, 0.2], 0.5), expected[[1, 1]])
        assert isinstance(gamma(0, 1), float) and isinstance(gamma(0.2, torch.tensor(0.5)), torch.Tensor)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("delta", [1e300, 1e308, INF], ids=str)
    def test_huge_budget_is_the_support(self, dtype: torch.dtype, delta: float) -> None:
        q = torch.tensor([0.0, 1e-30, 0.3, 1.0], dtype=dtype)
        expected = [0.0, 1.0, 1.0, 1.0]
        assert gamma(q, delta).tolist() == expected
        assert gamma(q, torch.full((4,), delta, dtype=torch.float64)).tolist() == expected

    def test_zero_budget_is_q(self) -> None:
        q = torch.rand(1000, generator=torch.Generator().manual_seed(0))
        assert torch.equal(gamma(q, 0), q)

    @pytest.mark.parametrize(
        "delta", [-1, -1e-9, math.nan, "1", None, True, 1j, 10**400, torch.tensor(-1.0), torch.tensor(True)]
    )
    def test_bad_delta(self, delta: object) -> None:
        with pytest.raises(ValueError, match="`delta` must be a number of nats"):
            gamma(0.5, delta)

    @pytest.mark.parametrize("q", [-0.1, 1.1, math.nan, "a", None, torch.tensor([0.5, 1.5]), torch.tensor([True])])
    def test_bad_probability(self, q: object) -> None:
        with pytest.raises(ValueError, match="`q` must be a number in"):
            gamma(q, 1.0)


class TestBall:
    """The law aimed at, h, is in the balls around the target that the method names."""

    @pytest.mark.parametrize("delta", [d for d in DELTAS if d < INF])
    @pytest.mark.parametrize("q", PROBS)
    def test_pearson_chi2_is_twice_delta_unless_capped(self, q: float, delta: float) -> None:
        raised = gamma(q, delta)
        if not 0 < q < 1:
            assert raised == q
            return
        chi2 = (raised - q) ** 2 / q + (raised - q) ** 2 / (1 - q)
        # gamma is rounded to 2^-53, which a small q or a small budget magnifies.
        rounding = 2**-50 * (1 + math.sqrt(2 * delta / (q * (1 - q))) + 1 / (q * (1 - q)) * 2**-50)
        assert chi2 <= 2 * delta + rounding
        if raised < 1:
            assert chi2 == pytest.approx(2 * delta, abs=rounding)

    @settings(deadline=None, max_examples=300)
    @given(probs, deltas)
    def test_kl_bounds(self, q: float, delta: float) -> None:
        raised = gamma(q, delta)
        kl = reference.divergence([raised, 1 - raised], [q, 1 - q])
        assert kl <= math.log(1 + 2 * delta) + 1e-12
        if raised <= 1 - q:
            assert kl <= delta + 1e-12

    @pytest.mark.parametrize("delta", [0.01, 0.1, 0.5, 1.0, 3.0])
    def test_kl_bound_is_attained(self, delta: float) -> None:
        q = 1 / (1 + 2 * delta)
        raised = gamma(q, delta)
        assert reference.divergence([raised, 1 - raised], [q, 1 - q]) == pytest.approx(math.log(1 + 2 * delta))

    @pytest.mark.parametrize(("delta", "low", "high"), [(0.1, 0.444, 0.905), (0.5, 0.372, 0.607), (1.0, 0.314, 0.368)])
    def test_kl_exceeds_delta_just_in_an_interval(self, delta: float, low: float, high: float) -> None:
        for q in torch.linspace(0.001, 0.999, 999, dtype=torch.float64).tolist():
            raised = gamma(q, delta)
            is_above = reference.divergence([raised, 1 - raised], [q, 1 - q]) > delta
            if min(abs(q - low), abs(q - high)) > 0.001:
                assert is_above == (low < q < high)


def accept(
    rule: AcceptanceRule, q_n: float, p_n: float, dtype: torch.dtype, entropy: float = 0.5, rank: int = 0
) -> float:
    scalars = (torch.tensor([[x]], dtype=dtype) for x in (q_n, p_n, entropy))
    phi = rule.accept(Drafted(*scalars, rank=torch.tensor([[rank]])))
    assert phi.dtype == dtype and phi.shape == (1, 1)
    return phi.item()


EVERY_RULE = [
    *(Cactus(delta) for delta in DELTAS),
    SpeculativeSampling(),
    TypicalAcceptance(),
    TypicalAcceptance(epsilon=5.0, alpha=5.0, recovery="sample"),
    TopK(1),
    TopK(5),
    Mixture(0.3),
    Lenience(0.4),
    *(Cactus(0.3, divergence=name, solver="exact") for name in DIVERGENCES),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
class TestDegenerateScalars:
    def test_token_off_the_targets_support_is_rejected(self, rule: AcceptanceRule, dtype: torch.dtype) -> None:
        for p_n in (0.0, 1e-30, 0.5, 1.0):
            expected = 0.7 if isinstance(rule, Mixture) and p_n > 0 else 0.0
            assert accept(rule, 0.0, p_n, dtype) == pytest.approx(expected)

    def test_certain_token_is_accepted(self, rule: AcceptanceRule, dtype: torch.dtype) -> None:
        for p_n in (0.0, 1e-30, 0.5, 1.0):
            assert accept(rule, 1.0, p_n, dtype, entropy=0.0) == 1

    def test_token_the_draft_cannot_draw(self, rule: AcceptanceRule, dtype: torch.dtype) -> None:
        if not isinstance(rule, (TypicalAcceptance, TopK)):
            for q_n in (1e-30, 0.5, 1.0):
                assert accept(rule, q_n, 0.0, dtype) == 1

    def test_equal_laws_accept(self, rule: AcceptanceRule, dtype: torch.dtype) -> None:
        if not isinstance(rule, (TypicalAcceptance, TopK)):
            for prob in (1e-30, 0.1, 1 / 3, 0.7, 1.0):
                assert accept(rule, prob, prob, dtype) == 1

    def test_probability_stays_in_range(self, rule: AcceptanceRule, dtype: torch.dtype) -> None:
        q = torch.rand(1, 2000, generator=torch.Generator().manual_seed(1), dtype=dtype)
        p = torch.rand(1, 2000, generator=torch.Generator().manual_seed(2), dtype=dtype)
        drafted = Drafted(q, p, torch.full_like(q, 0.5), torch.zeros(1, 2000, dtype=torch.long))
        phi = rule.accept(drafted)
        assert ((phi >= 0) & (phi <= 1)).all()
        raised = rule.raised_prob(drafted)
        assert (raised >= q).all()
        if isinstance(rule, (Cactus, SpeculativeSampling)):
            assert torch.equal(phi == 1, raised >= p)


def test_gamma_as_large_as_p_is_never_rounded_below_1() -> None:
    # gamma / p in float32, where gamma >= p, must be 1 and not 1 - 6e-8.
    generator = torch.Generator().manual_seed(3)
    q = torch.rand(1, 100_000, generator=generator)
    for delta in (0.0, 1e-6, 0.5):
        rule = Cactus(delta)
        p = rule.raised_prob(Drafted(q, q))
        assert (rule.accept(Drafted(q, p)) == 1).all()


def test_typical_acceptance_is_strict_and_uses_the_lesser_threshold() -> None:
    entropy = math.log(10)  # alpha exp(-H) = 0.03
    assert accept(TypicalAcceptance(), 0.0301, 0.5, torch.float64, entropy) == 1
    assert accept(TypicalAcceptance(), 0.0299, 0.5, torch.float64, entropy) == 0
    assert accept(TypicalAcceptance(), 0.09, 0.5, torch.float64, entropy=0.0) == 0  # epsilon itself
    assert accept(TypicalAcceptance(), 0.0901, 0.5, torch.float64, entropy=0.0) == 1


def test_typical_acceptance_recovers_the_first_of_the_most_likely_tokens() -> None:
    target = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25]])
    weights = TypicalAcceptance().residual(target, target, Drafted(target[:, 0], target[:, 0]))
    assert weights.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert torch.equal(TypicalAcceptance(recovery="sample").residual(target, target, Drafted(*target.T[:2])), target)


def test_top_k_counts_the_ties_of_the_kth() -> None:
    for rank, expected in ((0, 1), (1, 1), (2, 0)):
        assert accept(TopK(2), 0.1, 0.5, torch.float64, rank=rank) == expected


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
def test_agrees_with_the_slow_twin(rule: AcceptanceRule) -> None:
    generator = torch.Generator().manual_seed(4)
    for vocab_size in (1, 2, 5, 7):
        for _ in range(4):
            target, draft = (torch.randn(2, vocab_size, generator=generator, dtype=torch.float64) * 2).softmax(-1)
            for n in range(vocab_size):
                drafted = Drafted(
                    target[n].reshape(1),
                    draft[n].reshape(1),
                    torch.special.entr(target).sum().reshape(1),
                    (target > target[n]).sum().reshape(1),
                )
                phi = rule.accept(drafted).item()
                expected = reference.accept(rule, target.tolist(), draft.tolist(), n)
                assert phi == pytest.approx(expected, abs=1e-14)
                if phi < 1:
                    weights = rule.residual(target[None], draft[None], drafted)[0]
                    law = reference.residual(rule, target.tolist(), draft.tolist(), n)
                    assert (weights / weights.sum()).tolist() == pytest.approx(law, abs=1e-12)
                    if isinstance(rule, (Cactus, SpeculativeSampling)):
                        assert weights[n] == 0


class TestParameters:
    @pytest.mark.parametrize("value", [0, 1, 0.5, INF, torch.tensor(0.5), torch.tensor(2)])
    def test_one_number(self, value: float) -> None:
        delta = Cactus(value).delta
        assert isinstance(delta, float) and delta == float(value)

    @pytest.mark.parametrize("value", [[0, 0.5], (0, 0.5), torch.tensor([0, 0.5]), torch.tensor([0, 0.5]).double()])
    def test_one_a_row(self, value: object) -> None:
        assert isinstance(Cactus(value).delta, torch.Tensor) and Cactus(value).delta.tolist() == [0, 0.5]
        assert Cactus(torch.tensor([0, 1])).delta.is_floating_point()

    @pytest.mark.parametrize(
        ("make", "name"),
        [
            *(
                (lambda value=value: Cactus(value), "delta")
                for value in (-1, math.nan, "1", True, 1j, [1.0, -1.0], [True], ["a"], [[1.0]], [None], {})
            ),
            *(
                (lambda value=value: Cactus(value), "delta")
                for value in (torch.tensor([1.0, math.nan]), torch.ones(2, 2), torch.tensor([True]), torch.tensor(1j))
            ),
            *(
                (lambda value=value: Mixture(value), "weight")
                for value in (0, 1, -0.5, 1.5, math.nan, "half", [0.5, 1.0])
            ),
            *((lambda value=value: Lenience(value), "leniency") for value in (0, 1.1, -0.5, math.nan, None)),
            *((lambda value=value: Mentored(value), "budget") for value in (-1, math.nan, "1", [0.1, -1.0])),
            (lambda: Mentored(0.1, "l2"), "divergence"),
            *(
                (lambda value=value: TopK(value), "k")
                for value in (0, -1, 2.0, 2**70, True, None, [5, 0], torch.tensor([1.0]))
            ),
            *(
                (lambda value=value: TypicalAcceptance(epsilon=value), "epsilon")
                for value in (0, -0.1, math.nan, None)
            ),
            *((lambda value=value: TypicalAcceptance(alpha=value), "alpha") for value in (0, -0.1, math.nan, "x")),
            *((lambda value=value: TypicalAcceptance(recovery=value), "recovery") for value in ("mean", None, 3)),
        ],
    )
    def test_bad_value(self, make, name: str) -> None:
        with pytest.raises(ValueError, match=f"`{name}` must be .*; got "):
            make()

    def test_parameters_per_row_meet_rows_and_scalars(self) -> None:
        q, p = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        rank = torch.arange(12).reshape(3, 4)
        drafted = Drafted(q, p, q + 0.5, rank)
        rows = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        for rule in (
            Cactus([0, 0.5, INF]),
            Mixture([0.1, 0.2, 0.3]),
            TopK([1, 5, 9]),
            Lenience([0.1, 0.5, 1.0]),
            Cactus([0.0, 0.3, INF], divergence="kl", solver="exact"),
            TypicalAcceptance([0.1, 0.5, 0.9]),
        ):
            at = [0, 1, 3]
            scalars = Drafted(*(field[range(3), at] for field in drafted[:4]))
            for row in range(3):
                alone = select_rows(rule, torch.tensor([row]))
                one = Drafted(*(field[row : row + 1] for field in drafted[:4]))
                assert torch.equal(rule.accept(drafted)[row : row + 1], alone.accept(one))
                one = Drafted(*(field[row : row + 1] for field in scalars[:4]))
                expected = alone.residual(rows[0, row : row + 1], rows[1, row : row + 1], one)
                assert torch.equal(rule.residual(rows[0], rows[1], scalars)[row : row + 1], expected)

    def test_rows_are_selected_repeated_and_moved(self) -> None:
        rule = TypicalAcceptance(epsilon=[0.1, 0.2, 0.3], alpha=0.5, recovery="sample")
        assert select_rows(rule, torch.tensor([2, 0])) == TypicalAcceptance([0.3, 0.1], 0.5, "sample")
        assert select_rows(rule, torch.tensor([True, False, True])) == TypicalAcceptance([0.1, 0.3], 0.5, "sample")
        assert repeat_rows(rule, 2, 2) == rule
        assert repeat_rows(rule, 3, 2) == TypicalAcceptance([0.1, 0.1, 0.2, 0.2, 0.3, 0.3], 0.5, "sample")
        assert move_rule(rule, torch.device("meta")).epsilon.device.type == "meta"
        assert rule.epsilon.tolist() == [0.1, 0.2, 0.3]
        assert select_rows(Cactus(1.0), torch.tensor([0])) == repeat_rows(Cactus(1.0), 1, 3) == Cactus(1.0)
        assert select_rows(rule, torch.tensor([], dtype=torch.long)).epsilon.shape == (0,)

    def test_number_of_rows_is_checked(self) -> None:
        check_num_rows(Cactus(1.0), 7)
        check_num_rows(Cactus([1.0, 2.0]), 2)
        for batch_size in (1, 3):
            message = f"`delta` of Cactus has values for 2 rows, but there are {batch_size}"
            with pytest.raises(ValueError, match=message):
                check_num_rows(Cactus([1.0, 2.0]), batch_size)
        with pytest.raises(ValueError, match="`alpha` of TypicalAcceptance"):
            check_num_rows(TypicalAcceptance([0.1, 0.2], [0.3, 0.3, 0.3]), 2)

    @pytest.mark.parametrize(
        "rule", [*EVERY_RULE, Cactus([0.0, INF]), TopK([1, 2]), Mentored([0.1, 1.0], "js")], ids=str
    )
    def test_copies_are_equal(self, rule: AcceptanceRule) -> None:
        for other in (copy.copy(rule), copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
            assert other == rule and hash(other) == hash(rule) and repr(other) == repr(rule)

    def test_equality(self) -> None:
        assert Cactus(1.0) == Cactus(1) and Cactus([1.0, 2.0]) == Cactus(torch.tensor([1.0, 2.0]))
        assert Cactus(1.0) != Cactus(2.0) and Cactus(1.0) != Cactus([1.0]) and Cactus(1.0) != 1.0
        assert SpeculativeSampling() != Cactus(0.0) and len({TopK(), TopK(5), TopK(3)}) == 2

    def test_rules_are_frozen(self) -> None:
        mine = torch.tensor([1.0, 2.0])
        rule = Cactus(mine)
        mine[0] = -1
        assert rule.delta.tolist() == [1, 2]
        with pytest.raises(AttributeError):
            rule.delta = 3.0


def test_cactus_shows_what_was_given():
    assert repr(Cactus(0.3)) == "Cactus(delta=0.3)"
    assert repr(Cactus(kl_total=torch.tensor([1.0, 2.0]))) == "Cactus(kl_total=tensor([1., 2.]))"
    assert repr(Cactus(0.0, solver="exact")) == "Cactus(delta=0.0, solver='exact')"
