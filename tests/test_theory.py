"""The statements of docs/theory.md, checked by enumeration in float64. q is the target's law, p the draft's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
import torch
from law_pairs import PAIRS, random_pairs
from torch import Tensor

from cactus_hf import (
    AcceptanceRule,
    Cactus,
    Lenience,
    Mentored,
    Mixture,
    SpeculativeSampling,
    TopK,
    TypicalAcceptance,
    emitted_law,
    gamma,
)
from cactus_hf.acceptance import Drafted
from cactus_hf.clamp import _bounds, _sort, clamp_law
from cactus_hf.divergences import DIVERGENCES
from cactus_hf.law import emission


EXACT = 1e-12  # sums of a few float64 numbers below 1
DELTAS = (1e-3, 0.05, 0.3, 1.0, 3.0)
CACTUS = [
    *(Cactus(delta) for delta in DELTAS),
    *(Cactus(delta, divergence=name, solver="exact") for name in DIVERGENCES for delta in (0.05, 0.5)),
]
RULES = [*CACTUS, SpeculativeSampling(), TypicalAcceptance(), TopK(2), Mixture(0.4), Lenience(0.5), Mentored(0.1)]


def kl(law: Tensor, target: Tensor) -> float:
    return DIVERGENCES["kl"].terms(law, target).sum().item()


def distances(law: Tensor, target: Tensor) -> dict[str, float]:
    return {name: kind.terms(law, target).sum().item() for name, kind in DIVERGENCES.items()}


def model_like_pairs(num: int, vocab_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Zipf's law in several steepnesses with noise, and a draft that has the same logits with noise."""
    generator = torch.Generator().manual_seed(seed)
    zipf = -torch.arange(1, vocab_size + 1, dtype=torch.float64).log()
    for _ in range(num):
        noise = 0.8 * torch.randn(2, vocab_size, generator=generator, dtype=torch.float64)
        target = (1 + torch.rand(1, generator=generator, dtype=torch.float64)) * zipf + noise[0]
        yield target.softmax(-1), (target + noise[1]).softmax(-1)


class TestTheorem1:
    """For any law h, keeping n with min(1, h_n / p_n) and drawing from (h - p)+ else emits h; nothing accepts more."""

    def test_any_law_is_emitted(self) -> None:
        for (target, draft), (law, _) in zip(PAIRS, [*PAIRS[1:], PAIRS[0]], strict=True):
            if len(law) != len(target):
                continue
            kept = torch.minimum(law, draft)
            residual = (law - draft).clamp(min=0)
            rejected = 1 - kept.sum()
            emitted = kept + rejected * (residual / residual.sum() if residual.sum() > 0 else 0)
            torch.testing.assert_close(emitted, law, rtol=0, atol=EXACT)
            assert kept.sum().item() == pytest.approx(1 - (law - draft).abs().sum().item() / 2, abs=EXACT)

    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_no_rule_accepts_more_than_its_law_allows(self, rule: AcceptanceRule) -> None:
        """What is kept at x is part of what is drafted there and of what is emitted there, whatever the rule."""
        for target, draft in PAIRS:
            law, kept = emission(target, draft, rule)
            assert (kept <= torch.minimum(draft, law) + EXACT).all()

    def test_speculative_sampling_accepts_one_less_the_total_variation(self) -> None:
        for target, draft in PAIRS:
            _, kept = emission(target, draft, SpeculativeSampling())
            assert kept.sum().item() == pytest.approx(1 - (target - draft).abs().sum().item() / 2, abs=EXACT)


