"""The parts of a calibration against enumeration: laws, the limit, rounds; and the answers made of them."""

from __future__ import annotations

import math
from itertools import product

import pytest
import reference
import torch
from torch import Tensor

from cactus_hf import Cactus, Calibration, Lenience, Mentored, Mixture, SpeculativeSampling, TopK, TypicalAcceptance
from cactus_hf.acceptance import AcceptanceRule
from cactus_hf.calibration.files import Finished
from cactus_hf.calibration.laws import Values, evaluate
from cactus_hf.calibration.measuring import finished
from cactus_hf.calibration.rounds import FIELDS, round_sums
from cactus_hf.kl_budget import has_budget
from cactus_hf.round_costs import RoundCosts
from cactus_hf.speed import expected_tokens


RULES = (
    *map(Cactus, (0.0, 1e-6, 0.1, 0.5, 3.0)),
    SpeculativeSampling(),
    TypicalAcceptance(),
    TypicalAcceptance(epsilon=0.3, alpha=0.9, recovery="sample"),
    TopK(2),
    Mixture(0.4),
    Lenience(0.4),
    Mentored(0.1),
    Cactus(kl_budget=0.05),
    Cactus(0.2, divergence="tv", solver="exact"),
)
# Sums of a few float64 numbers; KL near 0 is a difference of such
EXACT = 1e-11


def tolerance(rule: AcceptanceRule) -> float:
    """A budget's delta is found to within .15 %."""
    return 1e-3 if has_budget(rule) else 1e-9


