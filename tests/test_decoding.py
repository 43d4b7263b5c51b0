"""The loop through `generate()`: greedy decoding equals plain decoding, and sampling follows the law it should.

Models are float32, where greedy texts are equal to the last token; `tiny.spread` keeps them clear of near-ties.
"""

from __future__ import annotations

import contextlib
from itertools import product

import laws
import pytest
import torch
from torch import Tensor
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import cactus_hf
import tiny
from cactus_hf import TokenKind


NEW_TOKENS = 24


@pytest.fixture
def enabled():
    """Enables models for one test: they are shared with the others."""
    models = []

    def enable(model):
        models.append(model)
        return cactus_hf.enable(model)

    yield enable
    for model in models:
        cactus_hf.disable(model)


def greedy(target, draft, prompts: tiny.Prompts, **options) -> list[Tensor]:
    """New tokens of each row, as `tiny.plain_greedy` gives them."""
    options = {
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
        "pad_token_id": tiny.PAD,
        "cactus_delta": 1.0,
    } | options
    sequences = target.generate(**prompts.inputs, assistant_model=draft, do_sample=False, **options)
    return list(sequences[:, prompts.input_ids.shape[1] :])


def warns_of_single_rows(num_rows: int):
    return pytest.warns(UserWarning, match="one after another") if num_rows > 1 else contextlib.nullcontext()


def assert_same(rows: list[Tensor], expected: list[Tensor]) -> None:
    for row, other in zip(rows, expected, strict=True):
        length = min(len(row), len(other))  # a row that ended early is padded up to the longest
        assert row[:length].tolist() == other[:length].tolist()
        assert (row[length:] == tiny.PAD).all() and (other[length:] == tiny.PAD).all()


def gpt_neo(window: int) -> GPTNeoForCausalLM:
    """Attends to a window, by masks of its own that it cuts from the end of the cache."""
    config = GPTNeoConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, num_layers=2, num_heads=4, window_size=window, bos_token_id=None,
        eos_token_id=None, max_position_embeddings=256, attention_types=[[["global", "local"], 1]],
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPTNeoForCausalLM(config).eval()
    tiny.spread(model, seed=0)
    tiny.sharpen(model)
    return model


