"""Cactus as a change of one logit: the rows it makes are the laws that Cactus aims at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cactus_hf import Cactus, Lenience
from cactus_hf.acceptance import Drafted
from cactus_hf.integrations.flat_rows import Raised, Rows, cactus_rows, raise_logits
from cactus_hf.kl_budget import find_deltas


CPU = torch.device("cpu")


def raise_all(logits: Tensor, tokens: Tensor, rule: Cactus) -> Raised:
    return raise_logits(logits, Rows(torch.arange(len(logits)), rule), tokens, None)


def law_aimed_at(row: Tensor, token: int, delta: float, rule: Cactus) -> Tensor:
    """h, from its definition, in float64."""
    law = row.double().softmax(-1)
    prob = law[token].clone()
    gamma = rule.raise_to(prob, torch.tensor(delta, dtype=torch.float64))
    if prob < 1:
        law *= (1 - gamma) / (1 - prob)
    law[token] = gamma
    return law


@pytest.mark.parametrize("divergence, solver", [("kl", "taylor"), ("kl", "exact"), ("reverse_kl", "exact")])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_rows_become_the_laws_aimed_at(divergence: str, solver: str, scale: float):
    logits = torch.randn(60, 9) * scale
    logits[:20, 3:] = -torch.inf  # as behind a top-k
    tokens = torch.randint(9, (60,))
    delta = torch.tensor([0.0, 1e-4, 0.3, 2.0, torch.inf]).double().repeat(12)
    rule = Cactus(delta, divergence=divergence, solver=solver)
    raised = raise_all(logits, tokens, rule)
    for i, token in enumerate(tokens.tolist()):
        row = logits[i].clone()
        row[token] = raised.logits[i]
        expected = law_aimed_at(logits[i], token, delta[i].item(), rule)
        # Logits of about 40 have 4e-6 between two float32 numbers
        torch.testing.assert_close(row.softmax(-1).double(), expected, rtol=0, atol=5e-6)


def test_delta_0_changes_no_bit():
    logits, tokens = torch.randn(50, 7) * 5, torch.randint(7, (50,))
    raised = raise_all(logits, tokens, Cactus(torch.zeros(50).double()))
    assert torch.equal(raised.logits, logits.gather(1, tokens[:, None]).squeeze(1))
    assert torch.equal(raised.ball_kl, torch.zeros(50).double())


def test_certain_tokens_have_probability_1_in_float32():
    logits = torch.randn(1, 200_000)
    logits[0, 5] = raise_all(logits, torch.tensor([5]), Cactus(torch.inf)).logits
    assert logits.softmax(-1)[0, 5] == 1
    assert logits.logsumexp(-1) == logits[0, 5]


def test_nothing_is_raised_where_nothing_may_be():
    """No law; the only token there is; one that cannot be; a draft taken back."""
    none = -torch.inf
    logits = torch.tensor([[none, none], [torch.nan, 0.0], [0.0, none], [0.0, none], [0.0, 1.0]])
    raised = raise_all(logits, torch.tensor([0, 1, 0, 1, -1]), Cactus(0.5))
    assert raised.logits.tolist() == [none, 0.0, 0.0, none, 0.0]
    assert raised.ball_kl.tolist() == [0.0] * 5


def test_ball_kl_is_that_of_the_law_aimed_at():
    logits, tokens = torch.randn(30, 8, dtype=torch.float64), torch.randint(8, (30,))
    raised = raise_all(logits, tokens, Cactus(0.2))
    for i, token in enumerate(tokens.tolist()):
        law, target = law_aimed_at(logits[i], token, 0.2, Cactus(0.2)), logits[i].softmax(-1)
        kl = torch.special.xlogy(law, law / target).sum()
        torch.testing.assert_close(raised.ball_kl[i], kl, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("has_draft_logits", [True, False])
def test_budgets_are_found_from_both_laws(has_draft_logits: bool):
    logits, draft = torch.randn(40, 6, dtype=torch.float64), torch.randn(20, 6, dtype=torch.float64)
    at, tokens = torch.arange(0, 40, 2), torch.randint(6, (20,))
    rule = Cactus(kl_budget=torch.tensor([0.01, 0.2]).double().repeat(10))
    raised = raise_logits(logits, Rows(at, rule), tokens, draft if has_draft_logits else None)
    draft_probs = draft.softmax(-1) if has_draft_logits else torch.eye(6).double()[tokens]
    delta = find_deltas(logits[at].softmax(-1), draft_probs, rule).delta
    prob = logits[at].softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    gamma = rule.raised_prob(Drafted(prob, prob, delta=delta))
    changed = logits[at].scatter(1, tokens[:, None], raised.logits[:, None]).softmax(-1)
    torch.testing.assert_close(changed.gather(1, tokens[:, None]).squeeze(1), gamma, rtol=1e-4, atol=1e-6)


def test_requests_are_found_in_the_batch():
    rules = {0: Cactus(0.5), 1: Lenience(0.5), 2: Cactus(kl_budget=0.1), 4: Cactus(0.25)}
    deltas, budgets = cactus_rows(rules, [0, 3, 5, 8, 9], [2, 1, 2, 0, 3], CPU)
    assert deltas.at.tolist() == [0, 1, 9, 10, 11]
    assert deltas.rule == Cactus([0.5, 0.5, 0.25, 0.25, 0.25])
    assert budgets.at.tolist() == [5, 6]
    assert budgets.rule == Cactus(kl_budget=[0.1, 0.1])
    assert cactus_rows({1: Lenience(0.5)}, [0, 3], [2, 1], CPU) == []
