"""The emitted law against enumeration, and what the theory promises about it."""

from __future__ import annotations

import math
import time

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_pairs import PAIRS, random_pairs

from cactus_hf.acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling
from cactus_hf.bounded_rules import Lenience, Mentored
from cactus_hf.divergences import DIVERGENCES
from cactus_hf.heuristic_rules import TopK, TypicalAcceptance
from cactus_hf.law import emitted_divergence, emitted_law
from cactus_hf.verification import verify


DELTAS = (0.0, 1e-12, 1e-6, 0.01, 0.1, 0.5, 1.0, 1.2564, 3.0, math.inf)
RULES = [
    *(Cactus(delta) for delta in DELTAS),
    SpeculativeSampling(),
    TypicalAcceptance(),
    TypicalAcceptance(epsilon=0.3, alpha=0.9, recovery="sample"),
    TopK(1),
    TopK(3),
    TopK(100),
    Mixture(0.1),
    Mixture(0.7),
    Lenience(0.3),
    Lenience(1.0),
    *(Cactus(0.3, divergence=name) for name in ("chi2", "reverse_kl", "neyman", "hellinger", "js")),
    *(Cactus(0.1, divergence=name, solver="exact") for name in DIVERGENCES),
    *(Mentored(0.1, name) for name in DIVERGENCES),
    Mentored(0.0),
    Mentored(1e-6),
    Mentored(math.inf),
]
# Sums of a few float64 numbers below 1: an error of 1e-12 is no rounding.
EXACT = 1e-12

LAWS = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1.0)), min_size=5, max_size=5).filter(lambda x: sum(x) > 0)


def normalised(weights: list[float]) -> torch.Tensor:
    return torch.tensor([weight / math.fsum(weights) for weight in weights], dtype=torch.float64)


def kl(law: torch.Tensor, target: torch.Tensor) -> float:
    return reference.divergence(law.tolist(), target.tolist())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_enumeration(rule: AcceptanceRule) -> None:
    for target, draft in PAIRS:
        expected = torch.tensor(reference.emitted_law(rule, target.tolist(), draft.tolist()), dtype=torch.float64)
        law = emitted_law(target, draft, rule)
        assert law.dtype == torch.float64
        torch.testing.assert_close(law, expected, rtol=0, atol=EXACT)


@settings(deadline=None, max_examples=150)
@given(LAWS, LAWS, st.sampled_from(RULES))
def test_equals_enumeration_for_any_laws(q: list[float], p: list[float], rule: AcceptanceRule) -> None:
    target, draft = normalised(q), normalised(p)
    expected = torch.tensor(reference.emitted_law(rule, target.tolist(), draft.tolist()), dtype=torch.float64)
    torch.testing.assert_close(emitted_law(target, draft, rule), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("rule", [SpeculativeSampling(), Cactus(0.0), Cactus(0)], ids=str)
def test_lossless_rules_emit_the_target(rule: AcceptanceRule) -> None:
    for target, draft in PAIRS:
        torch.testing.assert_close(emitted_law(target, draft, rule), target, rtol=0, atol=EXACT)


def test_mixture_emits_the_mixture() -> None:
    for target, draft in PAIRS:
        law = emitted_law(target, draft, Mixture(0.3))
        torch.testing.assert_close(law, 0.3 * target + 0.7 * draft, rtol=0, atol=EXACT)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, Mixture)], ids=str)
def test_support_of_the_target_is_kept(rule: AcceptanceRule) -> None:
    for target, draft in PAIRS:
        assert (emitted_law(target, draft, rule)[target == 0] == 0).all()


@pytest.mark.parametrize("delta", DELTAS)
def test_cactus_law_lies_between_draft_and_target(delta: float) -> None:
    for target, draft in PAIRS:
        law = emitted_law(target, draft, Cactus(delta))
        assert (law >= torch.minimum(target, draft) - EXACT).all()
        assert (law <= torch.maximum(target, draft) + EXACT).all()
        assert kl(law, target) <= kl(draft, target) + EXACT


@pytest.mark.parametrize("delta", DELTAS)
def test_cactus_total_variation_formula(delta: float) -> None:
    for target, draft in PAIRS:
        distance = (emitted_law(target, draft, Cactus(delta)) - target).abs().sum() / 2
        spread = target * (1 - target)
        bonus = torch.where(spread > 0, (2 * delta * spread).sqrt(), 0.0)
        expected = torch.minimum((draft - target).clamp(min=0), bonus).sum()
        torch.testing.assert_close(distance, expected, rtol=0, atol=EXACT)