def logits(num: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Target, draft and a token that the target has, with removed tokens in a third of the rows."""
    generator = torch.Generator().manual_seed(seed)
    target, noise = torch.randn(2, num, vocab_size, generator=generator, dtype=torch.float64) * 2
    draft = target + noise
    is_cut = torch.rand(2, num, vocab_size, generator=generator) < 0.4
    is_cut[:, ::3] = False
    is_cut[:, :, 0] = False
    target, draft = (x.masked_fill(cut, -math.inf) for x, cut in zip((target, draft), is_cut, strict=True))
    return target, draft, torch.multinomial(target.softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("padding", [0, 60])
def test_values_are_those_of_enumeration(padding: int):
    """With padding, most tokens have no mass and the rows are cut."""
    target, draft, tokens = logits(30, 6, seed=3)
    padded = [torch.nn.functional.pad(x, (padding, 0), value=-math.inf) for x in (target, draft)]
    values = evaluate(*padded, tokens + padding, RULES)
    for row, (q, p) in enumerate(zip(target.softmax(-1).tolist(), draft.softmax(-1).tolist(), strict=True)):
        token = int(tokens[row])
        for column, rule in enumerate(RULES):
            kept = [p_n * reference.accept(rule, q, p, n) for n, p_n in enumerate(p)]
            law = reference.emitted_law(rule, q, p)
            found = [field[row, column].item() for field in values]
            tv = sum(abs(h - q_x) for h, q_x in zip(law, q, strict=True)) / 2
            expected = [sum(kept), kept[token] / q[token], reference.divergence(law, q), tv]
            assert found[:4] == pytest.approx(expected, abs=EXACT, rel=tolerance(rule)), rule
            ball = q
            if isinstance(rule, Cactus) and rule.delta is not None:
                ball = [reference.gamma(q_n, rule.delta, rule.divergence, rule.solver) for q_n in q]
            ball_kl = sum(
                p_n * reference.divergence([g, 1 - g], [q_n, 1 - q_n])
                for p_n, q_n, g in zip(p, q, ball, strict=True)
                if p_n > 0 and 0 < q_n < 1
            )
            assert found[4] == pytest.approx(ball_kl, abs=EXACT)


def test_a_draft_without_a_law_drafts_nothing():
    target, draft, tokens = logits(3, 6, seed=3)
    draft[1] = -math.inf
    values = evaluate(target, draft, tokens, RULES, [1.0])
    assert all((field[1] == 0).all() and not field.isnan().any() for field in values)


def test_a_token_rounded_out_of_the_targets_support_leaves_sums_finite():
    target = torch.tensor(
        [[0.6, 0.4, 0.0], [0.2, 0.8, 0.0]]
    ).log()  # the second token of the text was possible when drawn
    draft = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.3, 0.2]]).log()
    rules = [SpeculativeSampling(), Cactus(0.0), Cactus(0.5)]
    values = evaluate(target, draft, torch.tensor([0, 2]), rules)
    assert torch.equal(values.kept[1], values.acceptance[1])
    assert not torch.equal(values.kept[0], values.acceptance[0])
    assert round_sums(values, torch.ones(2, dtype=torch.bool), 3, 5).isfinite().all()


def test_no_rule_beats_the_limit():
    """At every slope the limit has the least KL - slope * acceptance, also among laws made at random."""
    target, draft, tokens = logits(40, 6, seed=5)
    slopes = (0.1, 0.5, 1.0, 2.0, 5.0)
    values = evaluate(target, draft, tokens, RULES, slopes)
    q, p = target.softmax(-1), draft.softmax(-1)
    generator = torch.Generator().manual_seed(0)
    for column, slope in enumerate(slopes, start=len(RULES)):
        score = values.kl - slope * values.acceptance
        assert (score[:, column] <= score[:, : len(RULES)].amin(-1).nan_to_num(posinf=math.inf) + EXACT).all()
        for scale in (0.01, 0.3, 2.0):
            h = (target + scale * torch.randn(target.shape, generator=generator)).softmax(-1)
            others = (torch.xlogy(h, h) - torch.xlogy(h, q)).sum(-1) - slope * torch.minimum(p, h).sum(-1)
            assert (score[:, column] <= others + EXACT).all()
    assert (values.kl[:, len(RULES) :].diff() >= -EXACT).all()


class Toy:
    """Laws over 3 tokens: functions of the text, or of its length alone."""

    def __init__(self, sees_text: bool):
        self.sees_text = sees_text

    def laws(self, text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logits of target and draft [3]."""
        key = sum((token + 1) * 4**place for place, token in enumerate(text)) if self.sees_text else len(text)
        generator = torch.Generator().manual_seed(key + 17)
        target, noise = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        return target, target + noise


NUM_TOKENS = 5


def expected_sums(toy: Toy, rule: AcceptanceRule, num_drafts: int) -> list[float]:
    """The sums of a run, by enumeration of its rounds."""
    sums = dict.fromkeys(FIELDS, 0.0)

    def go_on(text: tuple[int, ...], chance: float, left: int) -> None:
        """`left` drafts of the round are still to be verified."""
        if chance == 0 or len(text) == NUM_TOKENS:
            return
        q, p = (x.softmax(-1).tolist() for x in toy.laws(text))
        if left == 0:  # the extra token
            for token, q_x in enumerate(q):
                begin((*text, token), chance * q_x)
            return
        law = reference.emitted_law(rule, q, p)
        sums["verified"] += chance
        sums["weight"] += chance
        sums["kl"] += chance * reference.divergence(law, q)
        sums["tv"] += chance * sum(abs(h - q_x) for h, q_x in zip(law, q, strict=True)) / 2
        for n, p_n in enumerate(p):
            phi = reference.accept(rule, q, p, n)
            sums["accepted"] += chance * p_n * phi
            if isinstance(rule, Cactus) and rule.delta is not None:
                g = reference.gamma(q[n], rule.delta, rule.divergence, rule.solver)
                sums["ball_kl"] += chance * p_n * reference.divergence([g, 1 - g], [q[n], 1 - q[n]])
            go_on((*text, n), chance * p_n * phi, left - 1)
            for other, g_x in enumerate(reference.residual(rule, q, p, n)):
                begin((*text, other), chance * p_n * (1 - phi) * g_x)

    def begin(text: tuple[int, ...], chance: float) -> None:
        if chance > 0 and len(text) < NUM_TOKENS:
            sums["rounds"] += chance
            go_on(text, chance, min(num_drafts, NUM_TOKENS - len(text) - 1))

    for token, q_x in enumerate(toy.laws(())[0].softmax(-1).tolist()):
        begin((token,), q_x)
    return list(sums.values())


def calibrated_sums(toy: Toy, rules: tuple[AcceptanceRule, ...], longest: int) -> Tensor:
    """The mean of `round_sums` over all texts of the target."""
    total: Tensor | float = 0.0
    for text in product(range(3), repeat=NUM_TOKENS):
        rows = [toy.laws(text[:place]) for place in range(NUM_TOKENS)]
        target, draft = (torch.stack(x) for x in zip(*rows, strict=True))
        tokens = torch.tensor(text)
        chance = target.softmax(-1).gather(1, tokens[:, None]).prod()
        values = evaluate(target, draft, tokens, rules)
        total = total + chance * round_sums(values, torch.ones(NUM_TOKENS, dtype=torch.bool), longest, NUM_TOKENS)
    assert isinstance(total, Tensor)
    return total


@pytest.mark.parametrize(("sees_text", "rules"), [(True, (SpeculativeSampling(), Cactus(0.0))), (False, RULES)])
def test_rounds_are_those_of_enumeration(sees_text: bool, rules: tuple[AcceptanceRule, ...]):
    """Exact for lossless rules, and for all where a round does not depend on what the rule wrote before."""
    toy, longest = Toy(sees_text), 6  # more than there is room for
    found = calibrated_sums(toy, rules, longest)
    for index, rule in enumerate(rules):
        for m in (1, 2, 3, longest):
            expected = pytest.approx(expected_sums(toy, rule, m), rel=tolerance(rule))
            assert found[index, m - 1].tolist() == expected, (rule, m)


def test_within_a_round_a_rules_own_texts_count():
    """One round of three drafts: what is verified in it follows the rule's law, not the target's."""
    toy, rule = Toy(True), Cactus(0.5)
    found = calibrated_sums(toy, (rule,), 3)[0, 2]
    expected = dict(zip(FIELDS, expected_sums(toy, rule, 3), strict=True))
    kl, weight = found[FIELDS.index("kl")], found[FIELDS.index("weight")]
    # Rounds behind a rejection, with one or two drafts, are the small part that is a prediction
    assert float(kl / weight) == pytest.approx(expected["kl"] / expected["verified"], rel=0.05)


def test_a_position_without_a_draft_ends_the_round():
    values = Values(*torch.full((5, 5, 1), 0.5, dtype=torch.float64))
    for field in values:
        field[2] = 0.0
    is_drafted = torch.tensor([True, True, False, True, True])
    sums = dict(zip(FIELDS, round_sums(values, is_drafted, 3, 5)[0, 2].tolist(), strict=True))
    # Rounds at 1, at 2 and 3 for sure (nothing is drafted at 2), and at 4, where there is no room for a draft,
    # behind a rejection at 3 or a draft that is kept there and the end
    assert sums["rounds"] == pytest.approx(1 + 0.5 + 1 + 0.5)
    assert sums["verified"] == pytest.approx(2) and sums["accepted"] == pytest.approx(1)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """Of made-up values: acceptance and KL grow with delta, and differ between 12 prompts."""
    deltas = [0.0, 0.1, 0.5, 1.0]
    generator = torch.Generator().manual_seed(1)
    prompts = {}
    for number in range(12):
        base = 0.3 + 0.3 * torch.rand(20, 1, generator=generator, dtype=torch.float64)
        root = torch.tensor(deltas, dtype=torch.float64).sqrt()
        acceptance = base + 0.2 * root
        values = Values(acceptance, acceptance, base * root, base * root / 2, root.expand(20, -1))
        prompts[number] = finished(values, torch.ones(20, dtype=torch.bool), 8, 20)
    header = {
        "settings": [{"label": f"Cactus({d:g})", "kind": "Cactus", "delta": d} for d in deltas],
        "deltas": deltas,
        "longest": 8,
        "num_assistant_tokens": 4,
        "seed": 3,
        "num_prompts": 12,
        "options": {"temperature": 0.6, "max_new_tokens": 20, "do_sample": True},
    }
    return Calibration.of(header, prompts)


def test_answers_invert_the_curves(calibration):
    for m in (1, 4, 8):
        assert calibration.delta_for(kl=0.0, num_assistant_tokens=m).delta == 0
        for kl in (0.01, 0.1, 0.2):
            answer = calibration.delta_for(kl=kl, num_assistant_tokens=m)
            assert answer.emitted_kl.value == pytest.approx(kl)
            assert calibration.kl(answer.delta, m) == answer.emitted_kl
            assert answer.interval[0] <= answer.delta <= answer.interval[1]
        answer = calibration.delta_for(acceptance=0.6, num_assistant_tokens=m)
        assert answer.position_acceptance.value == pytest.approx(0.6)
        assert calibration.acceptance(answer.delta, m) == answer.position_acceptance
    for line in calibration.table(3):
        assert calibration.kl(line.delta, 3) == line.emitted_kl
        assert calibration.accepted_length(line.delta, 3) == line.accepted_length


def test_errors_come_from_resampled_prompts(calibration):
    again = Calibration(calibration.header, calibration.rounds, calibration.positions)
    assert again.table() == calibration.table()
    other = Calibration(calibration.header | {"seed": 4}, calibration.rounds, calibration.positions)
    assert (
        other.table() != calibration.table() and other.delta_for(kl=0.1).delta == calibration.delta_for(kl=0.1).delta
    )
    kl, weight = (calibration.rounds[:, 2, 3, FIELDS.index(name)] for name in ("kl", "weight"))
    # The linearised standard error of a ratio; 1000 resamples of 12 prompts come within a tenth or so
    ratio = kl.sum() / weight.sum()
    expected = (kl - ratio * weight).square().sum().sqrt() / weight.sum()
    assert calibration.kl(0.5).error == pytest.approx(float(expected), rel=0.15)


def test_the_best_setting_is_that_of_all(calibration):
    costs = RoundCosts.from_dict({"1": {"draft": [0.01 * m for m in range(1, 7)], "verify": [0.05] * 7}})
    for kl in (0.05, 0.15, None):
        answer = calibration.best(costs, kl=kl)
        speeds = {0: 1 / 0.05}
        for m in range(1, 7):
            delta = 1.0 if kl is None else calibration.delta_for(kl=kl, num_assistant_tokens=m).delta
            speeds[m] = (calibration.accepted_length(delta, m).value + 1) / (0.05 + 0.01 * m)
        assert answer.tokens_per_second == pytest.approx(max(speeds.values()))
        assert speeds[answer.num_assistant_tokens] == max(speeds.values())
    dear = {"1": {"draft": [9.0], "verify": [0.05, 0.05]}}
    assert calibration.best(dear, kl=0.1)[:3] == (0.0, (0.0, 0.0), 0)


def test_accepted_length_of_even_chances():
    """Where all positions are alike, AL is that of independent drafts, but for the end of the text."""
    values = Values(*torch.full((5, 4000, 1), 0.7, dtype=torch.float64))
    rounds = finished(values, torch.ones(4000, dtype=torch.bool), 6, 4000).rounds[0]
    for m in range(1, 7):
        found = rounds[m - 1, FIELDS.index("accepted")] / rounds[m - 1, FIELDS.index("rounds")]
        assert float(found) == pytest.approx(expected_tokens([0.7], m) - 1, rel=2e-3)


def test_it_comes_back_from_json(calibration, tmp_path):
    calibration.to_json(tmp_path / "c.jsonl")
    again = Calibration.from_json(tmp_path / "c.jsonl")
    assert again.header == calibration.header and again.table() == calibration.table()
    assert torch.equal(again.rounds, calibration.rounds) and torch.equal(again.positions, calibration.positions)
    lines = (tmp_path / "c.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[:-2]))
    with pytest.raises(ValueError, match="lacks 2 of 12 prompts"):
        Calibration.from_json(tmp_path / "part.jsonl")
    for text in ("", "{}\n", "[1]\n", "no json\n", lines[0] + '{"prompt": 0, "rounds": [1], "positions": []}\n'):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ValueError, match="is no calibration"):
            Calibration.from_json(tmp_path / "bad.jsonl")


def test_infinite_divergence_survives(calibration, tmp_path):
    rounds = calibration.rounds.clone()
    rounds[:, -1, :, FIELDS.index("kl")] = math.inf
    Calibration(calibration.header, rounds, calibration.positions).to_json(tmp_path / "c.jsonl")
    line = Calibration.from_json(tmp_path / "c.jsonl").table()[-1]
    assert line.emitted_kl.value == math.inf and math.isnan(line.emitted_kl.error)


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda c: c.delta_for(), "Give `kl` or `acceptance`"),
        (lambda c: c.delta_for(kl=0.1, acceptance=0.5), "Give `kl` or `acceptance`"),
        (lambda c: c.delta_for(kl=5.0), "KL 5 is not reached.*delta 1 is the largest"),
        (lambda c: c.delta_for(acceptance=0.1), "acceptance 0.1 is not reached"),
        (lambda c: c.delta_for(kl=0.1, num_assistant_tokens=9), "from 1 to 8"),
        (lambda c: c.table(0), "from 1 to 8"),
        (lambda c: c.kl(1.5), "Delta 1.5 is not between 0 and 1"),
        (lambda c: c.best({"1": {}}), "speculation_costs"),
        (lambda c: c.best({"1": {"draft": [1.0], "verify": [1.0, 1.0]}}, kl=-1), "`kl` must be"),
        (lambda c: c.plot("c.pdf"), "ends in .png"),
    ),
)
def test_mistakes(calibration, call, words):
    with pytest.raises(ValueError, match=words):
        call(calibration)


def test_finished_sums_leave_the_first_position_out():
    values = Values(*torch.rand(5, 7, 2, dtype=torch.float64))
    found = finished(values, torch.ones(7, dtype=torch.bool), 3, 7)
    assert isinstance(found, Finished)
    assert torch.allclose(found.positions[:, 1], values.acceptance[1:].sum(0)) and (found.positions[:, 0] == 6).all()
