"""Linear layers computed by oneDNN: the values, what becomes of the weights, and the way back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from linears import IDS, OWN, TIED, assert_same_weights
from torch import nn
from transformers import AutoModelForCausalLM

import cactus_hf
import tiny
from against_plain import DRAFT, TARGET, assert_plain, enabled, plain
from cactus_hf import packed_layers
from cactus_hf.packed_layers import PackedLinear


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs torch with oneDNN")


def num_packed(model: nn.Module) -> int:
    return sum(parameter.is_mkldnn for parameter in model.parameters())


def num_linears(model: nn.Module) -> int:
    return sum(type(module) is nn.Linear for module in model.modules())


def packed(model: nn.Module) -> nn.Module:
    return cactus_hf.pack_linears(copy.deepcopy(model))


@torch.no_grad()
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("num_rows", (0, 1, 2, 5, 8, 33))
def test_values_are_the_ordinary_layers_up_to_rounding(num_rows, bias):
    torch.manual_seed(0)
    layer = nn.Linear(300, 50, bias)
    inputs = torch.randn(2, num_rows, 300)
    # Sums of 300 terms of size 1/17 in another order: errors of some 1e-7 each
    torch.testing.assert_close(packed(layer)(inputs), layer(inputs), rtol=0, atol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("shape", ((1,), (1, 1), (2, 1), (1, 3), (0,), ()))
def test_few_rows_are_padded(shape, monkeypatch):
    monkeypatch.setattr(packed_layers, "PADDED_SIZE", 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    seen, inner_product = [], packed_layers.inner_product
    monkeypatch.setattr(
        packed_layers, "inner_product", lambda rows, *rest: (seen.append(rows), inner_product(rows, *rest))[1]
    )
    layer, inputs = nn.Linear(30, 5), torch.randn(*shape, 30)
    torch.testing.assert_close(packed(layer)(inputs), layer(inputs), rtol=0, atol=1e-6)  # rounding
    assert [rows.numel() // 30 for rows in seen] == ([0] if 0 in shape else [4])


@torch.no_grad()
def test_inputs_may_be_views():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    for inputs in (
        torch.randn(6),
        torch.randn(6, 3).T,
        torch.randn(2, 4, 12)[..., ::2],
        torch.randn(1, 6).expand(3, 6),
    ):
        torch.testing.assert_close(packed(layer)(inputs), layer(inputs), rtol=0, atol=1e-6)  # rounding


@torch.no_grad()
def test_oneDNN_is_what_computes(monkeypatch):
    """All of the layers, and none of them after `unpack_linears`."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cactus_hf.pack_linears(layers)
    monkeypatch.setattr(nn.functional, "linear", lambda *_: pytest.fail("the ordinary product"))
    layers(torch.randn(3, 4))
    monkeypatch.undo()
    cactus_hf.unpack_linears(layers)
    assert [type(layer) for layer in layers] == [nn.Linear] * 2 and num_packed(layers) == 0


@pytest.mark.parametrize("name", ("llama", "qwen2", "gemma2", "gpt2", "opt", "qwen3_moe", "cohere", "deepseek_v3"))
def test_greedy_text_is_plain(name):
    """Target and draft packed; projections with a bias, GPT-2's own class of layers, experts in one tensor."""
    target, draft = tiny.pair(name)
    texts = enabled(packed(target)), packed(draft)
    assert_plain(*texts, like=target)
    assert torch.equal(plain(texts[0]), plain(target))


def test_tied_head_is_left_where_it_is():
    model = packed(TIED)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert num_packed(model) == num_linears(TIED) - 1 and isinstance(model.lm_head, PackedLinear)
    assert_plain(cactus_hf.enable(model), like=TIED)


def test_what_a_model_says_of_itself_stays():
    model = packed(TARGET)
    assert (model.device, model.dtype) == (TARGET.device, TARGET.dtype)
    assert model.num_parameters() == TARGET.num_parameters()
    assert model.get_memory_footprint() == TARGET.get_memory_footprint()


def test_packing_twice_and_unpacking():
    model = packed(TARGET)
    assert cactus_hf.pack_linears(model) is model and num_packed(model) == num_linears(TARGET)
    assert cactus_hf.unpack_linears(model) is model
    assert [type(each) for each in model.modules()] == [type(each) for each in TARGET.modules()]
    assert_same_weights(model, TARGET)
    assert all(parameter.requires_grad for parameter in model.parameters())
    cactus_hf.unpack_linears(model)  # nothing is left to do


