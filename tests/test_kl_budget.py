"""The delta found for a budget: never above it, hardly below the largest, and the same from block to block."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import reference
import torch
from law_pairs import PAIRS, random_pairs
from torch import Tensor

from cactus_hf import Cactus, SpeculativeSampling, Verification, emitted_law, verify
from cactus_hf.kl_budget import Found, find_deltas, find_deltas_of_block, spent


BUDGETS = (0.0, 1e-9, 1e-6, 1e-3, 0.03, 0.3, 2.0, math.inf)
EXACT = 1e-12  # sums of a few float64 numbers below 1, times a logarithm
LAWS = PAIRS + random_pairs(16, 40, seed=21)


def enumerated(target: Tensor, draft: Tensor, delta: float) -> tuple[float, float]:
    """KL and total variation of the emitted law, from its definition."""
    q, p = target.tolist(), draft.tolist()
    law = reference.emitted_law(Cactus(delta), q, p)
    return reference.divergence(law, q), sum(abs(h - q_x) for h, q_x in zip(law, q, strict=True)) / 2


def found_at(target: Tensor, draft: Tensor, budget: float) -> Found:
    return Found(*(field.item() for field in find_deltas(target, draft, Cactus(kl_budget=budget))))


@pytest.mark.parametrize("budget", BUDGETS)
def test_by_enumeration_no_budget_is_exceeded_and_hardly_any_is_left(budget: float) -> None:
    for target, draft in LAWS:
        delta, kl, tv = found_at(target, draft, budget)
        expected_kl, expected_tv = enumerated(target, draft, delta)
        assert expected_kl <= budget + EXACT
        assert (kl, tv) == pytest.approx((expected_kl, expected_tv), abs=EXACT)
        if budget == 0:
            assert delta == 0
        elif delta == math.inf:
            assert enumerated(target, draft, math.inf)[0] <= budget + EXACT
        elif budget > 1e-8 and delta < 2**199:  # rounding decides about 1 % of less; and there the search ends
            assert enumerated(target, draft, delta * 1.01)[0] > budget


def test_budgets_just_below_what_any_delta_spends() -> None:
    """Where the divergence does not grow any more, it says nothing of where it began to."""
    target = torch.tensor([[0.6331, 0.3669], [0.0001, 0.9999], [0.5, 0.5]], dtype=torch.float64)
    draft = torch.tensor([[0.0, 1.0], [0.3, 0.7], [0.9, 0.1]], dtype=torch.float64)
    most = find_deltas(target, draft, Cactus(kl_budget=torch.inf)).kl
    for share in (0.9, 0.99, 0.999):
        found = find_deltas(target, draft, Cactus(kl_budget=most * share))
        assert (found.kl <= most * share).all() and (found.kl > 0.99 * most * share).all()


@pytest.mark.parametrize(("divergence", "solver"), (("kl", "exact"), ("tv", "exact"), ("neyman", "exact")))
def test_other_ways_to_raise_a_token(divergence: str, solver: str) -> None:
    """The budget is of the emitted law's KL whatever the divergence that delta bounds."""
    for target, draft in LAWS[::9]:
        rule = Cactus(kl_budget=0.03, divergence=divergence, solver=solver)
        found = find_deltas(target, draft, rule)
        q, p = target.tolist(), draft.tolist()
        at_found = Cactus(found.delta.item(), divergence=divergence, solver=solver)
        assert reference.divergence(reference.emitted_law(at_found, q, p), q) <= 0.03 + EXACT
        expected = torch.tensor(reference.emitted_law(rule, q, p), dtype=torch.float64)
        torch.testing.assert_close(emitted_law(target, draft, rule), expected, rtol=0, atol=1e-3)


def test_the_law_that_budgets_emit() -> None:
    for target, draft in LAWS[::5]:
        rule = Cactus(kl_budget=0.03, kl_total=0.2)
        expected = torch.tensor(reference.emitted_law(rule, target.tolist(), draft.tolist()), dtype=torch.float64)
        # The slow twin finds the largest delta, and here it may be .15 % less
        torch.testing.assert_close(emitted_law(target, draft, rule), expected, rtol=0, atol=1e-3)
        assert torch.equal(
            emitted_law(target, draft, Cactus(kl_budget=0.2, kl_total=0.03)), emitted_law(target, draft, rule)
        )


def test_rows_and_leading_dimensions() -> None:
    pairs = random_pairs(24, 8, seed=3)[:12]
    target, draft = (torch.stack(rows).reshape(3, 2, 2, 8) for rows in zip(*pairs, strict=True))
    together = find_deltas(target, draft, Cactus(kl_budget=[0.01, 0.1, 1.0]))
    for row, budget in enumerate((0.01, 0.1, 1.0)):
        alone = find_deltas(target[row], draft[row], Cactus(kl_budget=budget))
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[row], theirs, rtol=2e-3, atol=0)  # brackets of other rows end elsewhere


