"""`pack_linears(model, torch.float16)`: values, what becomes of the weights, and what is refused."""

from __future__ import annotations

import argparse
import copy
import pickle

import pytest
import torch
from linears import IDS, OWN, TIED, assert_same_weights
from torch import nn
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import cactus_hf
import tiny
from against_plain import DRAFT, TARGET, assert_plain, enabled, plain
from cactus_hf import arguments, cli, pairs
from cactus_hf.packed_layers import HalfLinear, PackedLinear, missing_fbgemm


pytestmark = pytest.mark.skipif(missing_fbgemm() is not None, reason="needs torch with FBGEMM")


def halved(model: nn.Module) -> nn.Module:
    return cactus_hf.pack_linears(copy.deepcopy(model), torch.float16)


def rounded(model: nn.Module) -> nn.Module:
    """A copy of ordinary layers with the weights of its linear layers rounded, but for those that others share."""
    model = copy.deepcopy(model)
    embedding = model.get_input_embeddings().weight if hasattr(model, "get_input_embeddings") else None
    for module in model.modules():
        if type(module) is nn.Linear and module.weight is not embedding:
            module.weight.data = module.weight.data.half().float()
    return model


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules() if isinstance(module, nn.Linear)]


@torch.no_grad()
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("num_rows", (0, 1, 2, 5, 8, 33))
def test_values_are_those_of_rounded_weights(num_rows, bias):
    torch.manual_seed(0)
    layer = nn.Linear(300, 50, bias)
    inputs = torch.randn(2, num_rows, 300)
    outputs = halved(layer)(inputs)
    assert outputs.dtype == torch.float32
    # Sums of 300 terms of size 1/17 in another order: errors of some 1e-7 each. Rounding of weights makes 1e-3
    torch.testing.assert_close(outputs, rounded(layer)(inputs), rtol=0, atol=2e-6)
    assert num_rows == 0 or (outputs - layer(inputs)).abs().max() > 1e-5


@torch.no_grad()
def test_inputs_may_be_views():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    views = torch.randn(6, 3).T, torch.randn(2, 4, 12)[..., ::2], torch.randn(1, 6).expand(3, 6)
    for inputs in (torch.randn(6), torch.randn(0, 6), torch.randn(2, 0, 6), *views):
        torch.testing.assert_close(halved(layer)(inputs), rounded(layer)(inputs), rtol=0, atol=1e-6)  # rounding
    wrong = nn.Linear(4, 3), torch.randn(2, 5)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        halved(wrong[0])(wrong[1])


