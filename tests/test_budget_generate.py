"""`cactus_kl` and `cactus_kl_total` through `generate()`: the law of texts, what rows spend, every way to ask."""

from __future__ import annotations

import copy
import types

import laws
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import cactus_hf
import tiny
from cactus_hf import Cactus, TokenKind, trim_draft
from cactus_hf.config import make_options, rule_for_rows


EXACT = 1e-9  # nats, of sums over a hundred positions
SAMPLE = {"do_sample": True, "eos_token_id": None, "pad_token_id": tiny.PAD, "return_dict_in_generate": True}


@pytest.fixture
def vocabulary8():
    return cactus_hf.enable(copy.copy(tiny.vocabulary8(0)))


@pytest.fixture
def pair():
    target, draft = tiny.pair("llama", eps=0.3)
    return cactus_hf.enable(copy.copy(target)), draft


class TestLaw:
    """Seeds were fixed beforehand."""

    def exact(self, rule: Cactus, num_drafts: int) -> torch.Tensor:
        target, draft = (laws.law_of(tiny.vocabulary8(seed, dtype=torch.float64)) for seed in (0, 1))
        return laws.exact(target, draft, rule, num_drafts)

    def test_a_budget_of_each_row(self, vocabulary8) -> None:
        budgets = torch.tensor([0.05, 0.4, 0.0, 0.05]).repeat(64)
        counts = laws.frequencies(
            vocabulary8, 16, assistant_model=tiny.vocabulary8(1), cactus_kl=budgets, num_assistant_tokens=2
        )
        law = {budget: self.exact(Cactus(kl_budget=budget), 2) for budget in (0.0, 0.05, 0.4)}
        laws.assert_follows(counts, torch.stack([law[0.05][0], law[0.4][1], law[0.0][2], law[0.05][3]]))
        with pytest.raises(AssertionError):  # the level would be useless if this passed
            laws.assert_follows(counts, law[0.0])

    def test_a_total(self, vocabulary8) -> None:
        """So small that the second position of a text has less than the first."""
        options = {"cactus_kl": 0.4, "cactus_kl_total": 0.45, "num_assistant_tokens": 2}
        counts = laws.frequencies(vocabulary8, 16, assistant_model=tiny.vocabulary8(1), **options)
        laws.assert_follows(counts, self.exact(Cactus(kl_budget=0.4, kl_total=0.45), 2))
        with pytest.raises(AssertionError):
            laws.assert_follows(counts, self.exact(Cactus(kl_budget=0.4), 2))

    def test_one_row(self, vocabulary8) -> None:
        counts = torch.zeros(1, 8, 8, 8)
        prompt = laws.PROMPTS.row(1)
        options = {"cactus_kl_total": 0.4, "num_assistant_tokens": 2, "max_new_tokens": 3, **SAMPLE}
        for _ in range(200):
            output = vocabulary8.generate(**prompt.inputs, assistant_model=tiny.vocabulary8(1), **options)
            counts[(0, *output.sequences[0, -3:])] += 1
        laws.assert_follows(counts, self.exact(Cactus(kl_total=0.4), 2)[1:2])


