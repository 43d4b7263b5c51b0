"""Hosting inside `generate()`: enabling changes nothing that was not asked for, and can be undone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import cactus_hf
import tiny
from cactus_hf.generation import SpeculativeMixin


SAMPLE = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD}


@pytest.fixture
def pair():
    target, draft = tiny.pair("llama")
    return cactus_hf.enable(copy.deepcopy(target)), draft


def seeded(function):
    torch.manual_seed(3)
    return function()


class TestEnable:
    def test_returns_the_model_and_may_be_repeated(self):
        model = copy.deepcopy(tiny.model("llama"))
        assert cactus_hf.enable(cactus_hf.enable(model)) is model
        assert [cls is SpeculativeMixin for cls in type(model).__mro__].count(True) == 1

    def test_disable_undoes_it(self):
        model = copy.deepcopy(tiny.model("llama"))
        stock = type(model)
        assert cactus_hf.disable(cactus_hf.enable(model)) is model
        assert type(model) is stock
        assert cactus_hf.disable(model) is model

    def test_leaves_other_models_of_the_class_alone(self, pair):
        with pytest.raises(ValueError, match="cactus_delta"):
            tiny.model("llama").generate(torch.tensor([[5]]), cactus_delta=1.0, max_new_tokens=2)

    def test_keeps_the_name_of_the_class(self, pair, tmp_path):
        target, _ = pair
        assert type(target).__name__ == "LlamaForCausalLM"
        target.save_pretrained(tmp_path)
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "LlamaForCausalLM"

    def test_other_things_are_refused(self):
        with pytest.raises(TypeError, match="AutoModelForCausalLM"):
            cactus_hf.enable(torch.nn.Linear(2, 2))

    def test_reaches_into_compiled_and_parallel_wrappers(self):
        for wrap in (lambda m: torch.compile(m, backend="eager"), torch.nn.DataParallel):
            model = copy.deepcopy(tiny.model("llama"))
            wrapper = wrap(model)
            assert cactus_hf.enable(wrapper) is wrapper
            assert isinstance(model, SpeculativeMixin)

    def test_copies_are_enabled_and_independent(self, pair):
        target, draft = pair
        clone = copy.deepcopy(target)
        assert isinstance(clone, SpeculativeMixin)
        clone.generate(torch.tensor([[5, 6]]), assistant_model=draft, cactus_delta=1.0, **SAMPLE)
        clone.lm_head.weight.data.zero_()
        assert target.lm_head.weight.any()

    def test_pickles_as_the_stock_model(self, pair):
        target, _ = pair
        loaded = pickle.loads(pickle.dumps(target))
        assert type(loaded) is type(tiny.model("llama"))
        assert torch.equal(loaded.lm_head.weight, target.lm_head.weight)
        buffer = io.BytesIO()
        torch.save(target, buffer)
        buffer.seek(0)
        assert type(torch.load(buffer, weights_only=False)) is type(tiny.model("llama"))


class TestEnableForTheProcess:
    @pytest.fixture(autouse=True)
    def undo(self):
        yield
        cactus_hf.disable()

    def call(self, model, draft):
        prompts = tiny.ragged_prompts().inputs
        return model.generate(**prompts, assistant_model=draft, cactus_delta=0.5, **SAMPLE)

    def test_every_model_takes_our_keywords_until_it_is_undone(self):
        def hosted():
            return [vars(owner)[name] for owner, name, _ in cactus_hf.generation.HOSTED]

        before = hosted()
        assert cactus_hf.enable() is None and cactus_hf.enable() is None
        for name in ("llama", "qwen3"):
            assert self.call(*tiny.pair(name)).shape == (4, 29)
        cactus_hf.disable()
        assert hosted() == before
        with pytest.raises(ValueError, match="cactus_delta"):
            self.call(*tiny.pair("llama"))

    def test_a_delta_survives_saving(self, tmp_path):
        model = copy.deepcopy(tiny.model("llama"))
        model.generation_config.cactus_delta = 0.5
        cactus_hf.enable()
        model.save_pretrained(tmp_path)
        assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.cactus_delta == 0.5

    def test_goes_together_with_a_model_that_is_enabled_itself(self, pair):
        alone = seeded(lambda: self.call(*pair))
        cactus_hf.enable()
        assert torch.equal(seeded(lambda: self.call(*pair)), alone)
        cactus_hf.disable()
        assert torch.equal(seeded(lambda: self.call(*pair)), alone)

    def test_stock_calls_remain_stock(self):
        target, draft = tiny.pair("llama")
        call = {"input_ids": torch.tensor([[5, 6, 7]]), "assistant_model": draft, **SAMPLE}
        stock = seeded(lambda: target.generate(**call))
        cactus_hf.enable()
        assert torch.equal(seeded(lambda: target.generate(**call)), stock)


class TestStockCalls:
    """Without a rule transformers' own code runs, bit for bit."""

    @pytest.mark.parametrize(
        "options",
        (
            {"do_sample": False},
            {"do_sample": True, "temperature": 0.7, "top_k": 9},
            {"do_sample": False, "num_beams": 3},
            {"do_sample": False, "prompt_lookup_num_tokens": 3},
        ),
        ids=repr,
    )
    def test_plain_modes(self, pair, options):
        target, _ = pair
        call = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]]), "max_new_tokens": 12, **options}
        ours = seeded(lambda: target.generate(**call))
        assert torch.equal(ours, seeded(lambda: tiny.model("llama").generate(**call)))

    def test_stock_assisted_generation(self, pair):
        target, draft = pair
        call = {"input_ids": torch.tensor([[5, 6, 7]]), "assistant_model": draft, **SAMPLE}
        assert torch.equal(
            seeded(lambda: target.generate(**call)), seeded(lambda: tiny.model("llama").generate(**call))
        )

    def test_stock_assisted_generation_refuses_batches_as_ever(self, pair):
        target, draft = pair
        with pytest.raises(ValueError, match="batch_size = 1"):
            target.generate(**tiny.ragged_prompts().inputs, assistant_model=draft, **SAMPLE)

    def test_ensemble_weight_alone_is_stock(self, pair):
        target, draft = pair
        call = {
            "input_ids": torch.tensor([[5, 6, 7]]),
            "assistant_model": draft,
            "assistant_ensemble_weight": 0.5,
            **SAMPLE,
        }
        assert torch.equal(
            seeded(lambda: target.generate(**call)), seeded(lambda: tiny.model("llama").generate(**call))
        )

    def test_ensemble_weight_in_the_call_goes_before_a_delta_in_the_config(self, pair):
        target, draft = pair
        call = {
            "input_ids": torch.tensor([[5, 6, 7]]),
            "assistant_model": draft,
            "assistant_ensemble_weight": 0.5,
            **SAMPLE,
        }
        stock = seeded(lambda: target.generate(**call))
        target.generation_config.cactus_delta = 5.0
        assert torch.equal(seeded(lambda: target.generate(**call)), stock)
        target.generation_config.assistant_ensemble_weight = 0.5
        with pytest.raises(ValueError, match="cactus_delta.*assistant_ensemble_weight.*one of them"):
            target.generate(**call)

    def test_an_enabled_model_can_be_the_draft_of_stock_generation(self, pair):
        target, draft = pair
        enabled = cactus_hf.enable(copy.deepcopy(draft))
        enabled.generation_config.cactus_delta = 1.0
        call = {"input_ids": torch.tensor([[5, 6, 7]]), **SAMPLE}
        plain = tiny.model("llama")
        assert torch.equal(
            seeded(lambda: plain.generate(assistant_model=enabled, **call)),
            seeded(lambda: plain.generate(assistant_model=draft, **call)),
        )