@torch.no_grad()
def test_FBGEMM_is_what_computes(monkeypatch):
    model = halved(TIED)
    assert set(kinds(model)) == {HalfLinear}
    expected = model(IDS).logits
    monkeypatch.setattr(nn.functional, "linear", lambda *_: pytest.fail("the ordinary product"))
    assert torch.equal(model(IDS).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("original", (TARGET, TIED), ids=("own head", "tied head"))
def test_the_law_hardly_changes(original):
    laws = [model(IDS).logits.double().softmax(-1) for model in (original, halved(original), in_bfloat16(original))]
    lost, lost_in_bfloat16 = (1 - torch.minimum(laws[0], law).sum(-1).mean() for law in laws[1:])
    # float16 rounds a weight by up to 2^-12 of it, bfloat16 by 2^-9, and activations too
    assert 0 < lost < lost_in_bfloat16 / 4


def in_bfloat16(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).bfloat16()


@pytest.mark.parametrize("name", ("llama", "qwen2", "gpt2", "opt", "qwen3_moe"))
def test_the_text_is_that_of_rounded_weights(name):
    """Projections with a bias, GPT-2's own class of layers, experts in one tensor."""
    target, draft = tiny.pair(name)
    assert_plain(enabled(halved(target)), halved(draft), like=rounded(target))


@torch.no_grad()
def test_a_model_that_looks_at_its_weights():
    """T5 casts what its layers read to the dtype of their weights."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=tiny.VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).eval()
    logits = [each(input_ids=IDS, decoder_input_ids=IDS).logits for each in (halved(model), rounded(model))]
    assert HalfLinear in kinds(halved(model))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)  # its tied head is not rounded in the second


def test_a_draft_may_be_rounded():
    """Greedily, at delta 0, the text is the target's own."""
    draft = halved(DRAFT)
    assert set(kinds(draft)) == {HalfLinear}
    assert_plain(enabled(), draft)
    model = cactus_hf.enable(copy.deepcopy(TARGET))
    texts = model.generate(IDS[:1], assistant_model=draft, cactus_delta=0.0, do_sample=False, max_new_tokens=20)
    assert torch.equal(texts, TARGET.generate(IDS[:1], do_sample=False, max_new_tokens=20))
    assert_plain(enabled(cactus_hf.pack_linears(copy.deepcopy(TARGET))), draft, like=TARGET)


def test_unpacking_gives_the_rounded_weights():
    model = halved(OWN)
    assert cactus_hf.unpack_linears(model) is model
    assert set(kinds(model)) == {nn.Linear}
    assert_same_weights(model, rounded(OWN))
    assert all(parameter.requires_grad for parameter in model.parameters())
    extras = set(vars(model.lm_head)) - set(vars(nn.Linear(1, 1)))
    assert not extras - set(vars(OWN.lm_head))
    assert_same_weights(cactus_hf.unpack_linears(halved(model)), model)  # float16's numbers come back bit by bit


def test_a_tied_head_reads_its_own_copy():
    model = halved(TIED)
    embedding = model.model.embed_tokens.weight
    assert model.lm_head.weight is embedding and torch.equal(embedding, TIED.lm_head.weight)
    with torch.no_grad():
        states = torch.randn(3, embedding.shape[1])
        torch.testing.assert_close(model.lm_head(states), states @ embedding.half().float().T)
        embedding.zero_()
        assert not model.lm_head(states).any(), "changed weights are not overlooked"


@torch.no_grad()
def test_another_weight_in_place_of_the_packed_one():
    layer = halved(nn.Linear(3, 2, bias=False))
    layer.weight = nn.Parameter(torch.ones(2, 3))
    assert layer(torch.ones(3)).tolist() == [3, 3]
    assert cactus_hf.unpack_linears(layer).weight.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_what_a_model_says_of_itself_stays():
    model = halved(TARGET)
    assert (model.device, model.dtype) == (TARGET.device, TARGET.dtype)
    assert model.num_parameters() == TARGET.num_parameters()


def test_packing_otherwise():
    model = cactus_hf.pack_linears(cactus_hf.pack_linears(copy.deepcopy(OWN)), torch.float16)
    assert set(kinds(model)) == {HalfLinear}
    for again in (torch.float16, None):
        cactus_hf.pack_linears(model, again)
        assert set(kinds(model)) == {HalfLinear}
    assert_same_weights(cactus_hf.unpack_linears(model), rounded(OWN))
    assert set(kinds(cactus_hf.pack_linears(model))) == {PackedLinear}


@pytest.mark.parametrize("original", (OWN, TIED), ids=("own head", "tied head"))
def test_saving_and_loading(original, tmp_path):
    model = halved(original)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(kinds(loaded)) == {nn.Linear}
    assert_same_weights(loaded, rounded(original))
    assert_same_weights(model, rounded(original))
    if original is OWN:
        with pytest.raises(RuntimeError, match="lm_head"):
            model.load_state_dict(OWN.state_dict())


@pytest.mark.parametrize(
    "make", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))), ids=("copy", "pickle")
)
@pytest.mark.parametrize("original", (OWN, TIED), ids=("own head", "tied head"))
def test_copies_are_packed(make, original, monkeypatch):
    model = halved(original)
    made = make(model)
    assert kinds(made) == kinds(model)
    assert_same_weights(made, rounded(original))
    with torch.no_grad():
        assert torch.equal(made(IDS).logits, model(IDS).logits)
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == (original is TIED)
    assert_same_weights(cactus_hf.unpack_linears(made), rounded(original))
    assert all(parameter.requires_grad for parameter in made.parameters())
    monkeypatch.setattr(torch.backends.quantized, "engine", "onednn")
    assert set(kinds(make(model))) == {nn.Linear}