class TestSpending:
    @pytest.mark.parametrize(
        "options",
        (
            {},
            {"num_assistant_tokens_schedule": "heuristic"},
            {
                "num_assistant_tokens_schedule": "auto",
                "speculation_costs": {"1": {"draft": [0.1], "verify": [1, 1.1]}},
            },
            {"num_assistant_tokens": 1},
            {"assistant_confidence_threshold": 0.4},
            {"cache_implementation": "static", "disable_compile": True},
            {"generator": [1, 2, 3, 4]},
            {"top_k": 5, "temperature": 1.5},
            {"cactus_kl": 0.02},
            {"source": "lookup"},
            {"source": "trimmed"},
            {"source": "early exit"},
        ),
        ids=lambda options: next(iter(options), "default"),
    )
    def test_no_row_spends_more_than_its_total(self, pair, options) -> None:
        target, draft = pair
        sources = {
            "lookup": {"prompt_lookup_num_tokens": 3},
            "trimmed": {"assistant_model": trim_draft(draft, range(4, 60))},
            "early exit": {"assistant_early_exit": 1},
        }
        options = {**options, **sources.get(options.get("source", ""), {"assistant_model": draft})}
        options.pop("source", None)
        totals = torch.tensor([0.0, 0.3, 1.0, torch.inf], dtype=torch.float64)
        torch.manual_seed(1)
        output = target.generate(
            **tiny.ragged_prompts().inputs, **SAMPLE | options, cactus_kl_total=totals.tolist(), max_new_tokens=24
        )
        stats = output.speculation
        assert (stats.emitted_kl_sum <= totals + EXACT).all() and stats.emitted_kl_sum[0] == 0
        assert stats.emitted_kl_sum[3] > 0 and stats.emitted_tv_sum[3] > 0
        assert stats.emitted_kl == pytest.approx(float(stats.emitted_kl_sum.sum() / stats.verified.sum()))
        assert stats.emitted_kl_total == pytest.approx(float(stats.emitted_kl_sum.mean()))
        assert stats.emitted_tv_total == pytest.approx(float(stats.emitted_tv_sum.mean()))
        if "cactus_kl" in options:
            assert (stats.emitted_kl_sum <= 0.02 * stats.verified + EXACT).all()

    def test_what_is_spent_is_what_speculation_kl_measures(self, pair) -> None:
        """The same, by `law.py`, from the delta that a budget of every position's own came to: infinity."""
        target, draft = pair
        stats = []
        for options in ({"cactus_kl": float("inf")}, {"cactus_delta": float("inf"), "speculation_kl": True}):
            torch.manual_seed(3)
            output = target.generate(**tiny.ragged_prompts().inputs, assistant_model=draft, **SAMPLE | options)
            stats.append(output.speculation)
        torch.testing.assert_close(stats[0].emitted_kl_sum, stats[1].emitted_kl_sum, rtol=1e-9, atol=EXACT)
        torch.testing.assert_close(stats[0].emitted_tv_sum, stats[1].emitted_tv_sum, rtol=1e-9, atol=EXACT)

    def test_then_the_row_is_lossless(self, pair) -> None:
        target, draft = pair
        output = target.generate(
            **tiny.ragged_prompts().inputs, assistant_model=draft, **SAMPLE, cactus_kl_total=0.2, max_new_tokens=70
        )
        stats = output.speculation
        torch.testing.assert_close(stats.emitted_kl_sum, torch.full_like(stats.emitted_kl_sum, 0.2), rtol=0.01, atol=0)
        assert not (stats.kinds[:, 50:] == TokenKind.BOOSTED).any()

    def test_a_row_has_what_is_its_own_whatever_its_neighbours(self) -> None:
        target, draft = tiny.pair("llama", eps=0.3, dtype=torch.float64)
        target, prompts = cactus_hf.enable(copy.copy(target)), tiny.ragged_prompts()
        totals, seeds = [0.2, 0.9, 0.4, 0.6], [1, 2, 3, 4]
        options = {"assistant_model": draft, **SAMPLE, "eos_token_id": [7, 9], "max_new_tokens": 30}
        batch = target.generate(**prompts.inputs, **options, cactus_kl_total=totals, generator=seeds)
        for index in range(4):
            row = prompts.row(index)
            alone = target.generate(
                **row.inputs, **options, cactus_kl_total=totals[index], generator=seeds[index : index + 1]
            )
            text = alone.sequences[0, row.input_ids.shape[1] :]
            assert torch.equal(batch.sequences[index, 17 : 17 + len(text)], text)
            kl = batch.speculation.emitted_kl_sum[index], alone.speculation.emitted_kl_sum[0]
            torch.testing.assert_close(*kl, rtol=1e-6, atol=0)

    def test_each_returned_row_has_a_total(self, pair) -> None:
        target, draft = pair
        output = target.generate(
            **tiny.ragged_prompts((5, 9)).inputs, assistant_model=draft, **SAMPLE, max_new_tokens=60,
            num_return_sequences=2, cactus_kl_total=[0.1, 0.4], cactus_kl=[0.05, 0.1, 0.0, 0.2],
        )  # fmt: skip
        kl = output.speculation.emitted_kl_sum
        torch.testing.assert_close(kl, torch.tensor([0.1, 0.1, 0.0, 0.4], dtype=torch.float64), rtol=0.01, atol=0)

    def test_greedy_texts_are_plain(self, pair) -> None:
        target, draft = pair
        prompts = tiny.ragged_prompts()
        options = SAMPLE | {"do_sample": False, "cactus_kl": 0.1, "cactus_kl_total": 1.0, "max_new_tokens": 12}
        output = target.generate(**prompts.inputs, assistant_model=draft, **options)
        plain = tiny.plain_greedy(tiny.model("llama"), prompts, 12)
        assert torch.equal(output.sequences[:, 17:], torch.stack(plain))
        assert (output.speculation.emitted_kl_sum == 0).all()

    def test_threads_have_budgets_of_their_own(self, pair) -> None:
        from test_threads import together

        target, draft = pair

        def kl(total: float) -> float:
            output = target.generate(
                torch.tensor([[5, 6, 7]]), assistant_model=draft, **SAMPLE, cactus_kl_total=total, max_new_tokens=30,
                generator=[1],
            )  # fmt: skip
            return float(output.speculation.emitted_kl_sum)

        assert together(lambda: kl(0.2), lambda: kl(0.5)) == [kl(0.2), kl(0.5)]


