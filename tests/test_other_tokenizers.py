"""Texts and laws with a draft of another tokenizer, which stays as it is."""

from __future__ import annotations

import copy

import laws
import pytest
import torch
from test_translation import byte_bpe, words
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import cactus_hf
import tiny
from cactus_hf.translation import Translation


OPTIONS = {"eos_token_id": None, "pad_token_id": tiny.PAD, "num_assistant_tokens": 4, "max_new_tokens": 24}


def enabled(model: PreTrainedModel) -> PreTrainedModel:
    return cactus_hf.enable(copy.copy(model))


def renumbered(model: PreTrainedModel, tokenizers: tuple, vocab: int) -> PreTrainedModel:
    """The model with the draft tokenizer's ids: its law is the same, as far as both have the tokens."""
    ids = Translation(*tokenizers, vocab).ids
    draft = copy.deepcopy(model)
    draft.resize_token_embeddings(vocab)
    for new, old in (
        (draft.get_input_embeddings().weight, model.get_input_embeddings().weight),
        (draft.get_output_embeddings().weight, model.get_output_embeddings().weight),
    ):
        new.data = torch.zeros_like(new)
        new.data[list(ids.values())] = old.data[list(ids)]
    return draft


PAIRS = {
    "rotated": (tiny.word_tokenizer(), tiny.word_tokenizer(rotate=31)),
    "subset": (tiny.word_tokenizer(), tiny.word_tokenizer(70)),
    "superset": (tiny.word_tokenizer(), tiny.word_tokenizer(120, rotate=5)),
    "other special tokens": (
        tiny.word_tokenizer(),
        words("<unk>", *(f"w{i}" for i in range(96, 3, -1)), unknown="<unk>", eos_token="</s>", bos_token="<s>"),
    ),
}
MERGES = "t h, th e, Ġ a, ð Ł, i n, in g, Ġ the, A B, z z, Ã ©"


def make(name: str, family: str = "qwen3", **options) -> tuple[PreTrainedModel, PreTrainedModel, dict]:
    """Target, a draft that often agrees with it, and the tokenizers as `generate()` takes them."""
    tokenizers = PAIRS[name]
    target = tiny.model(family, **options)
    draft = tiny.perturbed(renumbered(target, tokenizers, len(tokenizers[1]) + 3))
    return target, draft, dict(zip(("tokenizer", "assistant_tokenizer"), tokenizers, strict=True))


def greedy(target, draft, prompts: tiny.Prompts, **options) -> list[list[int]]:
    options = {**OPTIONS, "do_sample": False, "cactus_delta": 1.0, **options}
    output = enabled(target).generate(**prompts.inputs, assistant_model=draft, **options)
    return output[:, prompts.input_ids.shape[1] :].tolist()


def plain(target, prompts: tiny.Prompts, **options) -> list[list[int]]:
    texts = [row.tolist() for row in tiny.plain_greedy(target, prompts, OPTIONS["max_new_tokens"], **options)]
    longest = max(map(len, texts))
    return [text + [tiny.PAD] * (longest - len(text)) for text in texts]