@pytest.mark.parametrize("original", (TARGET, TIED), ids=("own head", "tied head"))
def test_saving_and_loading(original, tmp_path):
    packed(original).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.lm_head) is nn.Linear
    assert_same_weights(loaded, original)


@pytest.mark.parametrize(
    "make", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))), ids=("copy", "pickle")
)
@pytest.mark.parametrize("original", (OWN, TIED), ids=("own head", "tied head"))
def test_copies_are_packed(make, original):
    model = packed(original)
    made = make(model)
    assert num_packed(made) == num_packed(model) > 0
    assert_same_weights(made, original)
    assert_plain(enabled(made), like=original)


def test_another_precision_makes_ordinary_layers():
    model = packed(TARGET).to("cpu").float()
    assert num_packed(model) == num_linears(TARGET), "nothing changed"
    assert num_linears(model.double()) == num_linears(TARGET)
    assert_same_weights(model, copy.deepcopy(TARGET).double())
    with pytest.raises(ValueError, match="float64 on cpu"):
        cactus_hf.pack_linears(model)
    assert num_linears(packed(TARGET).to("meta")) == num_linears(TARGET)


@torch.no_grad()
def test_bfloat16():
    model = copy.deepcopy(TARGET).bfloat16()
    if not PackedLinear.takes(model.lm_head.weight):
        pytest.skip("a CPU without bfloat16")
    logits, expected = packed(model)(IDS).logits, model(IDS).logits
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, expected)  # sums are in float32 before they are rounded, here as there


def test_gradients_are_the_ordinary_layers():
    model, original = packed(TIED), copy.deepcopy(TIED)
    for each in (model, original):
        each(IDS, labels=IDS).loss.backward()
    gradients = {name: parameter.grad.to_dense() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, {name: p.grad for name, p in original.named_parameters()})


@torch.no_grad()
def test_autocast_is_the_ordinary_layers():
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(packed(TARGET)(IDS).logits, TARGET(IDS).logits)


@torch.no_grad()
def test_compiled():
    model = packed(TARGET)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(IDS).logits, TARGET(IDS).logits)


def test_a_wrong_width_is_refused_as_ever():
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        packed(nn.Linear(4, 3))(torch.randn(2, 5))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT 0.21 asks for it
def test_peft():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(TARGET), config)
    model = cactus_hf.pack_linears(copy.deepcopy(adapted))
    assert num_packed(model) > num_linears(TARGET)
    assert_plain(cactus_hf.enable(model), like=adapted)
    with pytest.raises(RuntimeError):
        model.merge_and_unload()
    cactus_hf.unpack_linears(model)
    assert_same_weights(model.merge_and_unload(), adapted.merge_and_unload())


class TestErrors:
    def test_nothing_to_pack(self):
        with pytest.raises(ValueError, match="are none"):
            cactus_hf.pack_linears(nn.Embedding(3, 2))
        with pytest.raises(ValueError, match="1 with torch.float32 on meta"):
            cactus_hf.pack_linears(nn.Linear(3, 2, device="meta"))

    def test_offloaded(self):
        accelerate = pytest.importorskip("accelerate")
        model = accelerate.cpu_offload(copy.deepcopy(TARGET), torch.device("cpu"))
        with pytest.raises(ValueError, match="offload"):
            cactus_hf.pack_linears(model)

    def test_without_oneDNN(self, monkeypatch):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        with pytest.raises(ValueError, match="without oneDNN"):
            packed(TARGET)

    @pytest.mark.parametrize("function", (cactus_hf.pack_linears, cactus_hf.unpack_linears))
    def test_no_model(self, function):
        with pytest.raises(TypeError, match="got str"):
            function("a model")


def test_draft_and_target_apart():
    """A packed draft next to an ordinary target, and the other way round."""
    assert_plain(enabled(), packed(DRAFT))
    assert_plain(enabled(packed(TARGET)), DRAFT, like=TARGET)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64))
def test_a_tied_head_may_be_cast_by_the_embedding(dtype: torch.dtype) -> None:
    model = packed(TIED).to(dtype)
    with torch.no_grad():
        logits = model(IDS).logits
        expected = copy.deepcopy(TIED).to(dtype)(IDS).logits
    assert logits.dtype == dtype
    torch.testing.assert_close(logits, expected, atol=1e-2, rtol=1e-2)
