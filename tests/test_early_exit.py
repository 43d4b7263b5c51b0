"""A model's own first layers as its draft."""

from __future__ import annotations

import copy

import laws
import pytest
import torch

import cactus_hf
import tiny
from cactus_hf.early_exit import check_early_exit, first_layers


# Of every kind: fused and plain names, windows, learned positions, experts, shared states, embeddings for each layer
NAMES = (
    "llama gemma3 gpt2 gpt_neox opt falcon qwen3_moe deepseek_v3 llama4 biogpt bloom dory gemma3n_text gemma4_text "
    "modernbert-decoder"
)
FAMILIES = [name for name in NAMES.split() if tiny.ARCHITECTURES[name].exists]
OPTIONS = {"eos_token_id": None, "pad_token_id": tiny.PAD, "num_assistant_tokens": 3}


def enabled(model):
    return cactus_hf.enable(copy.copy(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_left_as_it_is(name):
    model = tiny.ARCHITECTURES[name].build()
    config, states = model.config.to_dict(), model.state_dict()
    modules = dict(model.named_modules())
    short = first_layers(model, 1)
    assert model.config.to_dict() == config and dict(model.named_modules()) == modules
    assert all(torch.equal(value, states[key]) for key, value in model.state_dict().items())
    parameters = set(model.parameters())
    assert all(parameter in parameters for parameter in short.parameters()), "all parameters are shared"
    assert short.config.get_text_config(decoder=True).num_hidden_layers == 1
    assert sum(1 for _ in short.parameters()) < len(parameters)


@pytest.mark.parametrize(("name", "num_layers"), (("llama", 1), ("gemma3", 1), ("gemma3", 2)))
@torch.no_grad()
def test_its_logits_are_those_of_an_early_exit(name, num_layers):
    model = tiny.model(name)
    text = tiny.ragged_prompts((21,)).input_ids
    hidden = model(text, output_hidden_states=True).hidden_states[num_layers]
    torch.testing.assert_close(first_layers(model, num_layers)(text).logits, model.lm_head(model.model.norm(hidden)))


@pytest.mark.filterwarnings("ignore:The rows of this batch are decoded one after another")
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_texts_equal_plain_ones(name):
    model = tiny.model(name)
    prompts = tiny.ragged_prompts()
    output = enabled(model).generate(
        **prompts.inputs, assistant_early_exit=1, cactus_delta=1.0, do_sample=False, max_new_tokens=16, **OPTIONS
    )
    plain = tiny.plain_greedy(model, prompts, 16)
    assert output[:, 17:].tolist() == torch.stack(plain).tolist()


@pytest.mark.parametrize("rule", (cactus_hf.Cactus(0.0), cactus_hf.Cactus(0.5)), ids=repr)
def test_it_samples_the_law_of_its_rounds(rule):
    model = tiny.vocabulary8(0, dtype=torch.float64)

    def draft(text: list[int]) -> torch.Tensor:
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[1]
        return model.lm_head(model.model.norm(hidden))[0, -1].softmax(-1)

    counts = laws.frequencies(
        enabled(tiny.vocabulary8(0)), 30, assistant_early_exit=1, acceptance_rule=rule, num_assistant_tokens=2
    )
    laws.assert_follows(counts, laws.exact(laws.law_of(model), draft, rule, 2))


class TestWrappers:
    """What stands around a model's forward pass was made for the whole model."""

    def assert_exits_early(self, model) -> None:
        text = tiny.ragged_prompts((9,)).input_ids
        expected = first_layers(tiny.model("llama"), 1)(text).logits
        torch.testing.assert_close(first_layers(model, 1)(text).logits, expected)
        assert not torch.allclose(model(text).logits, expected)

    def test_enabled(self):
        self.assert_exits_early(enabled(tiny.model("llama")))

    def test_a_forward_of_the_object(self):
        model = copy.deepcopy(tiny.model("llama"))
        for module in (model, model.model):
            module.forward = module.forward  # as `model.forward = torch.compile(model.forward)` leaves it
        self.assert_exits_early(model)

    def test_compiled_in_place(self):
        model = copy.deepcopy(tiny.model("llama"))
        model.compile(backend="eager")
        self.assert_exits_early(model)

    def test_offloaded(self):
        accelerate = pytest.importorskip("accelerate")
        model = accelerate.cpu_offload(copy.deepcopy(tiny.model("llama")), execution_device="cpu")
        self.assert_exits_early(model)

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 asks for it
    def test_peft(self):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(copy.deepcopy(tiny.model("llama")), config)
        prompts = tiny.ragged_prompts()
        options = {"do_sample": False, "max_new_tokens": 12, **OPTIONS}
        plain = [model.generate(**prompts.row(i).inputs, **options)[0, -12:].tolist() for i in range(4)]
        cactus_hf.enable(model)
        output = model.generate(**prompts.inputs, assistant_early_exit=1, cactus_delta=1.0, **options)
        assert output[:, 17:].tolist() == plain


@pytest.mark.parametrize(
    ("num_layers", "error", "words"),
    (
        (0, ValueError, "assistant_early_exit=0.*2 layers.*1 to 1"),
        (2, ValueError, "assistant_early_exit=2.*2 layers.*1 to 1"),
        (-1, ValueError, "assistant_early_exit=-1.*from 1 to 1"),
        (1.0, TypeError, "number of layers.*1.0"),
        (True, TypeError, "number of layers.*True"),
    ),
)
def test_numbers_that_are_refused(num_layers, error, words):
    with pytest.raises(error, match=words):
        enabled(tiny.model("llama")).generate(
            torch.tensor([[5, 6]]), assistant_early_exit=num_layers, cactus_delta=1.0, max_new_tokens=3
        )


def test_layers_without_attention():
    with pytest.raises(ValueError, match="assistant_early_exit=1.*without a layer of attention.*larger"):
        check_early_exit(tiny.model("bamba"), 1)


def test_a_model_without_a_list_of_layers():
    model = copy.deepcopy(tiny.model("llama"))
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(ValueError, match="form one list, which LlamaForCausalLM is not.*assistant_model"):
        check_early_exit(model, 1)