def test_cactus_acceptance_and_distance_grow_with_delta() -> None:
    for target, draft in PAIRS:
        laws = [emitted_law(target, draft, Cactus(delta)) for delta in DELTAS]
        distances = [((law - target).abs().sum() / 2).item() for law in laws]
        q, p = target.tolist(), draft.tolist()
        acceptances = [
            sum(p_n * reference.accept(Cactus(delta), q, p, n) for n, p_n in enumerate(p)) for delta in DELTAS
        ]
        for values in (distances, acceptances):
            assert all(after >= before - EXACT for before, after in zip(values, values[1:], strict=False))
        # The draft's mass outside the target's support is out of reach for every delta.
        assert acceptances[-1] == pytest.approx(draft[target > 0].sum().item(), abs=EXACT)


@pytest.mark.parametrize("delta", [0.01, 0.5, 1.0, 3.0])
def test_one_hot_draft_emits_the_law_aimed_at(delta: float) -> None:
    for target, _ in PAIRS:
        for n in range(len(target)):
            draft = torch.nn.functional.one_hot(torch.tensor(n), len(target)).double()
            aimed = reference.law_aimed_at(target.tolist(), n, reference.gamma(target[n].item(), delta))
            law = emitted_law(target, draft, Cactus(delta))
            torch.testing.assert_close(law, torch.tensor(aimed, dtype=torch.float64), rtol=0, atol=EXACT)
            assert kl(law, target) <= math.log(1 + 2 * delta) + EXACT


def test_leading_dimensions_and_parameters_per_row() -> None:
    pairs = random_pairs(24, 8, seed=3)[:12]
    target, draft = (torch.stack(rows).reshape(3, 2, 2, 8) for rows in zip(*pairs, strict=True))
    for rule, alone in (
        (Cactus([0.0, 0.3, math.inf]), [Cactus(0.0), Cactus(0.3), Cactus(math.inf)]),
        (TypicalAcceptance(epsilon=[0.1, 0.2, 0.6]), [TypicalAcceptance(epsilon=e) for e in (0.1, 0.2, 0.6)]),
        (TypicalAcceptance(alpha=[0.1, 0.9, 3.0]), [TypicalAcceptance(alpha=a) for a in (0.1, 0.9, 3.0)]),
        (TopK([1, 2, 3]), [TopK(1), TopK(2), TopK(3)]),
        (Mixture([0.1, 0.5, 0.9]), [Mixture(0.1), Mixture(0.5), Mixture(0.9)]),
        (Lenience([0.1, 0.5, 1.0]), [Lenience(0.1), Lenience(0.5), Lenience(1.0)]),
        (Mentored([0.0, 0.2, math.inf]), [Mentored(0.0), Mentored(0.2), Mentored(math.inf)]),
    ):
        law = emitted_law(target, draft, rule)
        for row in range(3):
            torch.testing.assert_close(law[row], emitted_law(target[row], draft[row], alone[row]), rtol=0, atol=EXACT)


@pytest.mark.parametrize("rule", [Cactus(0.3), Cactus(kl_budget=0.1), Mentored(0.1), TopK()], ids=repr)
def test_no_rows(rule: AcceptanceRule) -> None:
    assert emitted_law(torch.zeros(0, 3), torch.zeros(0, 3), rule).shape == (0, 3)
    none = torch.zeros(0, 1, dtype=torch.long)
    assert verify(torch.zeros(0, 2, 3), none, torch.zeros(0, 1, 3), rule).next_token.shape == (0,)


def test_float32_rows_are_taken_as_they_are() -> None:
    target, draft = (rows.float() for rows in random_pairs(4, 8, seed=4)[1])
    law = emitted_law(target, draft, Cactus(0.2))
    assert law.dtype == torch.float64
    torch.testing.assert_close(law, emitted_law(target.double(), draft.double(), Cactus(0.2)), rtol=0, atol=EXACT)


@pytest.mark.parametrize("delta", [1e-6, 0.01, 1.0])
def test_large_vocabulary(delta: float) -> None:
    """V of Qwen: the formula for the total variation holds, and a row takes well under a second."""
    target, draft = random_pairs(8, 151_936, seed=5)[5]
    start = time.perf_counter()
    law = emitted_law(target, draft, Cactus(delta))
    assert time.perf_counter() - start < 2  # about 0.05 s on an idle core
    expected = torch.minimum((draft - target).clamp(min=0), (2 * delta * target * (1 - target)).sqrt()).sum()
    torch.testing.assert_close((law - target).abs().sum() / 2, expected, rtol=1e-9, atol=0)  # 1e5 roundings
    torch.testing.assert_close(law.sum().item(), 1.0, rtol=1e-9, atol=0)
    assert ((law >= torch.minimum(target, draft) - 1e-12) & (law <= torch.maximum(target, draft) + 1e-12)).all()


def test_float32_softmax_of_a_large_vocabulary_is_accepted() -> None:
    # PyTorch's float32 softmax is off by up to 1e-5 in its sum at this size.
    target = (torch.randn(151_936, generator=torch.Generator().manual_seed(6)) * 3).softmax(-1)
    emitted_law(target, target, SpeculativeSampling())