class TestGreedy:
    def test_a_type_that_was_not_tested_is_tried_and_runs(self, enabled, monkeypatch):
        monkeypatch.setattr(cactus_hf.support, "TESTED", frozenset())
        for name in ("llama", "mistral", "gemma3"):
            target, draft = tiny.pair(name)
            for prompts in (tiny.ragged_prompts(), tiny.ragged_prompts((7, 7)), tiny.ragged_prompts((9,))):
                assert_same(greedy(enabled(target), draft, prompts), plain(target, prompts))

    @pytest.mark.parametrize("lengths", ((5, 17, 9, 2), (7, 7), (9,)))
    def test_a_type_whose_rows_cannot_differ_is_decoded_row_by_row(self, enabled, lengths):
        """GPT-Neo cuts its mask from the end of the cache: a row beside a longer one looks at wrong slots."""
        target, prompts = gpt_neo(window=8), tiny.ragged_prompts(lengths)
        with warns_of_single_rows(len(lengths)):
            assert_same(greedy(enabled(target), tiny.perturbed(target), prompts), plain(target, prompts))

    @pytest.mark.parametrize("window", (24, 32, 40))
    def test_such_a_type_is_found_out_before_its_texts_outgrow_its_window(self, enabled, window):
        target, prompts = gpt_neo(window), tiny.ragged_prompts()
        with warns_of_single_rows(4):
            assert_same(greedy(enabled(target), tiny.perturbed(target), prompts), plain(target, prompts))

    def test_statistics_scores_and_seeds_of_rows_decoded_one_by_one(self, enabled):
        target, draft = (enabled(model) for model in tiny.pair("bloom", "eager", dtype=torch.float64))
        prompts, seeds = tiny.ragged_prompts((4, 9, 6)), [3, 1, 2]
        options = {
            "assistant_model": draft, "do_sample": True, "cactus_delta": [0.1, 0.5, 1.0], "max_new_tokens": 9,
            "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True,
        }  # fmt: skip
        with pytest.warns(UserWarning, match="one after another"):
            batch = target.generate(**prompts.inputs, **options, generator=seeds)
        for index, seed in enumerate(seeds):
            row = prompts.row(index)
            options["cactus_delta"] = batch_delta = [0.1, 0.5, 1.0][index]
            alone = target.generate(**row.inputs, **options, generator=[seed])
            assert batch.sequences[index, 9:].tolist() == alone.sequences[0, row.input_ids.shape[1] :].tolist()
            assert batch.speculation.kinds[index].tolist() == alone.speculation.kinds[0].tolist(), batch_delta
            for ours, own in zip(batch.scores, alone.scores, strict=True):
                torch.testing.assert_close(ours[index], own[0])

    @pytest.mark.parametrize("num_drafts", (1, 2, 7, 40))
    @pytest.mark.parametrize("name", ("qwen3", "gemma3"))
    def test_any_draft_length(self, enabled, name, num_drafts):
        target, draft = tiny.pair(name)
        prompts = tiny.ragged_prompts((3, 11, 1, 6, 6))
        assert_same(greedy(enabled(target), draft, prompts, num_assistant_tokens=num_drafts), plain(target, prompts))

    @pytest.mark.parametrize("schedule", ("constant", "heuristic", "heuristic_transient", "auto"))
    def test_any_schedule(self, enabled, schedule):
        target, draft = tiny.pair("llama")
        prompts = tiny.ragged_prompts()
        assert_same(
            greedy(enabled(target), draft, prompts, num_assistant_tokens_schedule=schedule), plain(target, prompts)
        )

    @pytest.mark.parametrize("name", ("llama", "mistral", "gpt2"))
    @pytest.mark.parametrize("kind", ("target", "noise"))
    def test_perfect_and_useless_drafts(self, enabled, name, kind):
        target = tiny.model(name)
        draft = target if kind == "target" else tiny.ARCHITECTURES[name].build(seed=99)
        prompts = tiny.ragged_prompts()
        options = {"return_dict_in_generate": True, "num_assistant_tokens": 4, "max_new_tokens": 21}
        output = enabled(target).generate(
            **prompts.inputs, assistant_model=draft, do_sample=False, cactus_delta=0.0, eos_token_id=None, **options
        )
        assert_same(list(output.sequences[:, 17:]), plain(target, prompts, 21))
        if kind == "target":  # 1 token from the prompt, then 4 rounds of 5
            assert output.speculation.rounds.tolist() == [4] * 4
            assert output.speculation.acceptance_rate == 1.0
        else:
            assert output.speculation.acceptance_rate < 0.2

    @pytest.mark.parametrize("delta", (0.0, 0.3, 5.0, float("inf")))
    def test_does_not_depend_on_delta(self, enabled, delta):
        target, draft = tiny.pair("qwen3", eps=0.2)
        prompts = tiny.ragged_prompts()
        assert_same(greedy(enabled(target), draft, prompts, cactus_delta=delta), plain(target, prompts))

    def test_rows_end_early_at_any_of_several_ends(self, enabled):
        target, draft = tiny.pair("qwen3")
        prompts = tiny.ragged_prompts((5, 17, 9, 2, 8, 4))
        texts = plain(target, prompts)
        ends = [int(texts[0][3]), int(texts[1][10]), int(texts[3][0])]  # in a block, late, and the very first token
        rows = greedy(enabled(target), draft, prompts, eos_token_id=ends)
        assert_same(rows, tiny.plain_greedy(target, prompts, NEW_TOKENS, eos_token_id=ends))
        assert int(rows[3][0]) == ends[2] and (rows[3][1:] == tiny.PAD).all()

    def test_vocabularies_of_different_padding(self, enabled):
        target = tiny.model("qwen2")
        prompts = tiny.ragged_prompts()
        for vocab in (90, 104):
            draft = tiny.ARCHITECTURES["qwen2"].build(vocab=vocab, seed=0)
            assert_same(greedy(enabled(target), draft, prompts), plain(target, prompts))

    def test_scaled_rope_up_to_the_original_context(self, enabled):
        """Dynamic frequencies are fixed up to there; longrope's are so too behind it, if the prompts are behind it."""
        target, draft = tiny.pair("llama_dynamic_rope", max_position_embeddings=64)
        prompts = tiny.ragged_prompts()
        assert_same(greedy(enabled(target), draft, prompts), plain(target, prompts))
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        original = {"original_max_position_embeddings": 16}
        target = tiny.ARCHITECTURES["phi3"].build(rope_parameters=rope | original, **original)
        draft, prompts = tiny.perturbed(target), tiny.ragged_prompts((20, 31, 17))
        assert_same(greedy(enabled(target), draft, prompts), plain(target, prompts))
        with pytest.raises(ValueError, match="target, Phi3ForCausalLM.*outgrows.*33 tokens.*max_new_tokens"):
            greedy(target, draft, tiny.ragged_prompts((9,)))

    def test_up_to_the_last_learned_position(self, enabled):
        """Rows near their end are filled up to the others' drafts, which must not ask for positions
        that do not exist.
        """
        target, draft = tiny.pair("gpt2")
        prompts = tiny.ragged_prompts((240, 17))
        options = {"max_length": tiny.MAX_POSITIONS, "num_assistant_tokens": 12, "max_new_tokens": None}
        assert_same(greedy(enabled(target), draft, prompts, **options), plain(target, prompts, 16))