class TestGreedy:
    @pytest.mark.parametrize("name", PAIRS)
    @pytest.mark.parametrize("lengths", ((5, 17, 9, 2), (6,)))
    def test_texts_equal_plain_ones(self, name, lengths):
        target, draft, tokenizers = make(name)
        prompts = tiny.ragged_prompts(lengths)
        assert greedy(target, draft, prompts, **tokenizers) == plain(target, prompts)

    @pytest.mark.parametrize("family", ("gpt2", "gemma3", "bloom"))
    @pytest.mark.filterwarnings("ignore:The rows of this batch are decoded one after another")
    def test_families(self, family):
        target, draft, tokenizers = make("rotated", family)
        prompts = tiny.ragged_prompts()
        assert greedy(target, draft, prompts, **tokenizers) == plain(target, prompts)

    @pytest.mark.parametrize("is_target_finer", (True, False))
    def test_bytes_against_merged_tokens(self, is_target_finer):
        """Tokens in pieces, halves of characters, and texts that are no characters at all."""
        tokenizers = [tiny.byte_tokenizer(), byte_bpe(MERGES, eos_token="<eos>")]
        tokenizer, draft_tokenizer = tokenizers if is_target_finer else reversed(tokenizers)
        target = tiny.ARCHITECTURES["qwen3"].build(vocab=len(tokenizer))
        draft = tiny.ARCHITECTURES["llama"].build(vocab=len(draft_tokenizer))
        prompts = tiny.ragged_prompts((5, 17, 9, 2), vocab=len(tokenizer))
        options = {"tokenizer": tokenizer, "assistant_tokenizer": draft_tokenizer}
        assert greedy(target, draft, prompts, **options) == plain(target, prompts)

    def test_rows_end_early(self):
        target, draft, tokenizers = make("rotated")
        prompts = tiny.ragged_prompts((5, 17, 9, 2, 8, 4))
        texts = plain(target, prompts)
        ends = [texts[0][3], texts[1][10], texts[3][0]]
        ours = greedy(target, draft, prompts, eos_token_id=ends, **tokenizers)
        assert ours == plain(target, prompts, eos_token_id=ends)

    def test_a_context_that_is_shorter_than_the_text(self):
        target, draft, tokenizers = make("superset")
        draft.config.max_position_embeddings = 9
        prompts = tiny.ragged_prompts()
        assert greedy(target, draft, prompts, **tokenizers) == plain(target, prompts)

    @pytest.mark.parametrize(
        "options",
        (
            {"repetition_penalty": 1.7, "suppress_tokens": [tiny.PAD]},  # 5.17 also penalises padding
            {"no_repeat_ngram_size": 2},
            {"suppress_tokens": [20, 21, 22, 50]},
            {"bad_words_ids": [[44], [10, 11]]},
            {"min_new_tokens": 9, "eos_token_id": [61, 70, 80]},
            {"forced_eos_token_id": 88},
            {"prefix_allowed_tokens_fn": lambda row, ids: [75, 90] if ids[-1] % 2 else [7, 8, 9, 80]},
        ),
        ids=lambda options: next(iter(options)),
    )
    @pytest.mark.parametrize("name", ("rotated", "subset"))
    def test_processors(self, name, options):
        """The draft of the pair "subset" lacks all ids from 70 on, forced and allowed ones among them."""
        target, draft, tokenizers = make(name)
        prompts = tiny.ragged_prompts()
        ours = greedy(target, draft, prompts, **tokenizers, **options)
        assert ours == plain(target, prompts, **options)
        for more in ({"eta_cutoff": 1e-3}, {"typical_p": 0.9, "remove_invalid_values": True}):
            texts = greedy(target, draft, prompts, **tokenizers, **options, **more, do_sample=True)
            assert len(texts) == 4


class TestSampling:
    @pytest.mark.parametrize("options", ({}, {"temperature": 0.5, "top_k": 9}, {"repetition_penalty": 1.5}))
    def test_a_draft_that_is_the_target_is_always_right(self, options):
        """It also draws the end, whose name is another."""
        target = tiny.model("qwen3")
        for tokenizers in (PAIRS["rotated"], PAIRS["other special tokens"]):
            output = enabled(target).generate(
                **tiny.ragged_prompts((5, 17, 9, 2) * 4).inputs,
                assistant_model=renumbered(target, tokenizers, 110),
                tokenizer=tokenizers[0],
                assistant_tokenizer=tokenizers[1],
                do_sample=True,
                cactus_delta=0.0,
                suppress_tokens=[tiny.PAD, tiny.BOS, tiny.UNK],  # tokens that one of the drafts lacks
                return_dict_in_generate=True,
                **OPTIONS | options | {"eos_token_id": tiny.EOS},
            )
            assert output.speculation.acceptance_rate > 0.97  # rounding differs between one token and a block

    def test_a_seeded_row_does_not_depend_on_its_neighbours(self):
        target, draft, tokenizers = make("subset", dtype=torch.float64)
        prompts = tiny.ragged_prompts()
        options = {"assistant_model": draft, "do_sample": True, "cactus_delta": 0.5, **OPTIONS, **tokenizers}
        together = enabled(target).generate(**prompts.inputs, generator=[1, 2, 3, 4], **options)
        for index in range(4):
            row = prompts.row(index, num_pads=index)
            alone = enabled(target).generate(**row.inputs, generator=[index + 1], **options)
            assert alone[0, -24:].tolist() == together[index, -24:].tolist()


