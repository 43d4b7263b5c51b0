from __future__ import annotations

import copy

import pytest
import torch

import cactus_hf
import tiny
from cactus_hf.prompt_lookup import PromptLookup, latest_continuation
from cactus_hf.sequences import Sequences


def slow(text: list[int], max_ngram: int) -> int:
    """Column behind the latest earlier occurrence of the longest run of last tokens, by the definition."""
    for ngram in range(max_ngram, 0, -1):
        for end in range(len(text) - 1, ngram - 1, -1):
            if text[end - ngram : end] == text[len(text) - ngram :]:
                return end
    return len(text)


@pytest.mark.parametrize("max_ngram", (1, 2, 3, 5))
def test_equals_the_definition(max_ngram):
    texts = [torch.randint(0, 4, (length,)).tolist() for length in (1, 2, 3, 5, 8, 13, 21, 21)]
    width = 24
    begin = torch.tensor([width - 3 - len(text) for text in texts])
    rows = torch.full((len(texts), width), 2)  # what surrounds a text must not be found
    for row, text in enumerate(texts):
        rows[row, begin[row] : begin[row] + len(text)] = torch.tensor(text)
    end = torch.full((len(texts),), width - 3)
    found = latest_continuation(rows, begin, end, max_ngram)
    assert (found - begin).tolist() == [slow(text, max_ngram) for text in texts]


def test_a_draft_ends_with_the_text_and_before_foreign_ids():
    prompt = torch.tensor([[0, 5, 6, 7, 5], [5, 6, 99, 7, 5], [1, 2, 3, 4, 5]])
    rows = Sequences(prompt, torch.tensor([1, 0, 0]), 20, 0)
    drafts = PromptLookup(2, vocab_size=50).propose(rows, torch.tensor([4, 4, 4]), torch.zeros(3, 4))
    assert drafts.lengths.tolist() == [3, 1, 0] and drafts.logits is None
    assert drafts.tokens[0].tolist() == [6, 7, 5] and drafts.tokens[1, 0] == 6
    assert (drafts.tokens < 50).all(), "also behind the drafts, where the verifier looks tokens up all the same"
    assert rows.read(0, 3).tolist() == drafts.tokens.tolist()


@pytest.mark.parametrize("rows", (1, 4))
@pytest.mark.parametrize("max_ngram", (None, 4))
def test_greedy_text_is_plain(rows, max_ngram):
    target = cactus_hf.enable(copy.copy(tiny.model("qwen3")))
    prompts = tiny.ragged_prompts((12, 17, 9, 14)[:rows])
    ids = prompts.input_ids.clone()
    ids[:, -6:-3] = ids[:, -3:]  # something to find
    options = {
        "attention_mask": prompts.attention_mask, "do_sample": False, "max_new_tokens": 40, "eos_token_id": None,
        "pad_token_id": 0, "max_matching_ngram_size": max_ngram, "repetition_penalty": 0.7,
    }  # fmt: skip
    plain = target.generate(ids, **options)
    ours = target.generate(ids, **options, cactus_delta=0.5, prompt_lookup_num_tokens=5, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, plain)
    assert ours.speculation.accepted.sum() > 0, "nothing was drafted, so nothing was tested"


def test_with_a_one_hot_draft_the_emitted_law_keeps_its_bound():
    """h_alg = h for a one-hot draft, so KL <= ln(1 + 2 delta) holds for what is emitted (method: one-hot drafts)."""
    target = cactus_hf.enable(copy.copy(tiny.model("qwen3")))
    ids = torch.randint(5, 20, (8, 30))
    for delta in (0.0, 0.5):
        output = target.generate(
            ids, cactus_delta=delta, prompt_lookup_num_tokens=4, do_sample=True, max_new_tokens=40, eos_token_id=None,
            speculation_kl=True, return_dict_in_generate=True, temperature=0.5,
        )  # fmt: skip
        stats = output.speculation
        assert stats.verified.sum() > 20
        bound = torch.log1p(torch.tensor(2 * delta)) * stats.verified
        assert (stats.emitted_kl_sum <= bound + 1e-6).all()
        torch.testing.assert_close(stats.emitted_kl_sum, stats.ball_kl_sum, atol=1e-4, rtol=1e-3)


def test_two_sources_at_once_are_refused():
    target, draft = tiny.pair("llama")
    target = cactus_hf.enable(copy.copy(target))
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens.*one of them"):
        target.generate(torch.tensor([[5]]), assistant_model=draft, cactus_delta=1.0, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens.*at least 1"):
        target.generate(torch.tensor([[5]]), cactus_delta=1.0, prompt_lookup_num_tokens=-1, max_new_tokens=3)
