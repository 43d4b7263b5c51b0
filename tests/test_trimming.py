"""Drafts with a smaller vocabulary: their law, the model they are made of, and the ways to use them."""

from __future__ import annotations

import copy
import pickle

import laws
import pytest
import torch
from families import ARCHITECTURES
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import cactus_hf
import tiny
from against_plain import DRAFT, PROMPTS, TARGET, assert_plain, enabled, plain


IDS = torch.randint(4, tiny.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
KEPT = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(1))[:20]
TOKENIZER = tiny.word_tokenizer()
SIZES = {"vocab_size": tiny.VOCAB, "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2}


@torch.no_grad()
def law(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    return model(**{"input_ids": IDS} | inputs).logits.double().softmax(-1)


def restricted(law: torch.Tensor, kept: torch.Tensor = KEPT) -> torch.Tensor:
    allowed = torch.zeros_like(law).index_fill_(-1, kept, 1.0)
    return law * allowed / (law * allowed).sum(-1, keepdim=True)


def state_of(model: nn.Module) -> tuple:
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [(name, id(each), type(each)) for name, each in model.named_modules()],
        [(name, id(each), each.requires_grad) for name, each in model.named_parameters()],
        {name: repr(value) for name, value in vars(model).items() if name not in ("_parameters", "_modules")},
    )


@pytest.mark.parametrize(
    "name, options",
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gemma2", {"final_logit_softcapping": 1.5}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {}),
        ("gpt2", {}),
        ("phi", {}),  # a bias at the head
        ("bert", {}),  # the head within a head
    ],
)
def test_the_law_is_the_drafts_own_over_the_kept_ids(name, options):
    """In float64, so that nothing but rounding is left."""
    model = ARCHITECTURES[name].build(dtype=torch.float64, **options)
    before = state_of(model)
    trimmed = cactus_hf.trim_draft(model, KEPT)
    found, expected = law(trimmed), restricted(law(model))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert (found.count_nonzero(-1) == 20).all()
    assert trimmed.get_output_embeddings().weight.shape[0] == 20
    after = state_of(model)
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    assert before[1:] == after[1:]


def bart():
    model = BartForConditionalGeneration(BartConfig(**SIZES, decoder_layers=1, decoder_attention_heads=2))
    model.final_logits_bias.normal_()  # which stands behind the head
    return model


