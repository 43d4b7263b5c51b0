"""The laws of what `verify` draws, against enumeration and the closed form; seeds were fixed before the first run."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from cactus_hf.acceptance import AcceptanceRule, Cactus, Mixture, SpeculativeSampling
from cactus_hf.bounded_rules import Lenience, Mentored
from cactus_hf.divergences import gamma
from cactus_hf.heuristic_rules import TopK, TypicalAcceptance
from cactus_hf.law import emitted_law
from cactus_hf.parameters import select_rows
from cactus_hf.probabilities import draw
from cactus_hf.verification import verify, verify_block


INF = math.inf


def assert_follows(counts: Tensor, law: Tensor, least: float) -> None:
    """Cells of an expected count of `least` or more are within 5 binomial standard errors, impossible ones empty."""
    num_draws = counts.sum().item()
    expected = law * num_draws
    assert law.sum().item() == pytest.approx(1.0, abs=1e-9)
    assert (counts[law == 0] == 0).all()
    is_tested = expected >= least
    assert is_tested.any()
    error = (counts - expected) / (expected * (1 - law)).sqrt().clamp(min=1e-9)
    assert error[is_tested].abs().max() <= 5, (error[is_tested].abs().max(), expected[is_tested])
    # Cells too rare for a test of their own, taken together.
    rest = expected[~is_tested].sum()
    if rest >= least:
        assert abs(counts[~is_tested].sum() - rest) <= 5 * rest.sqrt()


class TestLawOfDraws:
    """10^6 draws in batches of rows with unequal draft lengths, laws and parameters, by seeds fixed beforehand."""

    num_draws = 1_000_000
    lengths = torch.tensor([3, 0, 2, 1])

    def rows(self, vocab_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(4, 4, vocab_size, generator=generator, dtype=torch.float64) * 1.5
        draft = 0.5 * target[:, :3] + torch.randn(4, 3, vocab_size, generator=generator, dtype=torch.float64)
        # Tokens that top-k or top-p have removed, on either side; none of those that `tokens` drafts.
        tokens = torch.randint(1, vocab_size - 1, (4, 3), generator=generator)
        target[..., -1] = -INF
        draft[0, :, 0] = -INF
        return target, draft, tokens

    def check(self, vocab_size: int, rule: AcceptanceRule, drafting: str, seed: int) -> None:
        target, draft, tokens = self.rows(vocab_size, seed)
        generator = torch.Generator().manual_seed(seed + 1000)
        copies, size = 25_000, 4 * 25_000
        # The 4 kinds of row, `copies` times over, and a count of each outcome (kind, drafted tokens kept, next token).
        counts: Counter[tuple[int, ...]] = Counter()
        repeated = select_rows(rule, torch.arange(4).repeat(copies))
        target_logits = target.float().repeat(copies, 1, 1)
        draft_logits = draft.float().repeat(copies, 1, 1)
        draft_probs = draft_logits.softmax(-1, dtype=torch.float64)
        lengths = self.lengths.repeat(copies)
        kind = torch.arange(4).repeat(copies)
        for _ in range(self.num_draws // size):
            if drafting == "drawn":
                uniforms = torch.rand(size * 3, generator=generator, dtype=torch.float64)
                drafted = draw(draft_probs.reshape(size * 3, vocab_size), uniforms).reshape(size, 3)
            else:
                drafted = tokens.repeat(copies, 1)
            result = verify(
                target_logits,
                drafted,
                None if drafting == "one-hot" else draft_logits,
                repeated,
                draft_lengths=lengths,
                generator=generator,
            )
            # One number for each outcome: kept tokens and the next one in base V + 1, the kind of row on top.
            code = kind.clone()
            for i in range(3):
                code = code * (vocab_size + 1) + torch.where(i < result.num_accepted, drafted[:, i] + 1, 0)
            code = code * (vocab_size + 1) + result.next_token + 1
            counts.update(dict(zip(*(x.tolist() for x in code.unique(return_counts=True)), strict=True)))

        for row in range(4):
            given = None if drafting == "drawn" else tokens[row].tolist()
            p = draft[row].float().softmax(-1, dtype=torch.float64)
            if drafting == "one-hot":
                p = torch.nn.functional.one_hot(tokens[row], vocab_size).double()
            q = target[row].float().softmax(-1, dtype=torch.float64)
            law = reference.block_law(rule, row, q.tolist(), p.tolist(), int(self.lengths[row]), given)
            seen = {code: count for code, count in counts.items() if code // (vocab_size + 1) ** 4 == row}
            cells = {}
            for emitted, probability in law.items():
                code = row
                for token in [*(n + 1 for n in emitted[:-1]), *[0] * (4 - len(emitted)), emitted[-1] + 1]:
                    code = code * (vocab_size + 1) + token
                cells[code] = probability
            assert seen.keys() <= cells.keys()  # nothing impossible
            assert_follows(
                torch.tensor([float(seen.get(code, 0)) for code in cells]),
                torch.tensor(list(cells.values()), dtype=torch.float64),
                least=25,
            )

    @pytest.mark.parametrize("drafting", ["drawn", "given", "one-hot"])
    @pytest.mark.parametrize("vocab_size", [7, 8])
    def test_cactus(self, vocab_size: int, drafting: str) -> None:
        self.check(vocab_size, Cactus([0.03, 1.0, 0.0, INF]), drafting, seed=vocab_size)

    @pytest.mark.parametrize(
        "rule",
        [
            Cactus([0.05, 1.0, 0.5, 0.1]),
            SpeculativeSampling(),
            TypicalAcceptance(epsilon=[0.09, 0.09, 0.3, 0.2]),
            TypicalAcceptance(alpha=[0.3, 0.3, 0.9, 0.5], recovery="sample"),
            TopK([2, 1, 3, 1]),
            Mixture([0.5, 0.5, 0.1, 0.9]),
            Lenience([0.5, 0.9, 0.2, 1.0]),
            Cactus([0.1, 0.5, 0.2, 0.02], divergence="tv", solver="exact"),
        ],
        ids=str,
    )
    def test_rules(self, rule: AcceptanceRule) -> None:
        self.check(8, rule, "drawn", seed=20)

    @pytest.mark.parametrize("drafting", ["drawn", "one-hot"])
    @pytest.mark.parametrize(
        "rule",
        [
            Mentored([0.05, 1.0, 0.0, 0.2]),
            Mentored([0.1, 0.5, 0.2, 0.02], "hellinger"),
            Cactus([0.1, 0.5, 0.2, 0.02], solver="exact"),
        ],
        ids=str,
    )
    def test_rules_that_search(self, rule: AcceptanceRule, drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self, "num_draws", 100_000)  # each takes as long as ten of the others
        self.check(8, rule, drafting, seed=21)


def pool(law: Tensor, num_bins: int) -> Tensor:
    """A bin for each token, likely tokens first, such that the bins have about the same share of the law."""
    order = law.argsort(descending=True)
    middle = law[order].cumsum(0) - law[order] / 2
    return torch.empty_like(order).scatter(0, order, (middle / law.sum() * num_bins).long().clamp(max=num_bins - 1))


def test_law_of_draws_over_a_real_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """V of GPT-2, 10^5 draws, rows with and without a draft and with two budgets, pooled to 49 bins of 100 or more."""
    module = importlib.import_module("cactus_hf.verification")  # the package's attribute of that name is the function
    normalise, row_probs = module.normalise, module.row_probs

    # The batch is one sequence expanded: what depends on the logits alone is done for the first, which gives the same
    # numbers at many times the speed.
    def normalise_once(logits: Tensor) -> Any:
        assert logits.stride(0) == 0
        once = normalise(logits[:1])
        return type(once)(*(field.expand(len(logits), -1) for field in once))

    def row_probs_once(logits: Tensor, normaliser: Any, at: Tensor) -> Tensor:
        every = torch.arange(logits.shape[1])
        return row_probs(logits[: len(every)], normaliser, every).index_select(0, at)

    monkeypatch.setattr(module, "normalise", normalise_once)
    monkeypatch.setattr(module, "row_probs", row_probs_once)
    vocab_size, size, num_draws = 50_257, 12, 100_008
    generator = torch.Generator().manual_seed(50_257)
    zipf = -1.1 * torch.arange(1, vocab_size + 1).log()[torch.randperm(vocab_size, generator=generator)]
    target = zipf + torch.randn(2, vocab_size, generator=generator)
    draft = zipf + 1.5 * torch.randn(1, vocab_size, generator=generator)
    (q, q_next), (p,) = (rows.softmax(-1, dtype=torch.float64) for rows in (target, draft))

    # Three kinds of row: lossless, Cactus, and without a draft; of each, the law of (kind, drafts kept, token).
    deltas, lengths = (0.0, 0.01, 1.0), torch.tensor([1, 1, 0])
    kept = [torch.minimum(p, gamma(q, delta)) for delta in deltas[:2]]
    replaced = [emitted_law(q, p, Cactus(delta)) - kept[kind] for kind, delta in enumerate(deltas[:2])]
    laws = {(kind, 1): kept[kind].sum() * q_next for kind in range(2)}
    laws |= {(kind, 0): replaced[kind].clamp(min=0) for kind in range(2)}
    laws |= {(2, 0): q}

    kinds = torch.arange(size) % 3
    rule, draft_lengths = Cactus(torch.tensor(deltas)[kinds]), lengths[kinds]
    ascending = p.cumsum(0)
    outcomes = []
    for _ in range(num_draws // size):
        uniforms = torch.rand(size, 3, generator=generator, dtype=torch.float64)
        tokens = torch.searchsorted(ascending, uniforms[:, :1].contiguous(), right=True)
        result = verify_block(
            target.expand(size, -1, -1), tokens, draft.expand(size, 1, -1), rule, draft_lengths, uniforms[:, 1:]
        )
        outcomes.append(torch.stack([kinds, result.num_accepted, tokens[:, 0], result.next_token]))
    kind, num_accepted, drafted, next_token = torch.cat(outcomes, dim=1)

    def check(is_here: Tensor, tokens: Tensor, law: Tensor) -> None:
        counts, law = torch.bincount(tokens[is_here], minlength=vocab_size).double(), law / 3
        assert (counts[law == 0] == 0).all()
        bins = pool(law, 7)
        pooled, shares = (torch.zeros(7, dtype=torch.float64).index_add(0, bins, x) for x in (counts, law))
        assert (shares * num_draws).min() >= 100
        error = (pooled - shares * num_draws) / (shares * (1 - shares) * num_draws).sqrt()
        assert error.abs().max() <= 5, error

    for (row, num_kept), law in laws.items():
        check((kind == row) & (num_accepted == num_kept), next_token, law)
    for row in range(2):
        check((kind == row) & (num_accepted == 1), drafted, kept[row])