class TestLaw:
    """ "ab" and "bade" are one token to the draft, or several; it has words of its own, and other ids."""

    TARGET = words("a", "b", "c", "d", "e", "f", "ab", "bade")
    DRAFTS = {
        "other ids": words("bade", "f", "ab", "b", "a", "e", "c", "d"),
        "pieces": words("y", "f", "z", "b", "x", "a", "e", "c", "d"),
        "few": words("y", "a", "b", "f", "x"),
    }

    def law(self, tokenizer: PreTrainedTokenizerFast, draft: PreTrainedModel) -> laws.Law:
        own = tokenizer.get_vocab()
        texts = self.TARGET.convert_ids_to_tokens(range(8))
        known = [i for i, text in enumerate(texts) if text in own]

        def probabilities(prompt: list[int], new: list[int]) -> torch.Tensor:
            ids = tokenizer(" ".join(texts[i] for i in prompt))["input_ids"]
            for i in new:
                ids += [own[texts[i]]] if texts[i] in own else [own[letter] for letter in texts[i] if letter in own]
            logits = draft(torch.tensor([ids])).logits[0, -1]
            law = torch.zeros(8, dtype=torch.float64)
            law[known] = logits[[own[texts[i]] for i in known]].softmax(-1)
            return law

        prompts = [laws.PROMPTS.row(row).input_ids[0].tolist() for row in range(4)]

        def behind(text: list[int]) -> torch.Tensor:
            prompt = max((p for p in prompts if text[: len(p)] == p), key=len)
            return probabilities(prompt, text[len(prompt) :])

        return behind

    @pytest.mark.parametrize("name", DRAFTS)
    @pytest.mark.parametrize("rule", (cactus_hf.Cactus(0.0), cactus_hf.Cactus(0.5)), ids=repr)
    def test_it_samples_the_law_of_its_rounds(self, name, rule):
        tokenizer = self.DRAFTS[name]
        build = tiny.ARCHITECTURES["llama"].build
        draft = {
            dtype: build(seed=1, vocab=12, dtype=dtype, logit_scale=1.2, hidden_size=16, intermediate_size=32)
            for dtype in (torch.float32, torch.float64)
        }
        counts = laws.frequencies(
            enabled(tiny.vocabulary8(0)), 30, assistant_model=draft[torch.float32], acceptance_rule=rule,
            num_assistant_tokens=2, tokenizer=self.TARGET, assistant_tokenizer=tokenizer,
        )  # fmt: skip
        target = laws.law_of(tiny.vocabulary8(0, dtype=torch.float64))
        laws.assert_follows(counts, laws.exact(target, self.law(tokenizer, draft[torch.float64]), rule, 2))