def tied_t5():  # which scales hidden states where the head is tied
    return T5ForConditionalGeneration(T5Config(**SIZES, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


@pytest.mark.parametrize("build", (bart, tied_t5))
def test_encoder_decoders(build):
    torch.manual_seed(0)
    model = build().double().eval()
    inputs = {"decoder_input_ids": IDS}
    expected = restricted(law(model, **inputs))
    torch.testing.assert_close(law(cactus_hf.trim_draft(model, KEPT), **inputs), expected, rtol=1e-9, atol=1e-12)


def test_tuples_of_outputs():
    trimmed = cactus_hf.trim_draft(DRAFT, KEPT)
    with torch.no_grad():
        logits = trimmed(IDS, return_dict=False)[0]
    torch.testing.assert_close(logits, trimmed(IDS).logits)


@pytest.mark.parametrize("rule", (cactus_hf.Cactus(0.0), cactus_hf.Cactus(0.5)), ids=repr)
def test_it_samples_the_law_of_its_rounds(rule):
    """Lossless at delta 0; and at .5 right only if the draft's law is the restricted one."""
    kept = torch.tensor([1, 2, 4, 5, 7])
    models = [tiny.vocabulary8(seed, dtype=torch.float64) for seed in (0, 1)]
    target_law, whole_law = map(laws.law_of, models)
    trimmed = cactus_hf.trim_draft(tiny.vocabulary8(1), kept)
    counts = laws.frequencies(
        enabled(tiny.vocabulary8(0)), 30, assistant_model=trimmed, acceptance_rule=rule, num_assistant_tokens=2
    )
    laws.assert_follows(counts, laws.exact(target_law, lambda text: restricted(whole_law(text), kept), rule, 2))


class TestUse:
    def trimmed(self, num_tokens: int = 40) -> nn.Module:
        """One that drafts some of the tokens of greedy texts."""
        text = plain(TARGET)[:, PROMPTS.input_ids.shape[1] :]
        return cactus_hf.trim_draft(DRAFT, torch.cat([KEPT, text.flatten()]).unique()[:num_tokens])

    def test_greedy_texts_of_batches(self):
        assert_plain(enabled(), self.trimmed())

    def test_drafts_are_kept(self):
        options = {"assistant_model": self.trimmed(), "cactus_delta": 0.0, "return_dict_in_generate": True}
        output = enabled().generate(**PROMPTS.inputs, **options, do_sample=False, max_new_tokens=12)
        assert output.speculation.accepted_length > 0.2

    @pytest.mark.parametrize(
        "make", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))), ids=("copy", "pickle")
    )
    def test_copies(self, make):
        trimmed = self.trimmed()
        torch.testing.assert_close(law(make(trimmed)), law(trimmed))
        assert_plain(enabled(), make(trimmed))

    def test_another_precision(self):
        dtypes = {p.dtype for p in DRAFT.parameters()}
        trimmed = self.trimmed().to(torch.bfloat16)
        assert {p.dtype for p in trimmed.parameters()} == {torch.bfloat16} and trimmed.kept_ids.dtype == torch.long
        assert {p.dtype for p in DRAFT.parameters()} == dtypes
        assert_plain(enabled(), trimmed)

    def test_another_device(self):
        trimmed = cactus_hf.trim_draft(DRAFT, KEPT).to("meta")
        assert trimmed.kept_ids.is_meta and not any(p.is_meta for p in DRAFT.parameters())

    def test_weights_are_shared(self):
        trimmed = self.trimmed()
        numbers = {p.data_ptr() for p in DRAFT.parameters()}
        assert [name for name, p in trimmed.named_parameters() if p.data_ptr() not in numbers] == ["lm_head.weight"]

    def test_packed(self):
        trimmed = cactus_hf.pack_linears(self.trimmed())
        assert trimmed.lm_head.weight.is_mkldnn and not any(p.is_mkldnn for p in DRAFT.parameters())
        assert_plain(enabled(), trimmed)

    def test_enabled(self):
        assert_plain(enabled(), cactus_hf.trim_draft(cactus_hf.enable(copy.deepcopy(DRAFT)), KEPT))

    def test_compiled(self):
        trimmed = self.trimmed()
        trimmed.forward = torch.compile(trimmed.forward, backend="eager")
        assert_plain(enabled(), trimmed)

    def test_stock_assisted_generation(self):
        options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": tiny.PAD}
        prompt = PROMPTS.row(1).inputs
        expected = TARGET.generate(**prompt, **options)
        assert torch.equal(TARGET.generate(**prompt, **options, assistant_model=self.trimmed()), expected)

    def test_generating_by_itself(self):
        text = self.trimmed().generate(**PROMPTS.row(1).inputs, do_sample=False, max_new_tokens=6, eos_token_id=None)
        assert torch.isin(text[:, -6:], self.trimmed().kept_ids).all()

    def test_another_tokenizer(self):
        own = tiny.word_tokenizer(rotate=31)
        options = {"tokenizer": TOKENIZER, "assistant_tokenizer": own, "assistant_model": self.trimmed()}
        options |= {"do_sample": False, "max_new_tokens": 8, "pad_token_id": tiny.PAD}
        found = enabled().generate(**PROMPTS.inputs, **options, cactus_delta=0.0)
        assert torch.equal(
            found, TARGET.generate(**PROMPTS.inputs, do_sample=False, max_new_tokens=8, pad_token_id=tiny.PAD)
        )

    def test_no_saving(self, tmp_path):
        with pytest.raises(ValueError, match="kept_ids"):
            self.trimmed().save_pretrained(tmp_path)
        assert not any(tmp_path.iterdir())

    @pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT 0.21 asks for it
    def test_peft(self):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(copy.deepcopy(DRAFT), config)
        trimmed = cactus_hf.trim_draft(adapted, KEPT)
        torch.testing.assert_close(law(trimmed), restricted(law(adapted)))
        assert_plain(enabled(), trimmed)
        with adapted.disable_adapter(), pytest.raises(AssertionError):
            torch.testing.assert_close(law(trimmed), restricted(law(adapted)))
        config = peft.LoraConfig(target_modules=["lm_head"])
        with pytest.raises(ValueError, match="ordinary `nn.Linear`"):
            cactus_hf.trim_draft(peft.get_peft_model(copy.deepcopy(DRAFT), config), KEPT)