def config(**options) -> types.SimpleNamespace:
    return types.SimpleNamespace(**options)


class TestOptions:
    def test_the_call_goes_before_the_configs_and_budgets_go_together(self) -> None:
        def rule(call, *configs):
            return make_options(call, [config(**each) for each in configs]).rule

        assert rule({"cactus_kl": 0.1}) == Cactus(kl_budget=0.1)
        assert rule({"cactus_kl_total": 2.0}, {"cactus_kl": 0.1}) == Cactus(kl_budget=0.1, kl_total=2.0)
        assert rule({}, {"cactus_kl": 0.1}, {"cactus_kl": 0.2, "cactus_kl_total": 2.0}) == Cactus(
            kl_budget=0.1, kl_total=2.0
        )
        assert rule({"cactus_delta": 1.0}, {"cactus_kl": 0.1}) == Cactus(1.0)
        assert rule({"cactus_kl": 0.1}, {"cactus_delta": 1.0}) == Cactus(kl_budget=0.1)
        assert rule({}, {"cactus_kl_total": [1, 2]}, {"cactus_delta": 1.0}) == Cactus(kl_total=[1.0, 2.0])
        assert rule({"acceptance_rule": Cactus(1.0)}, {"cactus_kl": 0.1}) == Cactus(1.0)
        assert make_options({"cactus_kl_total": 1.0}, []).is_explicit
        assert not make_options({}, [config(cactus_kl=1.0)]).is_explicit
        assert make_options({"assistant_ensemble_weight": 0.5}, [config(cactus_kl=1.0)]) is None

    def test_values_of_prompts_and_of_returned_rows(self) -> None:
        rule = rule_for_rows(Cactus(kl_budget=[0.1, 0.2], kl_total=[1.0] * 4), 4, 2, torch.device("cpu"))
        assert rule == Cactus(kl_budget=[0.1, 0.1, 0.2, 0.2], kl_total=[1.0] * 4)

    def test_survive_saving(self, pair, tmp_path) -> None:
        target, draft = copy.deepcopy(pair[0]), pair[1]
        target.generation_config.cactus_kl, target.generation_config.cactus_kl_total = 0.1, [0.5]
        target.save_pretrained(tmp_path)
        loaded = cactus_hf.enable(AutoModelForCausalLM.from_pretrained(tmp_path))
        assert loaded.generation_config.cactus_kl == 0.1
        assert GenerationConfig.from_pretrained(tmp_path).cactus_kl_total == [0.5]
        output = loaded.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, **SAMPLE, max_new_tokens=60)
        assert float(output.speculation.emitted_kl_sum) == pytest.approx(0.5, rel=0.01)
