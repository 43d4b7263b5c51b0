"""Every family of the table: what the package says it can do with it is what it does.

Greedy texts are compared with plain `generate()`, in float32, where they are equal to the last token.
"""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from families_page import PAGE, RELEASE, lines, page

import cactus_hf
import tiny
from cactus_hf.support import TESTED


NEW_TOKENS = 12
PROMPTS = tiny.ragged_prompts()
MATRIX = [row for row in tiny.ARCHITECTURES.values() if "dynamic_rope" not in row.flags]


def cases(batch: str) -> list[tuple[str, str]]:
    return [
        (row.name, attention) for row in MATRIX if row.exists and row.batch == batch for attention in row.attention
    ]


@pytest.fixture
def speculate():
    """Runs a pair of a family on prompts, greedily; models are shared with other tests and left as they were."""
    targets = []

    def run(name: str, attention: str, prompts: tiny.Prompts, num_drafts: int) -> torch.Tensor:
        target, draft = tiny.pair(name, attention)
        targets.append(cactus_hf.enable(target))
        return generate(target, prompts, assistant_model=draft, cactus_delta=1.0, num_assistant_tokens=num_drafts)

    yield run
    for target in targets:
        cactus_hf.disable(target)


def generate(model, prompts: tiny.Prompts, **options) -> torch.Tensor:
    """The new tokens [B, NEW_TOKENS]."""
    options |= {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": tiny.PAD}
    return model.generate(**prompts.inputs, **options)[:, prompts.input_ids.shape[1] :]


@functools.cache
def plain_rows(name: str, attention: str = "eager") -> list[list[int]]:
    """What each prompt alone goes on with. (Where masks are ready-made, all attention implementations are alike.)"""
    return [text.tolist() for text in tiny.plain_greedy(tiny.model(name, attention), PROMPTS, NEW_TOKENS)]


@pytest.mark.parametrize(("name", "attention"), cases("ragged"))
def test_a_ragged_batch_equals_plain_rows(speculate, name, attention):
    rows = speculate(name, attention, PROMPTS, 4)
    assert rows.tolist() == plain_rows(name)


@pytest.mark.parametrize(("name", "attention"), cases("one row"))
def test_rows_that_cannot_go_together_equal_plain_rows_one_by_one(speculate, name, attention):
    with pytest.warns(UserWarning, match="one after another"):
        rows = speculate(name, attention, PROMPTS, 5)
    assert rows.tolist() == plain_rows(name, attention)
    for row, num_drafts in ((PROMPTS.row(1), 1), (PROMPTS.row(3, num_pads=2), 4)):
        text = speculate(
            name, attention, row, num_drafts
        )  # some of these models count padding, in plain generation too
        assert text.tolist() == generate(tiny.model(name, attention), row).tolist()


@pytest.mark.parametrize(("name", "attention"), cases("refused"))
def test_refused_before_any_forward_pass(speculate, monkeypatch, name, attention):
    target, _ = tiny.pair(name, attention)

    @functools.wraps(target.forward)
    def forward(*args, **kwargs):
        pytest.fail("a forward pass")

    monkeypatch.setattr(target, "forward", forward)
    with pytest.raises(ValueError, match=f"The target, {type(target).__name__}, cannot be rolled back"):
        speculate(name, attention, PROMPTS.row(1), 4)


@pytest.mark.skipif(not transformers.__version__.startswith(RELEASE), reason=f"the page is about {RELEASE}")
def test_the_page_says_what_the_tests_do():
    assert PAGE.read_text(encoding="utf-8") == page(lines()), "run `python tests/families_page.py`"


def test_the_list_of_tested_types_is_what_is_tested():
    assert {row.model_type for row in MATRIX if row.batch == "ragged"} == TESTED


def test_a_type_that_sees_ahead_in_a_block_is_refused(speculate, monkeypatch):
    """One that is not in the list of tested types is tried on the prompt, also where there is one row only."""
    target, _ = tiny.pair("qwen2", "eager")
    stock = target.forward

    @functools.wraps(stock)
    def forward(input_ids, attention_mask=None, **inputs):
        if 1 < input_ids.shape[1] < PROMPTS.input_ids.shape[1]:
            input_ids = torch.cat([input_ids[:, 1:], input_ids[:, -1:]], dim=1)
        return stock(input_ids=input_ids, attention_mask=attention_mask, **inputs)

    monkeypatch.setattr(target, "forward", forward)
    monkeypatch.setattr(cactus_hf.support, "TESTED", frozenset())
    with pytest.raises(ValueError, match="Qwen2ForCausalLM does not give tokens that were taken back"):
        speculate("qwen2", "eager", PROMPTS.row(1), 4)