class TestEmittedDivergence:
    target_logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(7))
    draft_logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(8))

    @pytest.mark.parametrize("rule", [*RULES, Cactus([0.1, 2.0]), TopK([1, 4])], ids=str)
    def test_is_that_of_the_emitted_law(self, rule: AcceptanceRule) -> None:
        target, draft = (logits.double().softmax(-1) for logits in (self.target_logits, self.draft_logits))
        law = emitted_law(target, draft, rule)
        got_kl, got_tv = emitted_divergence(self.target_logits, self.draft_logits, rule)
        assert got_kl.shape == got_tv.shape == (2, 3)
        for row in range(2):
            for i in range(3):
                assert got_kl[row, i].item() == pytest.approx(kl(law[row, i], target[row, i]), abs=EXACT)
                distance = (law[row, i] - target[row, i]).abs().sum().item() / 2
                assert got_tv[row, i].item() == pytest.approx(distance, abs=EXACT)

    def test_one_hot_drafts_give_the_ball(self) -> None:
        tokens = torch.tensor([[1, 2, 3], [4, 5, -1]])
        got, _ = emitted_divergence(self.target_logits, None, Cactus(0.4), draft_tokens=tokens)
        target = self.target_logits.double().softmax(-1)
        for row, i in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
            q_n = target[row, i, tokens[row, i]].item()
            gamma_n = reference.gamma(q_n, 0.4)
            expected = reference.divergence([gamma_n, 1 - gamma_n], [q_n, 1 - q_n])
            assert got[row, i].item() == pytest.approx(expected, abs=EXACT)

    def test_infinite_where_the_mixture_leaves_the_support(self) -> None:
        target_logits = self.target_logits.clone()
        target_logits[0, 0, 0] = -math.inf
        got, _ = emitted_divergence(target_logits, self.draft_logits, Mixture(0.5))
        assert got[0, 0] == math.inf and got.flatten()[1:].isfinite().all()
        got, _ = emitted_divergence(target_logits, self.draft_logits, Cactus(math.inf))
        assert got.isfinite().all()

    def test_no_position(self) -> None:
        got_kl, got_tv = emitted_divergence(self.target_logits[:, :0], self.draft_logits[:, :0], Cactus(1.0))
        assert got_kl.shape == got_tv.shape == (2, 0)

    def test_broken_rows_stay_where_they_are(self) -> None:
        target_logits = self.target_logits.clone()
        target_logits[1, 2] = math.nan
        got, _ = emitted_divergence(target_logits, self.draft_logits, Cactus(0.4))
        expected, _ = emitted_divergence(self.target_logits, self.draft_logits, Cactus(0.4))
        assert got[1, 2].isnan()
        assert torch.equal(got.flatten()[:5], expected.flatten()[:5])

    def test_one_hot_drafts_need_tokens(self) -> None:
        with pytest.raises(ValueError, match="draft_tokens"):
            emitted_divergence(self.target_logits, None, Cactus(0.4))


class TestBadInput:
    good = torch.tensor([0.25, 0.75])

    @pytest.mark.parametrize(
        ("target", "draft", "rule", "message"),
        [
            ([0.2, 0.7], [0.5, 0.5], Cactus(1.0), "`target_probs` must sum to 1"),
            ([0.5, 0.5], [0.5, 0.5001], Cactus(1.0), "`draft_probs` must sum to 1"),
            ([1.5, -0.5], [0.5, 0.5], Cactus(1.0), "negative number or NaN"),
            ([0.5, 0.5], [math.nan, 0.5], Cactus(1.0), "negative number or NaN"),
            ([0.5, 0.5], [0.5, 0.25, 0.25], Cactus(1.0), "one shape"),
            ([0.5, 0.5], [[0.5, 0.5]], Cactus(1.0), "one shape"),
            ([0.5, 0.5], [0.5, 0.5], Cactus([1.0, 2.0]), "values for 2 rows"),
            ([[0.5, 0.5]], [[0.5, 0.5]], Cactus([1.0, 2.0]), "values for 2 rows"),
            ([0.5, 0.5], [0.5, 0.5], 1.0, "acceptance rule"),
        ],
    )
    def test_laws(self, target: list, draft: list, rule: AcceptanceRule, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            emitted_law(torch.tensor(target, dtype=torch.float64), torch.tensor(draft, dtype=torch.float64), rule)

    @pytest.mark.parametrize("target", [[0.25, 0.75], torch.tensor([0, 1]), torch.tensor(1.0)])
    def test_types(self, target: object) -> None:
        with pytest.raises(ValueError, match="floating tensor of shape"):
            emitted_law(target, self.good, Cactus(1.0))

    def test_rule_without_closed_form(self) -> None:
        class Own(Cactus):
            pass

        class Other(AcceptanceRule):
            accept = SpeculativeSampling.accept
            residual = SpeculativeSampling.residual

        assert emitted_law(self.good, self.good, Own(1.0)).sum() == 1
        with pytest.raises(ValueError, match="shares_residual"):
            emitted_law(self.good, self.good, Other())
