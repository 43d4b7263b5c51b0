"""Quantised models as target and draft."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import cactus_hf
import tiny
from against_plain import DRAFT, PROMPTS, TARGET, assert_plain, enabled, ours


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning", "ignore:torch.quantize_per:UserWarning")
class TestQuantised:
    def test_torchs_dynamic_draft(self):
        draft = torch.ao.quantization.quantize_dynamic(copy.deepcopy(DRAFT), {torch.nn.Linear})
        assert_plain(enabled(), draft)

    def test_torchs_dynamic_target(self):
        """Its activations share one scale, so that logits depend on what else is in a pass: compared up to that."""
        target = torch.ao.quantization.quantize_dynamic(enabled(), {torch.nn.Linear})
        text = ours(target, prompts=PROMPTS.row(1))
        logits = target(text).logits[:, PROMPTS.row(1).input_ids.shape[1] - 1 : -1]
        chosen = logits.gather(-1, text[:, -logits.shape[1] :, None])[..., 0]
        assert (logits.amax(-1) - chosen).max() < tiny.LOGIT_SCALE / 2  # a random token trails by 2.5 scales

    @pytest.mark.filterwarnings("ignore")  # torchao's own, of the extensions it cannot load here
    @pytest.mark.parametrize("where", ("target", "draft", "both"))
    @pytest.mark.parametrize("kind", ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"))
    def test_torchao(self, kind, where):
        quantization = pytest.importorskip("torchao.quantization")
        models = {"target": enabled(), "draft": copy.deepcopy(DRAFT)}
        for role, model in models.items():
            if where in (role, "both"):
                quantization.quantize_(model, getattr(quantization, kind)())
        assert_plain(*models.values())

    @pytest.mark.filterwarnings("ignore")
    def test_torchao_while_loading(self, tmp_path):
        quantization = pytest.importorskip("torchao.quantization")
        from transformers import TorchAoConfig

        TARGET.save_pretrained(tmp_path)
        config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
        target = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
        assert_plain(cactus_hf.enable(target))

    @pytest.mark.parametrize("where", ("target", "draft"))
    @pytest.mark.parametrize("bits", (4, 8))
    def test_bitsandbytes(self, bits, where, tmp_path):
        pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig

        target, draft = tiny.pair("llama", hidden_size=64, intermediate_size=128)  # 4 bits come in blocks of 64
        target.save_pretrained(tmp_path)
        config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
        quantised = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
        models = {"target": enabled(target), "draft": draft, where: cactus_hf.enable(quantised)}
        assert_plain(*models.values())