@pytest.mark.parametrize("name", DIVERGENCES)
class TestTheorem2:
    """Given n, no law within the ball has more at n than gamma, and the law aimed at is in the ball."""

    def test_the_law_aimed_at_is_in_the_ball(self, name: str) -> None:
        for target, _ in random_pairs(16, 8, seed=11):
            for delta in (0.05, 0.5):
                for n in (
                    n for n in range(0, 8, 3) if 1e-4 < target[n] < 0.9999
                ):  # or a rounding of gamma is too much
                    raised = gamma(target[n].item(), delta, name, "exact")
                    aimed = reference.law_aimed_at(target.tolist(), n, raised)
                    used = reference.f_divergence(name, aimed, target.tolist())
                    assert used <= delta + 1e-9
                    if raised < 1:
                        assert used == pytest.approx(delta, rel=1e-4)

    def test_nothing_in_the_ball_has_more(self, name: str) -> None:
        generator = torch.Generator().manual_seed(12)
        delta, terms = 0.2, DIVERGENCES[name].terms
        for target, _ in random_pairs(8, 8, seed=13):
            goals = torch.rand(200, 8, generator=generator, dtype=torch.float64) ** 4
            goals[:100, 0] += 3  # many of them lean towards token 0
            goals = torch.where(target > 0, goals, 0.0)
            goals = goals / goals.sum(-1, keepdim=True)
            # On the way from the target to a goal, the last law that is within the ball
            low, high = torch.zeros(200, 1, dtype=torch.float64), torch.ones(200, 1, dtype=torch.float64)
            for _ in range(50):
                middle = (low + high) / 2
                inside = terms(target + middle * (goals - target), target).sum(-1, keepdim=True) <= delta
                low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
            found = target + low * (goals - target)
            assert (found[:, 0] <= gamma(target[0].item(), delta, name, "exact") + 1e-9).all()


class TestTheorem3:
    """A bound on the law really emitted needs the target's law or the size of the vocabulary, not only delta."""

    @pytest.mark.parametrize("delta", DELTAS)
    def test_bound_with_the_size_of_the_vocabulary(self, delta: float) -> None:
        pairs = [*PAIRS, *model_like_pairs(8, 300, seed=14)]
        for target, draft in pairs:
            spread = 2 * delta * (len(target) - 1)
            assert (
                kl(emitted_law(target, draft, Cactus(delta)), target) <= math.log1p(spread + math.sqrt(spread)) + EXACT
            )

    def test_delta_alone_is_no_bound(self) -> None:
        """At delta .1, model-like pairs exceed it almost always; few of them at delta 1, where all is kept."""
        values = [kl(emitted_law(q, p, Cactus(0.1)), q) for q, p in model_like_pairs(40, 1000, seed=15)]
        assert sum(value > 0.1 for value in values) >= 30
        # It is worst where the draft prefers many tokens and each is raised a little
        target, draft = torch.full((4096,), 1 / 4096, dtype=torch.float64), torch.zeros(4096, dtype=torch.float64)
        draft[:1024] = 1 / 1024
        assert kl(emitted_law(target, draft, Cactus(0.001)), target) > 1


class TestProposition4:
    """Typical acceptance: with the cross-entropy H(h, q) in place of the divergence, the best h is one token."""

    def test_it_keeps_n_just_if_the_law_of_one_token_is_within_the_budget(self) -> None:
        alpha = 0.3
        for target, _ in random_pairs(32, 8, seed=16):
            entropy = torch.special.entr(target).sum()
            budget = entropy.item() - math.log(alpha)  # nats
            cross_entropy = -target.log()  # of the law that is all n
            drafted = Drafted(target, torch.ones_like(target), entropy.expand(8))
            kept = TypicalAcceptance(epsilon=1.0, alpha=alpha).accept(drafted)
            clear = (cross_entropy - budget).abs() > 1e-9
            assert torch.equal((kept == 1)[clear], ((cross_entropy < budget) | (target == 1))[clear])

    def test_cross_entropy_rewards_collapse(self) -> None:
        """H(h, q) = KL(h || q) + H(h): leaning towards the likeliest token lowers it, and raises the divergence."""
        for target, _ in random_pairs(16, 8, seed=17):
            collapsed = torch.nn.functional.one_hot(target.argmax(), 8).double()
            cross = [
                -torch.special.xlogy(law, target).sum().item() for law in (target, (target + collapsed) / 2, collapsed)
            ]
            assert cross[0] >= cross[1] - EXACT and cross[1] >= cross[2] - EXACT
            assert cross[2] == pytest.approx(kl(collapsed, target), abs=EXACT)


