"""An enabled model under what people do with models: offload, copy, pickle, convert, compile, quantise, subclass."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, pipeline
from transformers.modeling_layers import GradientCheckpointingLayer

import cactus_hf
import tiny
from cactus_hf.generation import SpeculativeMixin


TARGET, DRAFT = tiny.pair("llama")
PROMPTS = tiny.ragged_prompts()
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD}


def enabled(model=TARGET):
    return cactus_hf.enable(copy.deepcopy(model))


def ours(model, draft=DRAFT, prompts=PROMPTS, **options):
    with cactus_hf.track() as calls:
        output = model.generate(**prompts.inputs, assistant_model=draft, cactus_delta=1.0, **GREEDY | options)
    assert len(calls) == 1, "transformers' own code ran"
    return output


def assert_plain(model, draft=DRAFT, plain=None):
    """Greedy text under `model` is that of plain generation with `plain`, for one prompt and for a ragged batch."""
    for prompts in (PROMPTS.row(1), PROMPTS):
        assert torch.equal(ours(model, draft, prompts), (plain or model).generate(**prompts.inputs, **GREEDY))


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
        assert_plain(cactus_hf.enable(target), draft, plain=TARGET)

    @pytest.mark.parametrize("device_map", ("cpu", "auto", {"": "disk"}, {"model": "cpu", "lm_head": "disk"}), ids=str)
    def test_device_map(self, device_map, tmp_path):
        TARGET.save_pretrained(tmp_path / "model")
        target = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
        )
        assert_plain(cactus_hf.enable(target), plain=TARGET)

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


class TestCopies:
    @pytest.mark.parametrize("make", (copy.copy, copy.deepcopy), ids=("copy", "deepcopy"))
    def test_are_enabled(self, make):
        model = enabled()
        clone = make(model)
        assert isinstance(clone, SpeculativeMixin) and clone is not model
        assert (clone.lm_head.weight is model.lm_head.weight) == (make is copy.copy)
        assert_plain(clone)

    @pytest.mark.parametrize("make", (copy.copy, copy.deepcopy), ids=("copy", "deepcopy"))
    @pytest.mark.parametrize("wrap", (lambda m: torch.compile(m, backend="eager"), torch.nn.DataParallel))
    def test_of_a_wrapper_are_wrappers(self, make, wrap):
        wrapper = wrap(enabled())
        assert type(make(wrapper)) is type(wrapper)

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_a_pickle_does_not_need_this_package(self, protocol):
        dump = pickle.dumps(enabled(), protocol)
        assert b"cactus" not in dump
        loaded = pickle.loads(dump)
        assert type(loaded) is type(TARGET)
        assert_plain(cactus_hf.enable(loaded))

    def test_so_another_process_has_to_enable_it_and_is_told(self):
        """`torch.multiprocessing` with spawn pickles the model."""
        context = torch.multiprocessing.get_context("spawn")
        parent, child = context.Pipe()
        process = context.Process(target=_generate_in_child, args=(child, enabled()))
        process.start()
        message = parent.recv() if parent.poll(120) else "no answer"
        process.join()
        assert "cactus_delta" in message


def _generate_in_child(connection, model) -> None:
    try:
        model.generate(torch.tensor([[5, 6]]), assistant_model=model, cactus_delta=1.0, max_new_tokens=2)
    except Exception as error:
        connection.send(str(error))
    else:
        connection.send("generated")


class TestCompiled:
    """One layer and backend eager: what is compiled and how often is the same, without the minutes."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        counters.clear()
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            yield
        torch._dynamo.reset()

    def in_place(self, model):
        model.compile(backend="eager")
        return model

    def forward(self, model):
        model.forward = torch.compile(model.forward, backend="eager")
        return model

    def wrapper(self, model):
        return torch.compile(model, backend="eager")

    @pytest.mark.parametrize(
        ("how", "where"), (("forward", "target"), ("forward", "draft"), ("in_place", "target"), ("wrapper", "target"))
    )
    def test_writes_the_same_and_soon_compiles_nothing_new(self, how, where):
        plain, draft = tiny.pair("llama", num_hidden_layers=1)
        models = {"target": enabled(plain), "draft": copy.deepcopy(draft)}
        models[where] = getattr(self, how)(models[where])
        prompts, few = tiny.ragged_prompts((5, 3)), {"max_new_tokens": 6}
        expected = plain.generate(**prompts.inputs, **GREEDY | few)
        num_graphs = []
        for _ in range(3):
            assert torch.equal(ours(*models.values(), prompts, **few), expected)
            num_graphs.append(counters["stats"]["unique_graphs"])
        assert num_graphs[1] == num_graphs[2] < 8
        # A wrapper around a target compiles calls of itself, and `generate()` is none, here as in plain generation
        assert (num_graphs[0] > 0) == (how != "wrapper")


