"""Drafts that are unlike the target: another precision or device, and a shorter context."""

from __future__ import annotations

import copy

import laws
import pytest
import torch

import cactus_hf
import tiny


OPTIONS = {"eos_token_id": None, "pad_token_id": tiny.PAD, "num_assistant_tokens": 4, "max_new_tokens": 24}


def enabled(model):
    return cactus_hf.enable(copy.copy(model))


def greedy(target, draft, prompts: tiny.Prompts, **options) -> list[list[int]]:
    options = {
        **prompts.inputs,
        "assistant_model": draft,
        "do_sample": False,
        "cactus_delta": 1.0,
        **OPTIONS,
        **options,
    }
    return enabled(target).generate(**options)[:, prompts.input_ids.shape[1] :].tolist()


def plain(target, prompts: tiny.Prompts) -> list[list[int]]:
    return [row.tolist() for row in tiny.plain_greedy(target, prompts, OPTIONS["max_new_tokens"])]


class TestPrecision:
    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
    def test_drafts_of_another_precision(self, dtype):
        target, prompts = tiny.model("qwen3"), tiny.ragged_prompts()
        draft = copy.deepcopy(target).to(dtype)
        assert greedy(target, draft, prompts) == plain(target, prompts)
        output = sampled(target, draft, prompts)
        assert output.speculation.acceptance_rate > 0.9, "the draft is the target, up to rounding"

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
    def test_targets_of_another_precision(self, dtype):
        draft, prompts = tiny.model("qwen3"), tiny.ragged_prompts()
        target = copy.deepcopy(draft).to(dtype)
        if dtype == torch.float64:  # in half precision the shape of a batch may decide between two tokens
            assert greedy(target, draft, prompts) == plain(target, prompts)
        output = sampled(target, draft, prompts)
        assert output.sequences.shape == (4, 17 + 24) and output.speculation.acceptance_rate > 0.9

    @pytest.mark.parametrize(
        "rule", (cactus_hf.Cactus(0.5), cactus_hf.Mixture(0.5), cactus_hf.TypicalAcceptance()), ids=repr
    )
    def test_every_kind_of_rule_takes_two_precisions(self, rule):
        draft = tiny.pair("qwen3", eps=0.3)[1]
        target = copy.deepcopy(tiny.model("qwen3")).double()
        options = {"cactus_delta": None, "acceptance_rule": rule, "speculation_kl": True}
        assert sampled(target, draft, tiny.ragged_prompts(), **options).speculation.emitted_kl > 0

    def test_a_draft_in_half_precision_leaves_the_law_as_it_is(self):
        draft = copy.deepcopy(tiny.vocabulary8(1)).to(torch.bfloat16)
        counts = laws.frequencies(
            enabled(tiny.vocabulary8(0)), 30, assistant_model=draft, cactus_delta=0.0, num_assistant_tokens=2
        )
        law = laws.law_of(tiny.vocabulary8(0, dtype=torch.float64))
        laws.assert_follows(counts, laws.exact(law, law, cactus_hf.SpeculativeSampling(), 2))


class TestDevice:
    @pytest.mark.gpu
    @pytest.mark.parametrize("devices", (("cuda", "cpu"), ("cpu", "cuda")))
    def test_a_draft_on_another_device(self, devices):
        target = copy.deepcopy(tiny.model("qwen3")).to(devices[0])
        draft = copy.deepcopy(tiny.pair("qwen3")[1]).to(devices[1])
        prompts = tiny.Prompts(*(value.to(devices[0]) for value in tiny.ragged_prompts()))
        assert greedy(target, draft, prompts) == plain(target, prompts)
        assert sampled(target, draft, prompts).sequences.device.type == devices[0]

    def test_an_offloaded_draft(self):
        """Its parameters are on the device "meta" between forward passes."""
        accelerate = pytest.importorskip("accelerate")
        target, draft = tiny.pair("qwen3")
        draft = accelerate.cpu_offload(copy.deepcopy(draft), execution_device="cpu")
        prompts = tiny.ragged_prompts()
        assert greedy(target, draft, prompts) == plain(target, prompts)