class TestLawAimedAt:
    """Corollaries 5 and 6, and what delta bounds of h: KL(h || q) by (gamma, q_n) alone, as a law of two tokens."""

    q = torch.linspace(0, 1, 20_001, dtype=torch.float64)[1:-1]

    def ball_kl(self, delta: float) -> Tensor:
        raised, terms = gamma(self.q, delta), DIVERGENCES["kl"].terms
        return terms(raised, self.q) + terms(1 - raised, 1 - self.q)

    @pytest.mark.parametrize("delta", [*DELTAS, 0.5, 1.2564])
    def test_corollary_5_and_the_bound(self, delta: float) -> None:
        torch.testing.assert_close(
            gamma(self.q, delta),
            (self.q + (2 * delta * self.q * (1 - self.q)).sqrt()).clamp(max=1),
            rtol=1e-15,
            atol=0,
        )
        values = self.ball_kl(delta)
        assert values.max() <= math.log1p(2 * delta) + EXACT
        edge = 1 / (1 + 2 * delta)  # where the bound is attained
        raised = gamma(edge, delta)
        assert reference.divergence([raised, 1 - raised], [edge, 1 - edge]) == pytest.approx(math.log1p(2 * delta))

    @pytest.mark.parametrize("delta", DELTAS)
    def test_corollary_6_and_its_wider_form(self, delta: float) -> None:
        raised, values = gamma(self.q, delta), self.ball_kl(delta)
        assert (values <= delta + EXACT)[raised <= 0.5].all()
        assert (values <= delta + EXACT)[raised <= 1 - self.q].all()

    def test_where_it_exceeds_delta(self) -> None:
        for delta, interval in ((0.1, (0.444, 0.905)), (0.5, (0.372, 0.607)), (1.0, (0.314, 0.368))):
            above = self.q[self.ball_kl(delta) > delta]
            assert (above.min().item(), above.max().item()) == pytest.approx(interval, abs=6e-4)
        assert (self.ball_kl(1.25) > 1.25).any() and not (self.ball_kl(1.2565) > 1.2565).any()

    def test_one_logit_more_is_the_same_law(self) -> None:
        for target, _ in random_pairs(16, 8, seed=18):
            if (target == 0).any():
                continue
            raised = gamma(target[2].item(), 0.1)
            if raised < 1:
                logits = target.log()
                logits[2] += math.log(raised / (1 - raised)) - math.log(target[2] / (1 - target[2]))
                aimed = torch.tensor(reference.law_aimed_at(target.tolist(), 2, raised), dtype=torch.float64)
                torch.testing.assert_close(logits.softmax(-1), aimed, rtol=1e-9, atol=EXACT)


