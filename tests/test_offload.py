"""Models that accelerate spreads: its hooks fetch weights from elsewhere than where the model runs."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

import cactus_hf
import tiny
from against_plain import DRAFT, TARGET, assert_plain, enabled, ours


class TestAccelerate:
    """Weights elsewhere than where the model runs: accelerate's hooks fetch them."""

    accelerate = pytest.importorskip("accelerate")

    def offload(self, model, kind, folder):
        model = copy.deepcopy(model)
        if kind == "disk":
            self.accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
        elif kind == "cpu":
            self.accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
            places = parts | {"model.layers.0": "cpu", "model.layers.1": "disk"}
            self.accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)
        return model

    @pytest.mark.parametrize("where", ("target", "draft", "both"))
    @pytest.mark.parametrize("kind", ("disk", "cpu", "one layer"))
    def test_offloaded(self, kind, where, tmp_path):
        target = self.offload(TARGET, kind, tmp_path / "target") if where != "draft" else copy.deepcopy(TARGET)
        draft = self.offload(DRAFT, kind, tmp_path / "draft") if where != "target" else DRAFT
        assert any(parameter.is_meta for model in (target, draft) for parameter in model.parameters())
        assert_plain(cactus_hf.enable(target), draft, like=TARGET)

    @pytest.mark.parametrize("device_map", ("cpu", "auto", {"": "disk"}, {"model": "cpu", "lm_head": "disk"}), ids=str)
    def test_device_map(self, device_map, tmp_path):
        TARGET.save_pretrained(tmp_path / "model")
        target = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
        )
        assert_plain(cactus_hf.enable(target), like=TARGET)

    def test_a_draft_that_is_nowhere_is_refused(self):
        with pytest.raises(ValueError, match="draft.*meta device.*device_map"):
            ours(enabled(), copy.deepcopy(DRAFT).to("meta"))

    def test_a_pipeline_loads_a_draft_to_nowhere(self, tmp_path):
        """Beside an offloaded model, as it moves the draft to `model.device`."""
        DRAFT.save_pretrained(tmp_path / "draft")
        tiny.word_tokenizer().save_pretrained(tmp_path / "draft")
        TARGET.save_pretrained(tmp_path / "target")
        target = AutoModelForCausalLM.from_pretrained(
            tmp_path / "target", device_map={"lm_head": "cpu", "model": "disk"}, offload_folder=tmp_path / "offload"
        )
        parts = {"model": cactus_hf.enable(target), "tokenizer": tiny.word_tokenizer()}
        pipe = pipeline("text-generation", **parts, assistant_model=str(tmp_path / "draft"))
        with pytest.raises(ValueError, match="draft.*meta device.*pass the loaded draft"):
            pipe("w5 w6", cactus_delta=1.0, max_new_tokens=4)
        pipe = pipeline("text-generation", **parts, assistant_model=DRAFT)
        assert pipe("w5 w6", cactus_delta=1.0, max_new_tokens=4)