class TestCorpus:
    TEXTS = ("w9 w9 w9 w7 w7", "w30 w9 w7 w30 w11", "w12 w20")

    def kept(self, num_tokens: int, texts=TEXTS) -> set[int]:
        return set(cactus_hf.trim_draft(DRAFT, texts, tokenizer=TOKENIZER, num_tokens=num_tokens).kept_ids.tolist())

    def test_the_most_frequent_and_special_ids(self):
        special = set(TOKENIZER.all_special_ids)
        assert self.kept(len(special) + 3) == special | {9, 7, 30}
        assert self.kept(len(special) + 4) == special | {9, 7, 30, 11}, "of equals the lowest"
        assert self.kept(99) == special | {9, 7, 30, 11, 12, 20}, "no more than occur"

    def test_any_iterable_of_texts(self):
        assert self.kept(99, iter(self.TEXTS * 300)) == self.kept(99)

    def test_ends_that_the_tokenizer_does_not_know(self):
        draft = copy.deepcopy(DRAFT)
        draft.generation_config.eos_token_id = [2, 55]
        trimmed = cactus_hf.trim_draft(draft, self.TEXTS, tokenizer=TOKENIZER, num_tokens=8)
        assert {2, 55} <= set(trimmed.kept_ids.tolist())


@pytest.mark.parametrize(
    "token_ids, options, error, message",
    [
        ([], {}, ValueError, "empty"),
        ([3, tiny.VOCAB], {}, ValueError, f"{tiny.VOCAB} is not among"),
        ([-1], {}, ValueError, "-1 is not among"),
        ([3, 4, 3], {}, ValueError, "3 given, 2 different"),
        ([3.5], {}, TypeError, "whole numbers"),
        ([True, False], {}, TypeError, "whole numbers"),
        (KEPT[None], {}, TypeError, "one dimension"),
        (KEPT, {"num_tokens": 3}, ValueError, "leave them out"),
        ("w5 w6", {}, TypeError, "iterable of texts"),
        (7, {}, TypeError, "iterable of texts"),
        (["w5"], {"num_tokens": 9}, ValueError, "tokenizer="),
        (["w5"], {"tokenizer": TOKENIZER}, ValueError, "num_tokens="),
        (["w5"], {"tokenizer": TOKENIZER, "num_tokens": 1}, ValueError, "special ids"),
        (["w5", 3], {"tokenizer": TOKENIZER, "num_tokens": 9}, TypeError, "got 3 among texts"),
    ],
)
def test_bad_ids(token_ids, options, error, message):
    with pytest.raises(error, match=message):
        cactus_hf.trim_draft(DRAFT, token_ids, **options)


class TestBadDrafts:
    def test_no_model(self):
        with pytest.raises(TypeError):
            cactus_hf.trim_draft(nn.Linear(3, 2), [1])

    def test_trimmed_already(self):
        with pytest.raises(ValueError, match="already"):
            cactus_hf.trim_draft(cactus_hf.trim_draft(DRAFT, KEPT), KEPT[:3])

    def test_packed(self):
        with pytest.raises(ValueError, match="before it is packed"):
            cactus_hf.trim_draft(cactus_hf.pack_linears(copy.deepcopy(DRAFT)), KEPT)

    def test_offloaded(self):
        with pytest.raises(ValueError, match="offloaded"):
            cactus_hf.trim_draft(copy.deepcopy(DRAFT).to("meta"), KEPT)

    def test_logits_that_are_not_the_heads(self):
        trimmed = cactus_hf.trim_draft(DRAFT, KEPT)
        trimmed.lm_head = nn.Linear(trimmed.config.hidden_size, 30)
        with pytest.raises(ValueError, match="30 logits"):
            trimmed(IDS)