class TestDraft:
    def test_it_stays_as_it_is(self):
        target, draft, tokenizers = make("superset")
        prompts = tiny.ragged_prompts()
        states = {name: value.clone() for name, value in draft.state_dict().items()}
        kinds = {name: type(module) for name, module in draft.named_modules()}
        configs = draft.config.to_dict(), draft.generation_config.to_dict()
        text = draft.generate(prompts.input_ids[:1], max_new_tokens=5, do_sample=False)
        for do_sample in (False, True):
            greedy(target, draft, prompts, do_sample=do_sample, repetition_penalty=1.2, **tokenizers)
        assert kinds == {name: type(module) for name, module in draft.named_modules()}
        assert all(torch.equal(value, states[name]) for name, value in draft.state_dict().items())
        assert configs == (draft.config.to_dict(), draft.generation_config.to_dict())
        assert text.equal(draft.generate(prompts.input_ids[:1], max_new_tokens=5, do_sample=False))

    def test_one_after_another_with_the_same_tokenizers(self):
        target, draft, tokenizers = make("rotated")
        prompts = tiny.ragged_prompts()
        expected = plain(target, prompts)
        for each in (draft, tiny.ARCHITECTURES["llama"].build(vocab=104), draft):
            assert greedy(target, each, prompts, **tokenizers) == expected

    def test_the_same_tokenizer_twice_needs_no_translation(self, monkeypatch):
        monkeypatch.setattr(Translation, "read_prompt", lambda *args: pytest.fail("the prompt was translated"))
        target, draft = tiny.pair("qwen3")
        prompts, tokenizer = tiny.ragged_prompts(), tiny.word_tokenizer()
        for other in (tokenizer, tiny.word_tokenizer()):
            options = {"tokenizer": tokenizer, "assistant_tokenizer": other}
            assert greedy(target, draft, prompts, **options) == plain(target, prompts)

    def test_a_chat_through_the_pipeline(self):
        from transformers import pipeline

        target, draft, tokenizers = make("rotated")
        chat = [{"role": "user", "content": "w5 w6 w7"}]
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        texts = []
        for extra in ({}, {"assistant_model": draft, "assistant_tokenizer": tokenizers["assistant_tokenizer"]}):
            pipe = pipeline("text-generation", model=enabled(target), tokenizer=tokenizers["tokenizer"], **extra)
            texts.append(pipe(chat, **options, **({"cactus_delta": 1.0} if extra else {})))
        assert texts[0] == texts[1]


class TestNothingInCommon:
    """Then the draft's text is cut anew by the target's tokenizer: transformers' other way, for one row at a time."""

    TOKENIZERS = {"tokenizer": tiny.byte_tokenizer(), "assistant_tokenizer": words(*(f"x{i} " for i in range(90)))}

    @pytest.mark.parametrize("rows", (1, 3))
    @pytest.mark.parametrize("extra", ({}, {"stop_strings": ["x", "q"], "bad_words_ids": [[200]]}), ids=("", "stops"))
    @pytest.mark.filterwarnings("ignore:The rows of this batch are decoded one after another")
    def test_greedy_text_is_plain(self, rows, extra):
        target, draft = tiny.model("qwen3", vocab=260), enabled(tiny.model("llama", vocab=91))
        prompts = tiny.ragged_prompts((9, 4, 7)[:rows], vocab=250)
        tokenizer = {"tokenizer": self.TOKENIZERS["tokenizer"]} if extra else {}
        config = draft.generation_config.to_dict(), draft.config.to_dict()
        for _ in range(2):
            texts = greedy(target, draft, prompts, **self.TOKENIZERS, **extra)
            assert texts == plain(target, prompts, **tokenizer, **extra)
        assert (draft.generation_config.to_dict(), draft.config.to_dict()) == config

    def test_drafts_are_made_and_kept(self):
        """A target that repeats what the draft says."""
        target, draft = tiny.model("qwen3", vocab=260), tiny.model("llama", vocab=91)
        output = enabled(target).generate(
            **tiny.ragged_prompts((9,), vocab=250).inputs, assistant_model=draft, acceptance_rule=cactus_hf.TopK(259),
            do_sample=True, top_k=0, max_new_tokens=40, eos_token_id=None, return_dict_in_generate=True,
            num_assistant_tokens=3, **self.TOKENIZERS,
        )  # fmt: skip
        assert output.speculation.accepted_length > 1

    @pytest.mark.filterwarnings("ignore:The rows of this batch are decoded one after another")
    def test_the_law_is_the_targets(self):
        """The draft writes pairs of the target's words, which it would not have drawn itself."""
        target = enabled(tiny.vocabulary8(0, logit_scale=0.8))
        pairs = words("<unk>", *(f"{a} {b}" for a in "abcd" for b in "efgh"))
        options = {
            "assistant_model": tiny.model("qwen3", vocab=17), "tokenizer": words(*"abcdefgh"),
            "assistant_tokenizer": pairs, "num_assistant_tokens": 2,
        }  # fmt: skip
        laws.assert_next_tokens_follow(target, options)