def plain(target, prompts: tiny.Prompts, max_new_tokens: int = NEW_TOKENS) -> list[Tensor]:
    return tiny.plain_greedy(target, prompts, max_new_tokens)


class TestLaw:
    """Seeds were fixed beforehand."""

    def frequencies(self, enabled, num_calls: int, **options) -> Tensor:
        target = enabled(tiny.vocabulary8(0))
        return laws.frequencies(target, num_calls, assistant_model=tiny.vocabulary8(1), **options)

    def exact(self, rule, num_drafts: int) -> Tensor:
        target, draft = (laws.law_of(tiny.vocabulary8(seed, dtype=torch.float64)) for seed in (0, 1))
        return laws.exact(target, draft, rule, num_drafts)

    def target_law(self) -> Tensor:
        return self.exact(cactus_hf.SpeculativeSampling(), 3)

    def test_enumeration_of_lossless_rounds_is_the_target(self):
        target = tiny.vocabulary8(0, dtype=torch.float64)
        law = self.target_law()
        for row, (a, b, c) in product(range(4), [(0, 0, 0), (3, 1, 7), (7, 7, 2)]):
            prompt = laws.PROMPTS.row(row).input_ids[0].tolist()
            with torch.no_grad():
                rows = target(torch.tensor([prompt + [a, b]])).logits[0, -3:].softmax(-1)
            assert torch.isclose(law[row, a, b, c], rows[0, a] * rows[1, b] * rows[2, c], rtol=1e-9, atol=0)

    @pytest.mark.parametrize("num_drafts", (1, 3))
    def test_delta_0_samples_the_target(self, enabled, num_drafts):
        counts = self.frequencies(enabled, 40, cactus_delta=0.0, num_assistant_tokens=num_drafts)
        laws.assert_follows(counts, self.target_law())

    @pytest.mark.parametrize("num_drafts", (1, 2, 3))
    def test_cactus_samples_the_law_of_its_rounds(self, enabled, num_drafts):
        counts = self.frequencies(enabled, 40, cactus_delta=0.5, num_assistant_tokens=num_drafts)
        laws.assert_follows(counts, self.exact(cactus_hf.Cactus(0.5), num_drafts))

    def test_the_test_can_tell_the_laws_apart(self, enabled):
        """Delta .5 against the target's law: the level would be useless if this passed."""
        counts = self.frequencies(enabled, 10, cactus_delta=0.5, num_assistant_tokens=3)
        with pytest.raises(AssertionError):
            laws.assert_follows(counts, self.target_law())

    @pytest.mark.parametrize(
        "rule",
        (
            cactus_hf.TypicalAcceptance(recovery="sample"),
            cactus_hf.TypicalAcceptance(),
            cactus_hf.TopK(3),
            cactus_hf.Mixture(0.6),
            cactus_hf.Lenience(0.4),
            cactus_hf.Mentored(0.05),
            cactus_hf.Cactus(0.05, divergence="js", solver="exact"),
        ),
        ids=repr,
    )
    def test_other_rules_sample_the_law_of_their_rounds(self, enabled, rule):
        counts = self.frequencies(enabled, 30, acceptance_rule=rule, num_assistant_tokens=2)
        laws.assert_follows(counts, self.exact(rule, 2))

    def test_delta_of_each_row(self, enabled):
        deltas = torch.tensor([0.0, 0.5, 0.0, 0.5]).repeat(64)
        counts = self.frequencies(enabled, 40, cactus_delta=deltas, num_assistant_tokens=2)
        lossless, raised = self.target_law(), self.exact(cactus_hf.Cactus(0.5), 2)
        laws.assert_follows(counts, torch.stack([lossless[0], raised[1], lossless[2], raised[3]]))

    def test_confidence_threshold_leaves_the_law_as_it_is(self, enabled):
        """Dropping the unconfident token instead of keeping it would bias what is drafted."""
        counts = self.frequencies(
            enabled, 40, cactus_delta=0.0, num_assistant_tokens=3, assistant_confidence_threshold=0.3
        )
        laws.assert_follows(counts, self.target_law())

    def test_seeded_rows_sample_the_target(self, enabled):
        generator = torch.Generator().manual_seed(11)
        counts = self.frequencies(enabled, 40, cactus_delta=0.0, num_assistant_tokens=3, generator=generator)
        laws.assert_follows(counts, self.target_law())