@pytest.mark.parametrize("delta", (0.001, 0.1, 1.0))
def test_a_long_row(delta: float) -> None:
    """V of Qwen: the divergence that `law.py` finds for a delta leads back to this delta."""
    logits = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 3
    target, draft = logits.softmax(-1)
    law = emitted_law(target, draft, Cactus(delta))
    kl = float((torch.xlogy(law, law) - torch.xlogy(law, target)).sum())
    found = found_at(target, draft, kl)
    assert found.delta == pytest.approx(delta, rel=2e-3)
    law = emitted_law(target, draft, Cactus(found.delta))
    assert (torch.xlogy(law, law) - torch.xlogy(law, target)).sum() <= kl + EXACT


class TestBlocks:
    """Logits of two rows, three drafts, 8 tokens."""

    target = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(7)) * 2
    draft = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(8)) * 2
    tokens = torch.tensor([[1, 2, 3], [4, 5, 0]])

    def prob(self) -> Tensor:
        return self.target[:, :3].double().softmax(-1).gather(2, self.tokens[..., None])[..., 0]

    def test_positions_spend_from_left_to_right(self) -> None:
        rule = Cactus(kl_budget=[0.05, math.inf], kl_total=[0.12, 0.3])
        found = find_deltas_of_block(self.target, self.draft, rule, self.prob())
        for row, (budget, total) in enumerate(((0.05, 0.12), (math.inf, 0.3))):
            for i in range(3):
                laws = (self.target[row, i].double().softmax(-1), self.draft[row, i].double().softmax(-1))
                expected = found_at(*laws, min(budget, total))
                assert found.kl[row, i].item() == pytest.approx(expected.kl, rel=1e-2, abs=EXACT)
                total = max(0.0, total - found.kl[row, i].item())
        assert (found.kl.sum(1) <= torch.tensor([0.12, 0.3]) + EXACT).all()
        assert found.delta[0, 2] > 0 and found.kl[0].tolist() == pytest.approx([0.05, 0.05, 0.02], rel=1e-2)

    def test_drafts_without_probabilities_emit_the_law_aimed_at(self) -> None:
        found = find_deltas_of_block(self.target, None, Cactus(kl_budget=0.1), self.prob())
        one_hot = torch.nn.functional.one_hot(self.tokens, 8).double()
        expected = find_deltas(self.target[:, :3].double().softmax(-1), one_hot, Cactus(kl_budget=0.1))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=0)

    def test_truncated_laws_are_cut_to_what_is_left(self) -> None:
        wide = torch.nn.functional.pad(self.target, (13, 20), value=-math.inf)
        found = find_deltas_of_block(wide, torch.nn.functional.pad(self.draft, (13, 20), value=-math.inf),
                                     Cactus(kl_budget=0.1), self.prob())  # fmt: skip
        expected = find_deltas_of_block(self.target, self.draft, Cactus(kl_budget=0.1), self.prob())
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("draft", (None, draft))
    def test_verify_reports_what_was_reached(self, draft: Tensor | None) -> None:
        rule = Cactus(kl_total=0.3)
        for seed in range(8):
            uniforms = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
            result = verify(self.target, self.tokens, draft, rule, uniforms=uniforms)
            found = find_deltas_of_block(self.target, draft, rule, self.prob())
            is_reached = torch.arange(3) < result.num_verified[:, None]
            torch.testing.assert_close(result.emitted_kl, found.kl.where(is_reached, 0.0), rtol=1e-6, atol=0)
            torch.testing.assert_close(result.emitted_tv, found.tv.where(is_reached, 0.0), rtol=1e-6, atol=0)
            each = [self.position(i, draft, found.delta[:, i], uniforms) for i in range(3)]
            for row, count in enumerate(result.num_accepted.tolist()):
                assert all(each[i].num_accepted[row] == 1 for i in range(count))
                assert count == 3 or each[count].next_token[row] == result.next_token[row]

    def position(self, i: int, draft: Tensor | None, delta: Tensor, uniforms: Tensor) -> Verification:
        """One drafted position alone, at a delta of each row."""
        draft = None if draft is None else draft[:, i : i + 1]
        tokens, uniforms = self.tokens[:, i : i + 1], uniforms[:, [i, 3]]
        return verify(self.target[:, [i, 3]], tokens, draft, Cactus(delta), uniforms=uniforms)

    def test_laws_that_are_none_disturb_no_other(self) -> None:
        target, draft = self.target.clone(), self.draft.clone()
        draft[0, 1], target[1, 2] = math.nan, -math.inf
        found = find_deltas_of_block(target, draft, Cactus(kl_budget=0.1), self.prob())
        expected = find_deltas_of_block(self.target, self.draft, Cactus(kl_budget=0.1), self.prob())
        is_law = torch.tensor([[True, False, True], [True, True, False]])
        torch.testing.assert_close(found.kl[is_law], expected.kl[is_law], rtol=1e-2, atol=0)

    def test_positions_that_no_row_reaches_are_left_out(self) -> None:
        asked = []

        def is_kept(i: int, delta: Tensor) -> Tensor:
            asked.append((i, delta.tolist()))
            return torch.tensor([False, i == 0])

        found = find_deltas_of_block(self.target, self.draft, Cactus(kl_budget=0.1), self.prob(), is_kept)
        expected = find_deltas_of_block(self.target, self.draft, Cactus(kl_budget=0.1), self.prob())
        assert asked == [(i, expected.delta[:, i].tolist()) for i in (0, 1)]
        assert torch.equal(found.kl[:, :2], expected.kl[:, :2]) and (found.kl[:, 2] == 0).all()

    def test_no_drafts(self) -> None:
        result = verify(self.target[:, 3:], self.tokens[:, :0], self.draft[:, :0], Cactus(kl_budget=0.1))
        assert result.emitted_kl is not None and result.emitted_kl.shape == (2, 0)