class TestContext:
    """A draft's context may end before the text does, or even before the prompt."""

    PROMPTS = tiny.ragged_prompts((30, 60, 3, 46))
    LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    ORIGINAL = {"original_max_position_embeddings": 40}
    DRAFTS = {
        "learned": ("gpt2", {"n_positions": 40}),
        "learned, with an offset": ("opt", {"max_position_embeddings": 40}),
        "table": ("gptj", {"n_positions": 40}),
        "dynamic": ("llama_dynamic_rope", {}),
        "longrope": ("phi3", {"rope_parameters": LONGROPE | ORIGINAL, **ORIGINAL}),
        "sliding": ("mistral", {"max_position_embeddings": 40}),
    }

    @pytest.mark.parametrize(("name", "options"), DRAFTS.values(), ids=DRAFTS)
    def test_greedy_texts_equal_plain_ones(self, name, options):
        target = tiny.model("qwen3")
        draft = tiny.ARCHITECTURES[name].build(**options)
        assert greedy(target, draft, self.PROMPTS) == plain(target, self.PROMPTS)
        for row in (self.PROMPTS.row(0), self.PROMPTS.row(1, num_pads=2)):
            assert greedy(target, draft, row) == plain(target, row)

    def cut(self, model, context: int):
        model = copy.deepcopy(model)
        model.config.max_position_embeddings = context
        return model

    def test_it_goes_on_with_good_drafts(self):
        """A draft that sees the last part of a text only: were it lost, nothing would be kept."""
        target = tiny.ARCHITECTURES["mistral"].build(max_position_embeddings=256)  # looks back 8 tokens, twice
        output = sampled(target, self.cut(target, 48), tiny.ragged_prompts(), max_new_tokens=120)
        assert output.speculation.acceptance_rate > 0.9

    def test_a_seeded_row_does_not_depend_on_its_neighbours(self):
        target = tiny.model("qwen3", dtype=torch.float64)
        draft = self.cut(tiny.model("gpt2", dtype=torch.float64), 20)
        prompts = tiny.ragged_prompts()
        options = {"assistant_model": draft, "do_sample": True, "cactus_delta": 0.5, **OPTIONS}
        together = enabled(target).generate(**prompts.inputs, generator=[1, 2, 3, 4], **options)
        for index in range(4):
            row = prompts.row(index)
            alone = enabled(target).generate(**row.inputs, generator=[index + 1], **options)
            assert alone[0, -24:].tolist() == together[index, -24:].tolist()

    @pytest.mark.parametrize("context", (1, 2, 5))
    def test_the_law_stays_as_it_is(self, context):
        draft = self.cut(tiny.model("gpt2", vocab=8, logit_scale=1.2), context)
        counts = laws.frequencies(
            enabled(tiny.vocabulary8(0)), 30, assistant_model=draft, cactus_delta=0.0, num_assistant_tokens=3
        )
        law = laws.law_of(tiny.vocabulary8(0, dtype=torch.float64))
        laws.assert_follows(counts, laws.exact(law, law, cactus_hf.SpeculativeSampling(), 2))


class TestLength:
    """Draft lengths and thresholds are those of the call for every source, and leave its configs alone."""

    @pytest.mark.parametrize("source", ("assistant_model", "assistant_early_exit"))
    def test_options_of_the_call(self, source):
        target = tiny.model("llama")
        value = {"assistant_model": tiny.perturbed(target), "assistant_early_exit": 1}[source]
        models = (target, value) if source == "assistant_model" else (target,)
        before = [model.generation_config.to_dict() for model in models]
        for num_tokens in (1, 3, 6):
            output = sampled(target, None, tiny.ragged_prompts(), **{source: value}, num_assistant_tokens=num_tokens)
            assert int((output.speculation.drafted / output.speculation.rounds).ceil().max()) == num_tokens
        output = sampled(target, None, tiny.ragged_prompts(), **{source: value}, assistant_confidence_threshold=1.0)
        assert (output.speculation.drafted <= output.speculation.rounds).all()
        assert [model.generation_config.to_dict() for model in models] == before

    def test_without_scikit_learn_or_with_it(self, monkeypatch):
        """Where it is installed, transformers fits thresholds of its own."""
        from transformers.generation import candidate_generator

        target, draft = tiny.pair("llama")
        texts = []
        for is_installed in (True, False):
            monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda answer=is_installed: answer)
            torch.manual_seed(1)
            output = sampled(target, draft, tiny.ragged_prompts(), assistant_confidence_threshold=0.4)
            texts.append((output.sequences.tolist(), output.speculation.drafted.tolist()))
        assert texts[0] == texts[1]


def sampled(target, draft, prompts: tiny.Prompts, **options):
    options = {"assistant_model": draft, "cactus_delta": 0.0, "return_dict_in_generate": True, **OPTIONS, **options}
    return enabled(target).generate(**prompts.inputs, do_sample=True, top_k=0, **options)