class TestEmittedLaw:
    @pytest.mark.parametrize("rule", [*CACTUS, Lenience(0.3)], ids=str)
    def test_lies_between_draft_and_target_so_no_divergence_exceeds_the_drafts(self, rule: AcceptanceRule) -> None:
        for target, draft in PAIRS:
            law = emitted_law(target, draft, rule)
            assert (law >= torch.minimum(target, draft) - EXACT).all()
            assert (law <= torch.maximum(target, draft) + EXACT).all()
            if target.min() > 1e-6 and draft.min() > 1e-6:  # or rounding is divided by next to nothing
                theirs, limits = distances(law, target), distances(draft, target)
                assert all(theirs[name] <= limits[name] + 1e-9 for name in theirs)

    @pytest.mark.parametrize("rule", CACTUS, ids=str)
    def test_total_variation_and_acceptance(self, rule: Cactus) -> None:
        for target, draft in PAIRS:
            raised = gamma(target, rule.delta, rule.divergence, rule.solver)
            law, kept = emission(target, draft, rule)
            assert kept.sum().item() == pytest.approx(torch.minimum(draft, raised).sum().item(), abs=EXACT)
            expected = torch.minimum((draft - target).clamp(min=0), raised - target).sum()
            torch.testing.assert_close((law - target).abs().sum() / 2, expected, rtol=0, atol=EXACT)

    @pytest.mark.parametrize("rule", CACTUS, ids=str)
    def test_one_hot_drafts_get_the_law_aimed_at(self, rule: Cactus) -> None:
        for target, _ in PAIRS[::4]:
            for n in range(len(target)):
                draft = torch.nn.functional.one_hot(torch.tensor(n), len(target)).double()
                raised = gamma(target[n].item(), rule.delta, rule.divergence, rule.solver)
                aimed = torch.tensor(reference.law_aimed_at(target.tolist(), n, raised), dtype=torch.float64)
                torch.testing.assert_close(emitted_law(target, draft, rule), aimed, rtol=0, atol=EXACT)

    def test_acceptance_ceiling(self) -> None:
        for target, draft in PAIRS:
            ceiling = draft[target > 0].sum().item()
            for rule in (Cactus(math.inf), Mentored(math.inf), Cactus(math.inf, divergence="tv", solver="exact")):
                assert emission(target, draft, rule)[1].sum().item() == pytest.approx(ceiling, abs=EXACT)

    def test_lenience_is_bounded_by_its_leniency(self) -> None:
        for leniency in (0.1, 0.5, 0.9):
            for target, draft in PAIRS:
                law = emitted_law(target, draft, Lenience(leniency))
                assert (law <= target / leniency + EXACT).all()
                assert kl(law, target) <= -math.log(leniency) + EXACT

    @pytest.mark.parametrize("name", DIVERGENCES)
    def test_mentored_keeps_its_budget(self, name: str) -> None:
        budgets = torch.tensor([0.0, 1e-3, 0.1, 1.0], dtype=torch.float64)
        for pair in PAIRS[::2]:
            target, draft = (probs.expand(4, -1) for probs in pair)
            law = emitted_law(target, draft, Mentored(budgets, name))
            if min(x for x in pair[0].tolist() if x > 0) > 1e-6:
                assert (DIVERGENCES[name].terms(law, target).sum(-1) <= budgets + 1e-9).all()

    def test_how_far_cactus_is_from_the_best_law(self) -> None:
        """For the same acceptance, its KL is less than 5 % above the least at delta .1; 20 % and more at .001."""
        excess = {}
        for delta in (1e-3, 0.1):
            least = theirs = 0.0
            for target, draft in model_like_pairs(16, 1000, seed=19):
                law, kept = emission(target, draft, Cactus(delta))
                theirs += kl(law, target)
                least += least_kl(target, draft, kept.sum().item())
            excess[delta] = theirs / least - 1
        assert 0 <= excess[0.1] < 0.05 and 0.2 < excess[1e-3] < 2


def least_kl(target: Tensor, draft: Tensor, acceptance: float) -> float:
    """KL of the clamp law that keeps a draft with this probability."""
    target, draft = target[None], draft[None]
    ratios = _sort(target, draft, DIVERGENCES["kl"])
    taken = torch.tensor([[1 - acceptance]], dtype=torch.float64)
    below, above, *_ = _bounds(ratios, taken, torch.zeros_like(taken))
    return kl(clamp_law(target, draft, torch.cat([below, above], -1)), target)


def test_the_page_names_tests_that_there_are() -> None:
    tests = Path(__file__).parent
    page = (tests.parent / "docs" / "theory.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+|Test\w+)`", page))
    defined = {
        name for path in tests.glob("test_*.py") for name in re.findall(r"(?:def|class) (\w+)", path.read_text())
    }
    assert len(named) > 15 and named <= defined, named - defined