class TestSampling:
    @pytest.mark.parametrize(
        "rule",
        (
            cactus_hf.Cactus(0.0),
            cactus_hf.Cactus(1.0),
            cactus_hf.Cactus(float("inf")),
            cactus_hf.TypicalAcceptance(),
            cactus_hf.TopK(20),
        ),
        ids=repr,
    )
    @pytest.mark.parametrize("options", ({"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2, "temperature": 1.5}), ids=repr)
    def test_never_leaves_the_targets_support(self, enabled, rule, options):
        target, draft = tiny.pair("qwen3", eps=0.3)
        prompts = tiny.ragged_prompts((5, 17, 9, 2) * 8)
        output = enabled(target).generate(
            **prompts.inputs,
            assistant_model=draft,
            do_sample=True,
            acceptance_rule=rule,
            max_new_tokens=20,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        scores = torch.stack(output.scores, dim=1).gather(2, output.sequences[:, 17:, None])
        assert torch.isfinite(scores).all()

    @pytest.mark.parametrize(
        "options", ({}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 9}, {"repetition_penalty": 1.5})
    )
    def test_draft_and_target_are_processed_alike(self, enabled, options):
        """A draft that is the target is always right, at any temperature and under any penalty."""
        target = tiny.model("llama")
        stats = speculate(enabled(target), target, cactus_delta=0.0, **options).speculation
        assert stats.acceptance_rate > 0.97  # rounding differs between one token and a block

    def test_acceptance_and_divergence_grow_with_delta(self, enabled):
        target, draft = tiny.pair("llama", eps=0.2)
        runs = [
            speculate(enabled(target), draft, cactus_delta=delta, speculation_kl=True, max_new_tokens=80).speculation
            for delta in (0.0, 0.05, 0.5, 5.0)
        ]
        rates = [run.position_acceptance for run in runs]
        assert rates == sorted(rates) and rates[-1] > rates[0] + 0.1
        assert runs[0].ball_kl == 0.0 and runs[0].emitted_kl < 1e-6
        assert all(run.emitted_kl > runs[0].emitted_kl for run in runs[1:])

    def test_boosted_tokens_occur_with_a_bonus_only(self, enabled):
        target, draft = tiny.pair("llama", eps=0.2)
        for delta in (0.0, 1.0):
            kinds = speculate(enabled(target), draft, cactus_delta=delta, max_new_tokens=60).speculation.kinds
            assert bool((kinds == TokenKind.BOOSTED).any()) == (delta > 0)

    def test_num_return_sequences(self, enabled):
        target, draft = tiny.pair("llama")
        output = speculate(enabled(target), draft, cactus_delta=0.5, num_return_sequences=3)
        assert output.sequences.shape == (12, 17 + NEW_TOKENS)
        new = output.sequences[:, 17:].view(4, 3, -1)
        assert all(not torch.equal(rows[i], rows[j]) for rows in new for i, j in ((0, 1), (0, 2), (1, 2)))

    def test_delta_of_each_prompt_holds_for_all_its_returned_rows(self, enabled):
        target, draft = tiny.pair("llama", eps=0.2)
        per_prompt = speculate(enabled(target), draft, cactus_delta=[0.0, 0.0, 2.0, 2.0], num_return_sequences=2)
        kl = per_prompt.speculation.ball_kl_sum
        assert (kl[:4] == 0).all() and (kl[4:] > 0).all()

    def test_manual_seed_reproduces(self, enabled):
        target, draft = tiny.pair("llama")
        texts = []
        for _ in range(2):
            torch.manual_seed(5)
            texts.append(speculate(enabled(target), draft, cactus_delta=0.5).sequences)
        assert torch.equal(*texts)

    def test_a_seeded_row_does_not_depend_on_its_neighbours(self, enabled):
        target, draft = tiny.pair("llama", dtype=torch.float64)
        prompts = tiny.ragged_prompts()
        options = {
            "cactus_delta": 0.5,
            "assistant_model": draft,
            "do_sample": True,
            "max_new_tokens": 30,
            "eos_token_id": 7,
        }
        target = enabled(target)
        together = target.generate(**prompts.inputs, generator=[1, 2, 3, 4], pad_token_id=0, **options)[:, 17:]
        order = [2, 0, 3, 1]
        shuffled = {name: value[order] for name, value in prompts.inputs.items()}
        again = target.generate(**shuffled, generator=[3, 1, 4, 2], pad_token_id=0, **options)[:, 17:]
        assert torch.equal(again, together[order])
        for index in range(4):
            row = prompts.row(index, num_pads=index)
            alone = target.generate(**row.inputs, generator=[index + 1], pad_token_id=0, **options)[
                0, row.input_ids.shape[1] :
            ]
            assert_same([alone], [together[index]])


def speculate(target, draft, **options):
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": tiny.PAD} | options
    return target.generate(
        **tiny.ragged_prompts().inputs, assistant_model=draft, do_sample=True, return_dict_in_generate=True, **options
    )