class TestWhereDeltaStands:
    def call(self, target, draft, **options):
        return target.generate(
            torch.tensor([[5, 6, 7]]), assistant_model=draft, return_dict_in_generate=True, **SAMPLE | options
        )

    def test_in_the_models_generation_config(self, pair):
        target, draft = pair
        target.generation_config.cactus_delta = 0.5
        assert self.call(target, draft).speculation.ball_kl > 0
        assert self.call(target, draft, cactus_delta=0.0).speculation.ball_kl == 0, "the call goes first"

    def test_in_a_generation_config_passed_in(self, pair):
        target, draft = pair
        target.generation_config.cactus_delta = 0.0
        config = GenerationConfig(do_sample=True, max_new_tokens=12, pad_token_id=0, return_dict_in_generate=True)
        config.cactus_delta = 0.5
        output = target.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, generation_config=config)
        assert output.speculation.ball_kl > 0
        assert config.cactus_delta == 0.5 and not hasattr(config, "speculation_options")

    def test_survives_saving(self, pair, tmp_path):
        target, draft = pair
        target.generation_config.cactus_delta = 0.5
        target.save_pretrained(tmp_path)
        loaded = cactus_hf.enable(AutoModelForCausalLM.from_pretrained(tmp_path))
        assert loaded.generation_config.cactus_delta == 0.5
        assert self.call(loaded, draft).speculation.ball_kl > 0

    def test_a_config_with_delta_leaves_plain_calls_alone(self, pair):
        target, _ = pair
        target.generation_config.cactus_delta = 0.5
        prompt = torch.tensor([[5, 6, 7]])
        ours = target.generate(prompt, do_sample=False, max_new_tokens=9)
        assert torch.equal(ours, tiny.model("llama").generate(prompt, do_sample=False, max_new_tokens=9))

    def test_models_and_configs_are_left_as_they_were(self, pair):
        target, draft = pair
        draft = copy.deepcopy(draft)
        before = [m.generation_config.to_dict() for m in (target, draft)], copy.deepcopy(draft.state_dict())
        self.call(target, draft, cactus_delta=1.0, num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic")
        after = [m.generation_config.to_dict() for m in (target, draft)], draft.state_dict()
        assert before[0] == after[0]
        assert all(torch.equal(before[1][name], value) for name, value in after[1].items())

    def test_greedy_decoding_leaves_the_random_state_alone(self, pair):
        target, draft = pair
        before = torch.get_rng_state()
        self.call(target, draft, cactus_delta=1.0, do_sample=False)
        assert torch.equal(torch.get_rng_state(), before)


class TestDraftLength:
    """The call goes before the target's config, that before the draft's, and that before our own default of 5."""

    def drafted_positions(self, target, draft, **options):
        output = target.generate(
            torch.tensor([[5, 6, 7]]),
            assistant_model=draft,
            cactus_delta=0.0,
            return_dict_in_generate=True,
            **SAMPLE | {"max_new_tokens": 40} | options,
        )
        return output.speculation.accepted_by_position.shape[1]

    def test_order(self, pair):
        target, draft = pair[0], copy.deepcopy(pair[1])
        assert self.drafted_positions(target, draft) == 5
        draft.generation_config.num_assistant_tokens = 4
        assert self.drafted_positions(target, draft) == 4
        target.generation_config.num_assistant_tokens = 3
        assert self.drafted_positions(target, draft) == 3
        assert self.drafted_positions(target, draft, num_assistant_tokens=2) == 2

    def test_nothing_else_of_the_drafts_config_leaks(self, pair):
        target, draft = pair[0], copy.deepcopy(pair[1])
        prompts = tiny.ragged_prompts()
        options = {"assistant_model": draft, "cactus_delta": 1.0, **SAMPLE, "do_sample": False}
        expected = target.generate(**prompts.inputs, **options)
        draft.generation_config.update(
            max_new_tokens=2,
            stop_strings=["x"],
            cache_implementation="static",
            temperature=9.0,
            repetition_penalty=3.0,
        )
        assert torch.equal(target.generate(**prompts.inputs, **options), expected)


class TestProcessorsPerRow:
    """Greedy text of a ragged batch under each processor, against plain batched generation."""

    @pytest.mark.parametrize(
        "options",
        (
            {"repetition_penalty": 1.3},
            {"no_repeat_ngram_size": 2},
            {"min_new_tokens": 10, "eos_token_id": [5, 9, 11, 40]},
            {"min_length": 25, "eos_token_id": [5, 9, 11, 40]},
            {"bad_words_ids": [[5], [6, 7]]},
            {"suppress_tokens": [5, 6, 7]},
            {"begin_suppress_tokens": [4, 5]},
            {"forced_eos_token_id": 3},
            {"sequence_bias": [[[5], 5.0]]},
            {"encoder_repetition_penalty": 1.5},
            {"encoder_no_repeat_ngram_size": 2},
            {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 7},
            {"remove_invalid_values": True, "renormalize_logits": True},
            {"prefix_allowed_tokens_fn": lambda row, text: list(range(10 * row, 10 * row + 30))},
            {"logits_processor": LogitsProcessorList([lambda ids, scores: scores.roll(ids.shape[1] % 3, -1)])},
        ),
        ids=lambda options: "-".join(options),
    )
    @pytest.mark.parametrize("rows", (1, 4))
    def test_equals_plain(self, pair, options, rows):
        target, draft = pair
        prompts = tiny.ragged_prompts((5, 17, 9, 2)[:rows])
        call = {**prompts.inputs, **SAMPLE, "do_sample": False, "max_new_tokens": 20, **options}
        plain = target.generate(**call)
        assert torch.equal(target.generate(**call, assistant_model=draft, cactus_delta=1.0), plain)


class TestInputs:
    def test_what_users_hold_for_each_row_meets_that_row(self, pair):
        """Processors and criteria with a tensor [R] or [R, V] of their own, in a batch whose rows part at once."""
        target, draft = pair
        prompts = tiny.ragged_prompts((6, 6, 6))
        bias, limits = 5 * torch.randn(3, tiny.VOCAB), torch.tensor([2, 5, 9])
        options = {
            "logits_processor": LogitsProcessorList([lambda ids, scores: scores + bias]),
            "stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: ids.shape[1] - 6 >= limits]),
        }
        call = {**prompts.inputs, **SAMPLE, "do_sample": False}
        plain = target.generate(**call, logits_processor=options["logits_processor"])
        ours = target.generate(**call, **options, assistant_model=draft, cactus_delta=1.0)
        for row, limit in enumerate(limits.tolist()):
            assert ours[row, : 6 + limit].tolist() == plain[row, : 6 + limit].tolist()
            assert (ours[row, 6 + limit :] == tiny.PAD).all()

    def test_integers_of_other_widths_and_no_limit(self, pair):
        target, draft = pair
        prompts = tiny.ragged_prompts()
        call = {**SAMPLE, "do_sample": False, "assistant_model": draft, "cactus_delta": 1.0}
        expected = target.generate(**prompts.inputs, **call)
        assert torch.equal(
            target.generate(prompts.input_ids.int(), attention_mask=prompts.attention_mask, **call), expected
        )
        end = int(expected[0, -1])
        endless = call | {"max_new_tokens": None, "max_length": int(1e30), "eos_token_id": end}
        row = prompts.row(0)
        assert target.generate(**row.inputs, **endless)[0, -1] == end

    def test_a_checkpoint_that_turns_its_cache_off(self, pair):
        target, draft = pair
        target.generation_config.use_cache = False
        call = {**tiny.ragged_prompts().inputs, **SAMPLE, "do_sample": False}
        plain = target.generate(**call)
        assert torch.equal(target.generate(**call, assistant_model=draft, cactus_delta=1.0), plain)
        assert target.generation_config.use_cache is False