@pytest.mark.parametrize("original", (OWN, TIED), ids=("own head", "tied head"))
def test_another_precision_makes_ordinary_layers(original):
    model = halved(original).to("cpu").float()
    assert set(kinds(model)) == {HalfLinear}, "nothing changed"
    assert set(kinds(model.bfloat16())) == {nn.Linear}
    assert_same_weights(model, rounded(original).bfloat16())
    assert set(kinds(halved(original).to("meta"))) == {nn.Linear}
    with pytest.raises(ValueError, match=r"torch.bfloat16 on cpu. `weight_dtype` is for float32 layers"):
        cactus_hf.pack_linears(model, torch.float16)


def test_gradients_pass_through():
    """To what lies below; weights in float16 have none."""
    model, expected = halved(OWN), rounded(OWN)
    for each in (model, expected):
        each(IDS, labels=IDS).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    own = {name for name, _ in OWN.named_parameters() if "norm" in name or "embed" in name}
    assert gradients.keys() == own
    torch.testing.assert_close(gradients, {name: p.grad for name, p in expected.named_parameters() if name in own})
    torch.optim.AdamW(model.parameters(), lr=1.0, fused=True).step()
    assert torch.equal(model.state_dict()["lm_head.weight"], expected.lm_head.weight)


@pytest.mark.parametrize("pack", (cactus_hf.pack_linears, halved), ids=("as it is", "float16"))
def test_a_bias_may_be_trained_alone(pack):
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    layer = pack(layer)
    layer(torch.ones(4, 3)).sum().backward()
    assert layer.bias.grad.tolist() == [4, 4]


@torch.no_grad()
def test_autocast_is_the_ordinary_layers():
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(halved(OWN)(IDS).logits, rounded(OWN)(IDS).logits)


@torch.no_grad()
def test_compiled():
    compiled = torch.compile(halved(TARGET), backend="eager")
    torch.testing.assert_close(compiled(IDS).logits, rounded(TARGET)(IDS).logits)


def test_trimmed():
    trimmed = cactus_hf.trim_draft(copy.deepcopy(DRAFT), list(range(4, 30)))
    assert_plain(enabled(), cactus_hf.pack_linears(trimmed, torch.float16))
    with pytest.raises(ValueError, match="before it is packed"):
        cactus_hf.trim_draft(halved(DRAFT), [4, 5])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT 0.21 asks for it
def test_peft():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(TARGET), config)
    model = halved(adapted)
    assert set(kinds(model)) == {HalfLinear}
    assert_plain(cactus_hf.enable(model), like=rounded(adapted.to(torch.float32)))
    with pytest.raises(RuntimeError, match="single memory location"):
        model.merge_and_unload()
    assert_same_weights(cactus_hf.unpack_linears(model), rounded(adapted))
    model.merge_and_unload()
    torch.manual_seed(0)
    below = peft.get_peft_model(halved(TARGET), config)
    with torch.no_grad():
        torch.testing.assert_close(below(IDS).logits, peft_logits(peft, config), atol=1e-5, rtol=1e-4)


def peft_logits(peft, config):
    torch.manual_seed(0)
    return peft.get_peft_model(rounded(TARGET), config)(IDS).logits