class TestEveryPath:
    """Texts of four tokens out of three, whose laws depend on the token before; rounds of two drafts."""

    target = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.05, 0.9, 0.05]], dtype=torch.float64)
    draft = torch.tensor([[0.1, 0.3, 0.6], [0.5, 0.4, 0.1], [0.4, 0.2, 0.4]], dtype=torch.float64)

    def largest_sum(self, rule: Cactus, num_tokens: int) -> tuple[float, int]:
        """The largest sum of emitted divergences on a path, by enumeration, and how many paths there are."""
        sums: list[float] = []

        @cache
        def spendings(last: int, first_draft: int, total: float) -> list[tuple[float, float]]:
            """For one and for two verified positions: what they emit, and what is left of the total."""
            before = [last, first_draft]
            laws = [law[before].log()[None] for law in (self.target, self.draft)]
            limited = replace(rule, kl_total=total)
            found = find_deltas_of_block(*laws, limited, torch.zeros(1, 2, dtype=torch.float64))
            deltas = found.delta[0].tolist()
            kl = [enumerated(self.target[b], self.draft[b], d)[0] for b, d in zip(before, deltas, strict=True)]
            left = [float(spent(limited, found.kl[:, :count].sum(1)).kl_total) for count in (1, 2)]
            return [(kl[0], left[0]), (sum(kl), left[1])]

        def go_on(last: int, missing: int, total: float, emitted: float) -> None:
            if missing <= 0:
                sums.append(emitted)
                return
            for first_draft, following in itertools.product(range(3), repeat=2):
                for num_kept in range(3):
                    kl, left = spendings(last, first_draft, total)[min(num_kept, 1)]
                    go_on(following, missing - num_kept - 1, left, emitted + kl)

        go_on(0, num_tokens, rule.kl_total, 0.0)
        return max(sums), len(sums)

    @pytest.mark.parametrize("total", (0.0, 0.05, 0.4, 3.0))
    def test_no_sum_exceeds_the_total(self, total: float) -> None:
        largest, count = self.largest_sum(Cactus(kl_budget=0.15, kl_total=total), 3)
        assert largest <= total + EXACT and count > 500
        if total in (0.05, 0.4):
            assert largest > total * 0.99, "it should be used up"


class TestParameters:
    def test_either_delta_or_budgets(self) -> None:
        for options in ({}, {"delta": 1.0, "kl_budget": 1.0}, {"delta": 1.0, "kl_total": 1.0}):
            with pytest.raises(ValueError, match="either `delta`, or `kl_budget` and `kl_total`"):
                Cactus(**options)

    @pytest.mark.parametrize("name", ("kl_budget", "kl_total"))
    @pytest.mark.parametrize("value", (-1.0, math.nan, "1", True, [[1.0]], [0.1, -1.0]))
    def test_bad_values(self, name: str, value: object) -> None:
        with pytest.raises(ValueError, match=f"`{name}` must be a number of nats"):
            Cactus(**{name: value})

    def test_equality(self) -> None:
        assert Cactus(kl_budget=0.1) == Cactus(kl_budget=0.1) != Cactus(0.1)
        assert Cactus(kl_budget=[0.1, 0.2]) != Cactus(kl_total=[0.1, 0.2])

    def test_what_is_left(self) -> None:
        left = spent(Cactus(kl_budget=0.1, kl_total=0.5), torch.tensor([0.2, 0.7], dtype=torch.float64))
        assert left == Cactus(kl_budget=0.1, kl_total=[0.3, 0.0])
        assert spent(Cactus(kl_budget=0.1), torch.ones(2)) == Cactus(kl_budget=0.1)

    def test_a_budget_of_0_is_lossless(self) -> None:
        for target, draft in LAWS:
            lossless = emitted_law(target, draft, SpeculativeSampling())
            torch.testing.assert_close(emitted_law(target, draft, Cactus(kl_budget=0.0)), lossless, rtol=0, atol=EXACT)