class TestConversions:
    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64), ids=str)
    @pytest.mark.parametrize("is_draft_converted", (True, False))
    def test_dtype(self, dtype, is_draft_converted):
        draft = copy.deepcopy(DRAFT).to(dtype) if is_draft_converted else DRAFT
        assert_plain(enabled().to(dtype), draft)

    @pytest.mark.parametrize("attention", ("eager", "sdpa"))
    def test_autocast(self, attention):
        target, draft = tiny.pair("llama", attention)
        with torch.autocast("cpu", torch.bfloat16):
            assert_plain(enabled(target), draft)

    def test_inference_mode(self):
        with torch.inference_mode():
            assert_plain(enabled())

    @pytest.mark.parametrize("where", ("target", "draft"))
    def test_gradient_checkpointing_and_train_mode(self, where):
        models = {"target": enabled(), "draft": copy.deepcopy(DRAFT)}
        model = models[where].train()
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:  # transformers 5.17
            model.gradient_checkpointing_enable()
        if "__call__" in vars(GradientCheckpointingLayer):
            with pytest.raises(ValueError, match=f"{where}.*train mode.*eval"):
                ours(*models.values())
            model.eval()
        assert_plain(*models.values(), plain=TARGET)


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


class TestDrafts:
    def test_an_enabled_draft(self):
        assert_plain(enabled(), enabled(DRAFT))

    def test_the_target_itself(self):
        model = enabled()
        assert_plain(model, model)
        sampling = {"do_sample": True, "return_dict_in_generate": True}
        output = model.generate(
            **PROMPTS.inputs, assistant_model=model, cactus_delta=0.0, **GREEDY | sampling
        ).speculation
        assert torch.equal(output.accepted, output.drafted)

    def test_without_a_generation_config(self):
        draft = copy.deepcopy(DRAFT)
        draft.generation_config = None
        assert_plain(enabled(), draft)


class Counts(type(TARGET)):
    def generate(self, *args, **kwargs):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return super().generate(*args, **kwargs)


class PassesOn(type(TARGET)):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class ForgetsPositions(type(TARGET)):
    def forward(self, input_ids=None, attention_mask=None, cache=None, past_key_values=None, **kwargs):
        kwargs |= {name: value for name, value in (("cache", cache), ("past_key_values", past_key_values)) if value}
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class TestSubclasses:
    def build(self, cls):
        model = cls(TARGET.config).eval()
        model.load_state_dict(TARGET.state_dict())
        return cactus_hf.enable(model)

    def test_that_override_generate(self):
        model = self.build(Counts)
        assert_plain(model, plain=TARGET)
        assert model.num_calls == 2

    @pytest.mark.parametrize("cls", (PassesOn, ForgetsPositions))
    def test_whose_forward_hides_arguments_are_refused(self, cls):
        with pytest.raises(ValueError, match=f"target, {cls.__name__}.*position_ids.*signature"):
            ours(self.build(cls))
        with pytest.raises(ValueError, match="draft.*position_ids.*signature"):
            ours(enabled(), self.build(cls))

    def test_a_wrapped_forward_keeps_its_signature(self):
        model = enabled()
        forward = model.forward
        model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
        with pytest.raises(ValueError, match="attention_mask, position_ids.*signature"):
            ours(model)
        model.forward = functools.wraps(forward)(model.forward)
        assert_plain(model)


class TestSaving:
    @pytest.mark.parametrize("delta", (0.5, [0.0, 0.5, 1.0, 2.0]), ids=str)
    def test_a_delta_comes_back_each_time(self, delta, tmp_path):
        model = enabled()
        model.generation_config.cactus_delta = delta
        for turn in ("first", "second"):
            model.save_pretrained(tmp_path / turn)
            model = cactus_hf.enable(AutoModelForCausalLM.from_pretrained(tmp_path / turn))
            assert model.generation_config.cactus_delta == delta
        sampling = {"do_sample": True, "return_dict_in_generate": True}
        stats = model.generate(**PROMPTS.inputs, assistant_model=DRAFT, **GREEDY | sampling).speculation
        assert stats.ball_kl > 0


class TestTrainer:
    def test_predict_with_generate(self, tmp_path):
        from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

        arguments = Seq2SeqTrainingArguments(
            str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=2, report_to=[], use_cpu=True
        )
        data = [{"input_ids": row} for row in ([5, 6, 7], [8, 9, 10], [11, 12, 13])]
        predictions = []
        for options in ({}, {"assistant_model": DRAFT, "cactus_delta": 1.0}):
            with cactus_hf.track() as calls:
                trainer = Seq2SeqTrainer(enabled(), arguments)
                predictions.append(trainer.predict(data, max_new_tokens=6, do_sample=False, **options).predictions)
            assert len(calls) == (2 if options else 0)
        assert (predictions[0] == predictions[1]).all()
