"""The schedule "auto" through `generate()`: texts and laws are those of any draft length."""

from __future__ import annotations

import copy
import itertools

import laws
import pytest
import torch
from transformers import GenerationConfig

import cactus_hf
import tiny
from cactus_hf.auto_length import AutoSchedule
from cactus_hf.host import keep_unknown_options


NEW_TOKENS = 40
NINE = {"max_new_tokens": 9}
# By batch size; a round without drafts is the fastest unless most of them are kept
CLOSE = {"1": {"draft": [0.4 * m for m in range(1, 7)], "verify": [1 + 0.1 * k for k in range(7)]}}
FREE = {"1": {"draft": [0.01 * m for m in range(1, 7)], "verify": [1 + 0.01 * k for k in range(7)]}}
DEAR = {"1": {"draft": [2.0 * m for m in range(1, 7)], "verify": [1.0] * 7}}
AUTO = {"num_assistant_tokens_schedule": "auto", "cactus_delta": 1.0, "eos_token_id": None, "pad_token_id": tiny.PAD}


@pytest.fixture
def pair():
    target, draft = tiny.pair("llama")
    return cactus_hf.enable(copy.copy(target)), draft


def widths(model) -> list[int]:
    """Of the passes that a model makes from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("costs", (None, CLOSE, FREE, DEAR), ids=("timed", "close", "free", "dear"))
@pytest.mark.parametrize("lengths", ((9,), (5, 17, 9)), ids=str)
@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_greedy_texts_are_plain(name, lengths, costs):
    target, draft = tiny.pair(name)
    prompts = tiny.ragged_prompts(lengths)
    expected = tiny.plain_greedy(target, prompts, NEW_TOKENS)
    target = cactus_hf.enable(copy.copy(target))
    for drafting in (draft, tiny.ARCHITECTURES[name].build(seed=99)):
        output = target.generate(
            **prompts.inputs, **AUTO, assistant_model=drafting, do_sample=False, max_new_tokens=NEW_TOKENS,
            speculation_costs=costs,
        )  # fmt: skip
        for row, text in zip(output[:, prompts.input_ids.shape[1] :], expected, strict=True):
            assert row.tolist() == text.tolist()


@pytest.mark.filterwarnings("ignore:The rows of this batch are decoded one after another")
@pytest.mark.parametrize(
    "source", ({"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"assistant_confidence_threshold": 0.3})
)
def test_other_sources_and_a_threshold(pair, source):
    target, draft = pair
    prompts = tiny.ragged_prompts((5, 17, 9))
    expected = tiny.plain_greedy(tiny.pair("llama")[0], prompts, NEW_TOKENS)
    own = {"assistant_model": draft} if "assistant_confidence_threshold" in source else {}
    for costs in (None, CLOSE):
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "speculation_costs": costs, **source, **own}
        output = target.generate(**prompts.inputs, **AUTO, **options)
        assert output[:, 17:].tolist() == [text.tolist() for text in expected]


def test_rounds_without_drafts_make_no_pass_of_the_draft(pair):
    target, draft = pair
    draft = copy.deepcopy(draft)
    passes, prompts = widths(draft), tiny.ragged_prompts((9,))
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    output = target.generate(
        **prompts.inputs, **AUTO, **options, assistant_model=draft, speculation_costs=DEAR
    ).speculation
    assert output.rounds.tolist() == [NEW_TOKENS - 1] and output.drafted.tolist() == [0]
    assert not passes, "it has not even read the prompt"


def test_what_the_draft_missed_is_read_in_one_pass(pair):
    """After rounds without drafts, those of a draft that is tried again have the law of the whole text."""
    target, _ = pair
    noise = tiny.ARCHITECTURES["llama"].build(seed=99)
    passes, prompts = widths(noise), tiny.ragged_prompts((9,))
    target.generate(
        **prompts.inputs, **AUTO, do_sample=False, max_new_tokens=200, assistant_model=noise, speculation_costs=CLOSE
    )
    assert max(passes[1:]) > 10 and len(passes) < 40


@pytest.mark.parametrize("name", ("llama", "gemma3"))
@pytest.mark.parametrize("lengths", ((9,), (5, 17, 9)), ids=str)
def test_a_draft_that_was_left_out_has_the_law_of_the_whole_text(name, lengths, monkeypatch):
    """The target as its own draft: all is kept, though it read nothing for 12 rounds."""
    pattern = itertools.cycle([0] * 12 + [4])
    monkeypatch.setattr(AutoSchedule, "_choose", lambda *_: next(pattern))
    model, prompts = tiny.model(name), tiny.ragged_prompts(lengths)
    output = cactus_hf.enable(copy.copy(model)).generate(
        **prompts.inputs, **AUTO, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=model,
        return_dict_in_generate=True, repetition_penalty=1.3, guidance_scale=1.5,
    ).speculation  # fmt: skip
    assert output.drafted.tolist() == output.accepted.tolist() and output.drafted.min() > 4


def test_good_drafts_are_drafted_more(pair):
    target, _ = pair
    prompts = tiny.ragged_prompts((9,))
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    stats = target.generate(
        **prompts.inputs, **AUTO, **options, assistant_model=tiny.pair("llama")[0], speculation_costs=FREE
    ).speculation
    assert stats.tokens_per_round > 5


class TestLaw:
    """Seeds were fixed beforehand."""

    def frequencies(self, **options) -> torch.Tensor:
        target = cactus_hf.enable(copy.copy(tiny.vocabulary8(0)))
        options = {"cactus_delta": 0.0, "num_assistant_tokens_schedule": "auto"} | options
        return laws.frequencies(target, 40, assistant_model=tiny.vocabulary8(1), **options)

    def target_law(self) -> torch.Tensor:
        target, draft = (laws.law_of(tiny.vocabulary8(seed, dtype=torch.float64)) for seed in (0, 1))
        return laws.exact(target, draft, cactus_hf.SpeculativeSampling(), 1)

    @pytest.mark.parametrize("costs", (None, FREE), ids=("timed", "given"))
    def test_delta_0_samples_the_target(self, costs):
        torch.manual_seed(11)
        laws.assert_follows(self.frequencies(speculation_costs=costs), self.target_law())

    def test_seeded_rows_sample_the_target(self):
        """Small batches, so that what one row keeps decides what all draft next."""
        target = cactus_hf.enable(copy.copy(tiny.vocabulary8(0)))
        inputs = laws.PROMPTS.inputs
        counts, generator = torch.zeros(4, 512), torch.Generator().manual_seed(3)
        options = AUTO | {"cactus_delta": 0.0, "pad_token_id": 0, "max_new_tokens": 6, "speculation_costs": CLOSE}
        for _ in range(150):
            tokens = target.generate(
                **inputs, **options, do_sample=True, assistant_model=tiny.vocabulary8(1), num_return_sequences=8,
                generator=generator,
            )[:, -6:-3]  # fmt: skip
            cell = (tokens * torch.tensor([64, 8, 1])).sum(1).view(4, 8)
            counts += torch.stack([torch.bincount(row, minlength=512) for row in cell])
        laws.assert_follows(counts.view(4, 8, 8, 8), self.target_law())


def test_the_same_seed_gives_the_same_text(pair):
    target, draft = pair
    prompts = tiny.ragged_prompts((5, 9))
    options = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "speculation_costs": FREE, "assistant_model": draft}
    texts = [target.generate(**prompts.inputs, **AUTO, **options, generator=[3, 4]) for _ in range(2)]
    assert texts[0].tolist() == texts[1].tolist()


class TestConfig:
    def test_costs_are_saved_with_the_model(self, pair, tmp_path):
        target, draft = pair
        target.generation_config = copy.deepcopy(target.generation_config)
        target.generation_config.num_assistant_tokens_schedule = "auto"
        target.generation_config.cactus_delta, target.generation_config.speculation_costs = 0.5, DEAR
        target.save_pretrained(tmp_path)
        loaded = cactus_hf.enable(type(tiny.pair("llama")[0]).from_pretrained(tmp_path))
        assert loaded.generation_config.speculation_costs == DEAR
        assert self.drafted(loaded, draft) == 0

    def test_a_saved_config_can_be_passed_in(self, pair, tmp_path):
        target, draft = pair
        config = GenerationConfig(num_assistant_tokens_schedule="auto", cactus_delta=0.5, speculation_costs=DEAR)
        keep_unknown_options(config)
        config.save_pretrained(tmp_path)
        loaded = GenerationConfig.from_pretrained(tmp_path)
        assert loaded.speculation_costs == DEAR
        assert self.drafted(target, draft, generation_config=loaded) == 0

    def test_the_call_goes_before_the_config(self, pair):
        target, draft = pair
        config = GenerationConfig(num_assistant_tokens_schedule="auto", cactus_delta=0.5, speculation_costs=DEAR)
        assert self.drafted(target, draft, generation_config=config, speculation_costs=FREE) > 0

    def test_costs_of_a_config_do_not_disturb_other_schedules(self, pair):
        target, draft = pair
        config = GenerationConfig(cactus_delta=0.5, speculation_costs=DEAR)
        assert self.drafted(target, draft, generation_config=config) > 0

    def drafted(self, target, draft, **options) -> int:
        output = target.generate(
            torch.tensor([[5, 6, 7]]), assistant_model=draft, do_sample=True, max_new_tokens=9, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, **options,
        )  # fmt: skip
        return int(output.speculation.drafted)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"speculation_costs": {"1": 3}}, "speculation_costs.*batch size 1"),
        ({"speculation_costs": FREE, "num_assistant_tokens_schedule": "constant"}, "speculation_costs.*'constant'"),
        ({"speculation_costs": FREE, "cactus_delta": None}, "speculation_costs.*without an acceptance rule"),
        ({"generator": [1], "assistant_confidence_threshold": 0.3}, "generator.*speculation_costs"),
    ),
)
def test_errors_come_before_any_pass(pair, options, words):
    target, draft = pair
    draft = copy.deepcopy(draft)
    passes = widths(draft)
    with pytest.raises(ValueError, match=words):
        target.generate(
            torch.tensor([[5, 6, 7]]), assistant_model=draft, do_sample=True, max_new_tokens=9, **AUTO | options
        )
    assert not passes


def test_compiled_passes_draft_in_every_round(pair):
    """A draft that was left out would read what it missed in a pass of yet another width."""
    target, draft = pair
    draft = copy.deepcopy(draft)
    passes, prompts = widths(draft), tiny.ragged_prompts((9,))
    output = target.generate(
        **prompts.inputs, **AUTO, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=draft,
        cache_implementation="static", num_assistant_tokens=3, speculation_costs=DEAR,
    )  # fmt: skip
    assert len(passes) > 20 and set(passes[1:]) <= {1, 2}
    assert output[0, 9:].tolist() == tiny.plain_greedy(tiny.pair("llama")[0], prompts, NEW_TOKENS)[0].tolist()