class TestErrors:
    @pytest.mark.parametrize("value", (torch.bfloat16, torch.float32, torch.int8, "float16"))
    def test_other_precisions(self, value):
        with pytest.raises(ValueError, match="must be torch.float16, or left out"):
            cactus_hf.pack_linears(nn.Linear(3, 2), value)

    @pytest.mark.parametrize("value", (65505.0, -1e9, float("inf"), float("nan")))
    @pytest.mark.parametrize("pack", (copy.deepcopy, cactus_hf.pack_linears), ids=("ordinary", "packed"))
    def test_numbers_beyond(self, value, pack):
        layers = pack(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
        layers[1].weight = nn.Parameter(torch.tensor([[1.0, value], [0, 0]]))
        with pytest.raises(ValueError, match=r"up to 65504, .* in 1 of 2 layers: 1 \("):
            cactus_hf.pack_linears(layers, torch.float16)
        assert HalfLinear not in kinds(layers)

    def test_the_largest_number(self):
        layer = nn.Linear(1, 1)
        nn.init.constant_(layer.weight, 65504.0)
        assert cactus_hf.unpack_linears(halved(layer)).weight.item() == 65504

    def test_nothing_to_pack(self):
        with pytest.raises(ValueError, match="there are none"):
            halved(nn.Embedding(3, 2))
        with pytest.raises(ValueError, match="1 with torch.float64 on cpu"):
            halved(nn.Linear(3, 2).double())

    def test_offloaded(self):
        accelerate = pytest.importorskip("accelerate")
        model = accelerate.cpu_offload(copy.deepcopy(TARGET), torch.device("cpu"))
        with pytest.raises(ValueError, match="offload"):
            cactus_hf.pack_linears(model, torch.float16)

    @pytest.mark.parametrize(
        "name, value, said",
        [("supported_engines", ["qnnpack"], "no FBGEMM here"), ("engine", "onednn", "'onednn': set it to 'fbgemm'")],
    )
    def test_without_FBGEMM(self, name, value, said, monkeypatch):
        monkeypatch.setattr(type(torch.backends.quantized), name, value)
        with pytest.raises(ValueError, match=said):
            halved(TARGET)


class TestOptions:
    """`--pack` and `--assistant-pack` of the commands."""

    def parsed(self, *options: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        arguments.add_models(parser)
        return parser.parse_args(["--device", "cpu", *options])

    @pytest.mark.parametrize(
        "options, expected, said",
        [
            ([], (nn.Linear, nn.Linear), "tiny"),
            (["--no-pack"], (nn.Linear, nn.Linear), "tiny"),
            (["--pack"], (PackedLinear, PackedLinear), "tiny, packed"),
            (["--pack", "float16"], (HalfLinear, HalfLinear), "tiny, packed in float16"),
            (
                ["--pack", "--draft-pack", "float16"],
                (PackedLinear, HalfLinear),
                "tiny, target packed, draft packed in float16",
            ),
            (
                ["--pack", "float16", "--assistant-pack"],
                (HalfLinear, PackedLinear),
                "tiny, target packed in float16, draft packed",
            ),
            (
                ["--assistant-pack", "float16"],
                (nn.Linear, HalfLinear),
                "tiny, target not packed, draft packed in float16",
            ),
        ],
    )
    def test_what_becomes_of_the_pair(self, options, expected, said):
        args = self.parsed(*options)
        arguments.check_models(args)
        pair = arguments.prepared(args, arguments.Pair("tiny", copy.deepcopy(OWN), copy.deepcopy(DRAFT), None))
        assert [set(kinds(model)) for model in (pair.target, pair.draft)] == [{kind} for kind in expected]
        assert pair.name == said

    @pytest.mark.parametrize(
        "options, said",
        [
            (["--pack", "float16", "--dtype", "bfloat16"], "leave --dtype bfloat16 out, or take --pack alone"),
            (["--pack", "float16", "--draft-dtype", "bfloat16"], "or take --draft-pack without float16"),
            (["--draft-pack", "float16", "--dtype", "bfloat16"], "A draft in bfloat16"),
            (["--pack", "bfloat16"], "choose from"),
        ],
    )
    @pytest.mark.parametrize("command", ("demo", "bench", "tune"))
    def test_mistakes(self, command, options, said, capsys):
        try:
            assert cli.main([command, "--pair", "qwen3-8b", *options]) == 2
        except SystemExit as error:
            assert error.code == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize("option", ("--pack", "--assistant-pack"))
    def test_on_a_GPU(self, option, monkeypatch):
        monkeypatch.setattr(pairs, "find_device", lambda device: torch.device("cuda"))
        with pytest.raises(ValueError, match=f"{option} is for a CPU, and the models go to cuda"):
            arguments.check_models(self.parsed(option))


def test_plain_decoding():
    assert torch.equal(plain(cactus_hf.enable(halved(TARGET))), plain(rounded(TARGET)))
