"""Grammar engines of others, which keep an automaton of the text: skipped where they are not installed."""

from __future__ import annotations

import re

import pytest
import torch

import cactus_hf
import tiny


PATTERN = r"\[[0-9]+(,[0-9]+)*\]"
GRAMMAR = 'root ::= "[" number ("," number)* "]"\nnumber ::= [0-9]+'
LENGTHS = ((5,), (5, 17, 9, 2))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_tokenizer()


@pytest.fixture(scope="module")
def pair(tokenizer):
    target = tiny.ARCHITECTURES["qwen3"].build(vocab=len(tokenizer))
    return cactus_hf.enable(target), tiny.perturbed(target, 0.02)


@pytest.fixture(params=("xgrammar", "outlines_core"))
def make(request, tokenizer):
    """Makes a processor of this engine for `PATTERN`."""
    if request.param == "xgrammar":
        xgrammar = pytest.importorskip("xgrammar")
        hf = pytest.importorskip("xgrammar.contrib.hf")
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        compiled = xgrammar.GrammarCompiler(info).compile_grammar(GRAMMAR)
        return lambda: hf.LogitsProcessor(compiled)
    core = pytest.importorskip("outlines_core")
    engine = pytest.importorskip("outlines.backends.outlines_core")
    letters = {chr(byte): [tokenizer.convert_tokens_to_ids(chr(byte))] for byte in b"0123456789[],"}
    index = core.Index(PATTERN, core.Vocabulary(tiny.EOS, letters))
    return lambda: engine.OutlinesCoreLogitsProcessor(index, "torch")


@pytest.mark.parametrize("lengths", LENGTHS, ids=("one row", "batch"))
@pytest.mark.parametrize("source", ("draft", "lookup"))
def test_greedy_text_equals_plain(pair, make, lengths, source):
    target, draft = pair
    prompts = tiny.ragged_prompts(lengths, vocab=target.config.vocab_size)
    drafting = {"assistant_model": draft} if source == "draft" else {"prompt_lookup_num_tokens": 3}
    call = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": tiny.PAD, "eos_token_id": tiny.EOS}
    plain = target.generate(**prompts.inputs, **call, logits_processor=[make()])
    ours = target.generate(**prompts.inputs, **call, logits_processor=[make()], cactus_delta=1.0, **drafting)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("lengths", LENGTHS, ids=("one row", "batch"))
@pytest.mark.parametrize("delta", (0.0, 2.0))
def test_samples_satisfy_the_grammar(pair, make, tokenizer, lengths, delta):
    target, draft = pair
    prompts = tiny.ragged_prompts(lengths, vocab=target.config.vocab_size)
    output = target.generate(
        **prompts.inputs,
        do_sample=True,
        temperature=3.0,
        max_new_tokens=60,
        pad_token_id=tiny.PAD,
        logits_processor=[make()],
        assistant_model=draft,
        cactus_delta=delta,
        return_dict_in_generate=True,
    )
    texts = tokenizer.batch_decode(output.sequences[:, max(lengths) :], skip_special_tokens=True)
    for text, end in zip(texts, output.sequences[:, -1].tolist(), strict=True):
        assert re.fullmatch(PATTERN, text) if end in (tiny.PAD, tiny.EOS) else re.match(r"\[[0-9,]*$", text), text
    assert output.speculation.accepted.sum() > 0


def test_a_grammar_for_each_row_needs_plain_calls(pair, tokenizer):
    xgrammar = pytest.importorskip("xgrammar")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer)))
    grammars = [compiler.compile_grammar(f'root ::= "{letter}"+') for letter in "abcd"]
    target, draft = pair
    prompts = tiny.ragged_prompts(vocab=len(tokenizer))
    with pytest.raises(ValueError, match="LogitsProcessor remembers.*4 rows.*row by row"):
        target.generate(
            **prompts.inputs, logits_processor=[hf.LogitsProcessor(grammars)], assistant_model=draft, cactus_delta=1.0
        )
