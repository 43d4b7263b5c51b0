"""Model Runner V1's `rejection_sample` as the plugin leaves it, on made-up laws: every rule, without an engine.

Laws are compared by chi-square at the level of `tiny_engine.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


pytest.importorskip("vllm.version", reason="tests/vllm/run")  # "vllm" alone would be this folder

import reference  # noqa: E402
from tiny_engine import LEVEL, chance  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.sample import rejection_sampler  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors  # noqa: E402

from cactus_hf import Cactus, Lenience, Mentored, Mixture, SpeculativeSampling, TopK, TypicalAcceptance  # noqa: E402
from cactus_hf.integrations import vllm_v1  # noqa: E402
from cactus_hf.integrations.vllm import Statistics  # noqa: E402


VOCAB, BONUS = 6, 5
STOCK = rejection_sampler.rejection_sample
RULES = [
    Cactus(0.0), Cactus(0.02), Cactus(0.5), Cactus(float("inf")), Cactus(kl_budget=0.05), SpeculativeSampling(),
    Lenience(0.4), Mixture(0.3), Mentored(0.05), TopK(2), TypicalAcceptance(), TypicalAcceptance(recovery="sample"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    current_platform.register_triton_kernel_overrides()


def laws(seed: int) -> tuple[Tensor, Tensor]:
    """Of the target, whose last token is cut off as by a top-k, and of the draft, at two positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(2, 2, VOCAB, generator=generator)
    logits[0, :, -1] = -torch.inf
    target, draft = logits.double().softmax(-1)
    return target, draft


def call(
    rules: dict[int, Any], lengths: list[int], drafts: Tensor, target: Tensor, draft: Tensor | None, **changes: Any
) -> tuple[Tensor, Any]:
    """The output [B, 3] for rows of these numbers of drafts [B, 2], all with the same laws, and the statistics."""
    places = [(row, position) for row, length in enumerate(lengths) for position in range(length)]
    row, position = torch.tensor(places).unbind(1)
    processors = LogitsProcessors()
    statistics = Statistics("a rule", torch.device("cpu"))
    row_rules = vllm_v1.RowRules(SpeculativeSampling(), statistics, are_drawn=changes.pop("are_drawn", False))
    row_rules.rules = rules
    processors.argmax_invariant.append(row_rules)
    temperature = changes.pop("temperature", torch.ones(len(lengths)))
    metadata = SimpleNamespace(
        logitsprocs=processors, generators=changes.pop("generators", {}), temperature=temperature,
        all_greedy=bool((temperature == 0).all()), all_random=bool((temperature > 0).all()),
    )  # fmt: skip
    logits = target[position].log().float()
    before = logits.clone()
    tokens = changes.pop("function", vllm_v1._following_rules(STOCK))(
        drafts[row, position].int(), lengths, 2, torch.tensor(lengths).cumsum(0).int(),
        None if draft is None else draft[position].float(), logits, torch.full((len(lengths), 1), BONUS), metadata,
    )  # fmt: skip
    assert torch.equal(logits, before)  # vLLM's log-probabilities are the target's
    return tokens, statistics.read()


def drawn(draft: Tensor, count: int) -> Tensor:
    return torch.stack([law.multinomial(count, replacement=True) for law in draft], dim=1)


def exact(rule: Any, target: Tensor, draft: Tensor) -> Tensor:
    """Chances [7, 7, 7] of what a row of two drafts gives; 6 stands for no token."""
    law = torch.zeros(VOCAB + 1, VOCAB + 1, VOCAB + 1, dtype=torch.float64)
    places = list(zip(target.tolist(), draft.tolist(), strict=True))

    def go_on(text: tuple[int, ...], weight: float) -> None:
        if len(text) == len(places):
            law[(*text, BONUS)] += weight
            return
        q, p = places[len(text)]
        for token, p_n in enumerate(p):
            kept = reference.accept(rule, q, p, token)
            if p_n * kept > 0:
                go_on((*text, token), weight * p_n * kept)
            if p_n * (1 - kept) > 0:
                for other, g_x in enumerate(reference.residual(rule, q, p, token)):
                    law[(*text, other, VOCAB, VOCAB)[:3]] += weight * p_n * (1 - kept) * g_x

    go_on((), 1.0)
    return law


