"""PEFT adapters on the target, the draft or both; PEFT's own `generate()` around an enabled model."""

from __future__ import annotations

import copy

import pytest
import torch

import cactus_hf
from against_plain import DRAFT, GREEDY, PROMPTS, TARGET, assert_plain, ours, plain


peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT 0.21 asks for it


def lora(model, seed=0, modules=("q_proj", "v_proj", "up_proj")):
    """`model`'s copy under a LoRA adapter that changes its text."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=list(modules))
    torch.manual_seed(seed)
    return peft.get_peft_model(copy.deepcopy(model), config).eval()


class TestLora:
    def test_the_adapter_changes_the_text(self):
        assert not torch.equal(plain(lora(TARGET)), plain(TARGET))

    @pytest.mark.parametrize("where", ("target", "draft", "both"))
    def test_on(self, where):
        target = lora(TARGET) if where != "draft" else copy.deepcopy(TARGET)
        draft = lora(DRAFT, seed=1) if where != "target" else DRAFT
        assert_plain(cactus_hf.enable(target), draft)

    def test_the_drafts_adapter_is_in_force(self):
        model = cactus_hf.enable(lora(TARGET))
        rates = []
        for draft in (copy.deepcopy(model), TARGET):
            output = ours(model, draft, return_dict_in_generate=True)
            rates.append(output.speculation.accepted.sum() / output.speculation.drafted.sum())
        assert rates[0] == 1 > rates[1]

    def test_enabled_before_the_adapter_came(self):
        model = peft.get_peft_model(
            cactus_hf.enable(copy.deepcopy(TARGET)),
            peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj"]),
        )
        assert_plain(model.eval())

    def test_an_enabled_draft(self):
        assert_plain(cactus_hf.enable(lora(TARGET)), cactus_hf.enable(lora(DRAFT)))

    def test_merged(self):
        model = cactus_hf.enable(lora(TARGET))
        before = plain(model)
        merged = model.merge_and_unload()
        assert_plain(merged)
        assert torch.equal(ours(merged), before)

    def test_disabled_and_switched_adapters(self):
        model = cactus_hf.enable(lora(TARGET))
        model.add_adapter("second", lora(TARGET, 1, ["k_proj"]).peft_config["default"])
        texts = {}
        for name in ("default", "second", "default"):
            model.set_adapter(name)
            model.eval()
            assert_plain(model)
            assert torch.equal(texts.setdefault(name, plain(model)), plain(model))
        assert not torch.equal(texts["default"], texts["second"])
        with model.disable_adapter():
            assert torch.equal(ours(model), plain(TARGET))

    def test_a_copy_of_the_wrapper_is_a_wrapper(self):
        model = cactus_hf.enable(lora(TARGET))
        clone = copy.deepcopy(model)
        assert type(clone) is type(model)
        clone.get_base_model().lm_head.weight.data.zero_()
        assert_plain(model)

    def test_a_delta_in_the_generation_config_of_the_wrapper(self):
        model = cactus_hf.enable(lora(TARGET))
        model.generation_config.cactus_delta = 0.5
        sampling = GREEDY | {"do_sample": True, "return_dict_in_generate": True}
        assert model.generate(**PROMPTS.inputs, assistant_model=DRAFT, **sampling).speculation.ball_kl > 0


class TestOtherAdapters:
    @pytest.mark.parametrize(
        ("kind", "options"),
        (
            ("IA3Config", {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
            ("LoHaConfig", {"target_modules": ["q_proj"], "init_weights": False}),
            ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 1}),
        ),
    )
    def test_those_that_change_layers(self, kind, options):
        model = peft.get_peft_model(
            copy.deepcopy(TARGET), getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        ).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter)
        assert not torch.equal(plain(model), plain(TARGET))
        assert_plain(cactus_hf.enable(model))

    @pytest.mark.parametrize("kind", ("PromptTuningConfig", "PrefixTuningConfig"))
    def test_virtual_tokens_are_refused(self, kind):
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = cactus_hf.enable(peft.get_peft_model(copy.deepcopy(TARGET), config).eval())
        before = plain(model)
        with pytest.raises(ValueError, match="target.*virtual tokens.*LoRA"):
            ours(model)
        with pytest.raises(ValueError, match="draft.*virtual tokens"):
            ours(cactus_hf.enable(copy.deepcopy(TARGET)), model)
        assert torch.equal(plain(model), before)
        with model.disable_adapter():
            assert torch.equal(ours(model), plain(TARGET))

    def test_adapters_that_wait_for_tokens_are_refused(self):
        options = {"target_modules": ["q_proj"], "alora_invocation_tokens": PROMPTS.row(1).input_ids[0, -2:].tolist()}
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        model = cactus_hf.enable(peft.get_peft_model(copy.deepcopy(TARGET), config).eval())
        with pytest.raises(ValueError, match="aLoRA"):
            ours(model, prompts=PROMPTS.row(1))

    def test_an_adapter_for_each_row_is_refused_and_forgotten(self):
        model = cactus_hf.enable(lora(TARGET))
        before = plain(model)
        names = ["default", "__base__", "default", "__base__"]
        assert not torch.equal(model.generate(**PROMPTS.inputs, **GREEDY, adapter_names=names), before)
        with pytest.raises(ValueError, match="adapter_names.*set_adapter"):
            ours(model, adapter_names=names)
        assert torch.equal(plain(model), before)
        assert_plain(model)