def counted(tokens: Tensor) -> Tensor:
    cells = torch.where(tokens < 0, VOCAB, tokens).long() @ torch.tensor([(VOCAB + 1) ** 2, VOCAB + 1, 1])
    return torch.bincount(cells, minlength=(VOCAB + 1) ** 3)


@pytest.mark.parametrize("kind", ["drawn", "looked up"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_law_of_a_round(rule: Any, kind: str):
    target, draft = laws(1)
    if kind == "looked up":
        draft = torch.nn.functional.one_hot(torch.tensor([2, 0]), VOCAB).double()
    num_rows = 20_000
    tokens, _ = call(
        dict.fromkeys(range(num_rows), rule), [2] * num_rows, drawn(draft, num_rows), target,
        draft if kind == "drawn" else None,
    )  # fmt: skip
    assert chance(counted(tokens), exact(rule, target, draft)) > LEVEL


def test_each_row_of_a_batch_has_the_law_of_its_own_rule():
    target, draft = laws(2)
    # Rows without drafts and with one stand between the others
    lengths = [2, 0, 2, 1, 2, 2, 2, 2] * 5_000
    rules = [Cactus(0.1), Cactus(9.0), None, Cactus(0.1), Cactus(2.0), Mixture(0.3), Cactus(kl_budget=0.1), TopK(2)]
    tokens, _ = call(
        {row: rules[row % 8] for row in range(len(lengths)) if rules[row % 8] is not None}, lengths,
        drawn(draft, len(lengths)), target, draft,
    )  # fmt: skip
    for place, rule in enumerate(rules):
        found = tokens[place::8]
        if lengths[place] == 2:
            assert chance(counted(found), exact(rule or Cactus(0.0), target, draft)) > LEVEL
        else:
            assert (found[:, lengths[place] + 1 :] == -1).all()
    assert (tokens[1::8, 0] == BONUS).all()


def test_a_row_of_delta_0_has_the_tokens_that_it_has_without_the_plugin():
    target, draft = laws(3)
    drafts = drawn(draft, 400)

    def seeded() -> dict[str, Any]:
        torch.manual_seed(7)
        return {"generators": {row: torch.Generator().manual_seed(row) for row in range(0, 400, 2)}}

    stock, _ = call({}, [2] * 400, drafts, target, draft, function=STOCK, **seeded())
    others = {row: (Cactus(1.0), TopK(1))[row % 2] for row in range(100, 300)}
    ours, _ = call(others, [2] * 400, drafts, target, draft, **seeded())
    assert torch.equal(stock[:100], ours[:100]) and torch.equal(stock[300:], ours[300:])
    assert not torch.equal(stock[100:300], ours[100:300])


@pytest.mark.parametrize("rule", [Cactus(0.5), Lenience(0.5)], ids=repr)
def test_seeded_rows_repeat_whatever_their_neighbours(rule: Any):
    target, draft = laws(4)
    seeded = drawn(draft, 40)
    results = []
    for neighbours in (3, 40):
        torch.manual_seed(neighbours)
        drafts = torch.cat([drawn(draft, neighbours), seeded])
        generators = {neighbours + place: torch.Generator().manual_seed(place) for place in range(40)}
        rules = dict.fromkeys(range(len(drafts)), rule)
        tokens, _ = call(rules, [2] * len(drafts), drafts, target, draft, generators=generators)
        results.append(tokens[neighbours:])
    assert torch.equal(*results)


@pytest.mark.parametrize("draft_kind", ["drawn", "looked up"])
def test_drafts_taken_back_are_rejected(draft_kind: str):
    target, draft = laws(5)
    drafts = torch.tensor([[-1, -1]]).expand(4_000, 2)
    rules = {row: (Cactus(9.0), TopK(6))[row % 2] for row in range(4_000)}
    tokens, _ = call(rules, [2] * 4_000, drafts, target, draft if draft_kind == "drawn" else None)
    assert (tokens[:, 1:] == -1).all()
    first = torch.bincount(tokens[:, 0].long(), minlength=VOCAB)
    if draft_kind == "looked up":
        assert chance(first, target[0]) > LEVEL
    assert first[-1] == 0


@pytest.mark.parametrize("rule", [None, Cactus(0.5), Cactus(kl_budget=0.1), Lenience(0.4)], ids=repr)
def test_drafts_whose_law_is_lost_are_taken_back(rule: Any):
    target, draft = laws(8)
    best = target.argmax(-1)
    num_rows = 8_000
    drafts = drawn(draft, num_rows)
    drafts[::2] = best
    temperature = torch.tensor([0.0, 1.0] * (num_rows // 2))
    rules = {} if rule is None else dict.fromkeys(range(1, num_rows, 2), rule)
    tokens, _ = call(rules, [2] * num_rows, drafts, target, None, temperature=temperature, are_drawn=True)
    assert (tokens[::2] == torch.tensor([*best.tolist(), BONUS])).all()
    assert (tokens[1::2, 1:] == -1).all()
    assert chance(torch.bincount(tokens[1::2, 0].long(), minlength=VOCAB), target[0]) > LEVEL


def test_greedy_rows_match_the_most_likely_token():
    target, draft = laws(6)
    best = target.argmax(-1)
    temperature = torch.tensor([0.0, 1.0] * 50)
    drafts = torch.stack([best, best.flip(0)]).repeat(50, 1)
    rules = {row: Cactus(float("inf")) for row in range(1, 100, 2)}  # as `RowRules` leaves out greedy rows
    tokens, _ = call(rules, [2] * 100, drafts, target, draft, temperature=temperature)
    assert (tokens[::2] == torch.tensor([*best.tolist(), BONUS])).all()
    tokens, statistics = call({}, [2] * 2, drafts[:2], target, draft, temperature=torch.zeros(2))
    assert tokens[0].tolist() == [*best.tolist(), BONUS]
    assert statistics["accepted"] == (tokens >= 0).sum() - 2


def test_statistics():
    target, draft = laws(7)
    num_rows, rule = 20_000, Cactus(0.5)
    lengths = [2, 0] * (num_rows // 2)
    tokens, found = call(dict.fromkeys(range(num_rows), rule), lengths, drawn(draft, num_rows), target, draft)
    accepted = (tokens[::2] >= 0).sum(1) - 1
    verified = (accepted + 1).clamp(max=2)
    assert found["rule"] == "a rule"
    assert (found["rounds"], found["drafted"]) == (num_rows // 2, num_rows)
    assert (found["accepted"], found["verified"]) == (accepted.sum(), verified.sum())
    assert found["accepted_length"] == pytest.approx(accepted.float().mean().item())
    # The mean over verified positions of the binary KL of gamma and q at the drafted token, by enumeration
    total = reached = 0.0
    weight = 1.0
    for q, p in zip(target.tolist(), draft.tolist(), strict=True):
        kl = sum(p_n * binary_kl(reference.accept(rule, q, [1.0] * VOCAB, n), q[n]) for n, p_n in enumerate(p))
        total, reached = total + weight * kl, reached + weight
        weight *= sum(p_n * reference.accept(rule, q, p, n) for n, p_n in enumerate(p))
    assert found["ball_kl"] == pytest.approx(total / reached, rel=0.05)  # 20,000 draws


def binary_kl(raised: float, prob: float) -> float:
    if prob in (0.0, 1.0):
        return 0.0
    pairs = [(raised, prob), (1 - raised, 1 - prob)]
    return sum(h * torch.tensor(h / q).log().item() for h, q in pairs if h > 0)
