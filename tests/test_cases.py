"""Situations in which transformers' own assisted generation fails or surprises, each with what is right.

r01 .. r28 are their names in the project's list. `ELSEWHERE` names the tests of those that other files are about.
"""

from __future__ import annotations

import copy
import re
from itertools import product

import pytest
import torch
from pointers import has_test
from transformers import DynamicCache, StoppingCriteriaList, TextIteratorStreamer

import cactus_hf
import tiny
from cactus_hf.host import CACHE_NAME


ELSEWHERE = {
    "r06 processors, stop strings, forced tokens": "test_options.py::test_equal",
    "r07 draft and target are processed alike, once": "test_decoding.py::test_draft_and_target_are_processed_alike",
    "r08 the law of sampled texts": "test_decoding.py::test_delta_0_samples_the_target",
    "r08 for delta > 0": "test_decoding.py::test_cactus_samples_the_law_of_its_rounds",
    "r08 no token outside the target's support": "test_decoding.py::test_never_leaves_the_targets_support",
    "r09 draft lengths of the call": "test_generation.py::test_order",
    "r10 vocabularies of different padding": "test_decoding.py::test_vocabularies_of_different_padding",
    "r10 different tokenizers": "test_other_tokenizers.py::test_texts_equal_plain_ones",
    "r10 their law": "test_other_tokenizers.py::test_it_samples_the_law_of_its_rounds",
    "r10 the draft stays as it is": "test_other_tokenizers.py::test_it_stays_as_it_is",
    "r12 caches": "test_options.py::test_refused",
    "r12 the draft's own generation config": "test_generation.py::test_nothing_else_of_the_drafts_config_leaks",
    "r13 a prefilled system prompt": "test_options.py::test_a_prefilled_prompt",
    "r15 attentions and hidden states": "test_states.py::test_equal_those_of_plain_decoding",
    "r16 encoder-decoder models": "test_encoder_decoder.py::test_greedy_text_is_plain",
    "r16 `encoder_outputs` given": "test_encoder_decoder.py::test_encoder_outputs_given",
    "r16 drafts in another precision": "test_encoder_decoder.py::test_a_draft_in_another_precision",
    "r17 processors that remember": "test_remembering.py::test_equals_plain_rows",
    "r17 guidance": "test_remembering.py::test_transformers_own",
    "r17 grammars": "test_grammars.py::test_greedy_text_equals_plain",
    "r18 configs with other special tokens": "test_pipelines.py::test_ways_that_work",
    "r18 batches": "test_pipelines.py::test_text_is_that_of_single_prompts",
    "r18 stop_sequence": "test_pipelines.py::test_stop_sequence",
    "r19 a row and its neighbours": "test_decoding.py::test_a_seeded_row_does_not_depend_on_its_neighbours",
    "r21 forbidden tokens": "test_verification.py::test_q_is_0_rejects",
    "r21 broken drafts": "test_session.py::test_a_broken_draft_costs_speed_only",
    "r23 early exit": "test_early_exit.py::test_greedy_texts_equal_plain_ones",
    "r23 the model stays as it is": "test_early_exit.py::test_the_model_is_left_as_it_is",
    "r27 scikit-learn": "test_sources.py::test_without_scikit_learn_or_with_it",
    "r28 drafts that are no draws": "test_candidate_generators.py::test_the_law_is_the_targets",
}
BATCHES = pytest.mark.parametrize("lengths", ((9,), (5, 17, 9)), ids=("one row", "batch"))
DELTAS = pytest.mark.parametrize("delta", (0.0, 1.0))
SOURCES = pytest.mark.parametrize("source", ("assistant", "lookup"))
GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": tiny.PAD}


@pytest.fixture
def pair():
    target, draft = tiny.pair("llama", eps=0.02)
    return cactus_hf.enable(copy.deepcopy(target)), copy.deepcopy(draft)


def drafts(pair, source: str) -> dict:
    if source == "lookup":
        return {"prompt_lookup_num_tokens": 6}
    return {"assistant_model": pair[1], "num_assistant_tokens": 6}


def greedy(source: str) -> dict:
    """Options of plain decoding; for lookup they make texts that repeat themselves, or it would find nothing."""
    return GREEDY | ({"repetition_penalty": 0.5} if source == "lookup" else {})


@DELTAS
@SOURCES
def test_r01_batches(pair, source, delta):
    prompts = tiny.ragged_prompts((5, 17, 9))
    ours = pair[0].generate(**prompts.inputs, **GREEDY, **drafts(pair, source), cactus_delta=delta)
    assert torch.equal(ours[:, 17:], torch.stack(tiny.plain_greedy(tiny.model("llama"), prompts, 24)))


@BATCHES
@DELTAS
@SOURCES
def test_r02_several_returned_sequences(pair, lengths, source, delta):
    prompts, options = tiny.ragged_prompts(lengths), GREEDY | {"do_sample": True, "num_return_sequences": 3}
    texts = pair[0].generate(**prompts.inputs, **options, **drafts(pair, source), cactus_delta=delta)
    assert texts.shape == (3 * len(lengths), max(lengths) + 24)
    for row in texts.view(len(lengths), 3, -1):
        assert len({tuple(text.tolist()) for text in row}) == 3


@DELTAS
@SOURCES
@pytest.mark.parametrize("lengths", ((6,), (4, 6, 5)), ids=("one row", "batch"))
def test_r03_stop_strings(lengths, source, delta):
    """Strings of two bytes, which two tokens of a block make up together."""
    tokenizer, prompts = tiny.byte_tokenizer(), tiny.ragged_prompts(lengths)
    model = tiny.model("llama")  # its ids are those of visible characters
    target, draft = cactus_hf.enable(copy.copy(model)), tiny.perturbed(model, 0.02)
    options = {
        **prompts.inputs,
        **greedy(source),
        "eos_token_id": tiny.EOS,
    }  # without one, plain ends leave no padding
    text = model.generate(**options)[0, max(lengths) :]
    for last in (2, 5, 9, 13):
        stops = {"stop_strings": [tokenizer.decode(text[last - 1 : last + 1])], "tokenizer": tokenizer}
        ours = target.generate(**options, **stops, **drafts((target, draft), source), cactus_delta=delta)
        assert torch.equal(ours, model.generate(**options, **stops))


class Streamer:
    def __init__(self):
        self.puts: list[torch.Tensor] = []

    def put(self, tokens):
        self.puts.append(tokens)

    def end(self):
        pass


@BATCHES
@DELTAS
@SOURCES
def test_r04_criteria_inside_a_block(pair, lengths, source, delta):
    prompts, num_accepted = tiny.ragged_prompts(lengths), 0
    options = {**prompts.inputs, **greedy(source), "eos_token_id": tiny.EOS, "return_dict_in_generate": True}
    text = pair[0].generate(**options).sequences[0, max(lengths) :].tolist()
    for end in text[1:14:3]:
        options["stopping_criteria"] = StoppingCriteriaList([lambda ids, scores, end=end, **_: ids[:, -1] == end])
        streamer = Streamer() if len(lengths) == 1 else None
        ours = pair[0].generate(**options, **drafts(pair, source), cactus_delta=delta, streamer=streamer)
        assert torch.equal(ours.sequences, pair[0].generate(**options).sequences)
        rows = ours.sequences[:, max(lengths) :].tolist()
        counts = [min(row.index(e) + 1 if e in row else 24 for e in (end, tiny.EOS)) for row in rows]
        assert ours.speculation.emitted.tolist() == counts
        assert ours[CACHE_NAME].get_seq_length() == ours.sequences.shape[1] - 1
        num_accepted += int(ours.speculation.accepted.sum())
        if streamer is not None:
            assert torch.cat([tokens.flatten() for tokens in streamer.puts]).tolist() == ours.sequences[0].tolist()
    assert num_accepted > len(lengths), "or no stop was inside a block"


@BATCHES
@DELTAS
@SOURCES
def test_r05_ends_of_sequence_inside_a_block(pair, lengths, source, delta):
    prompts = tiny.ragged_prompts(lengths)
    text = pair[0].generate(**prompts.inputs, **greedy(source))[0, max(lengths) :].tolist()
    for end in (text[1], text[6], text[13], [text[8], text[4]]):
        options = {**prompts.inputs, **greedy(source), "eos_token_id": end}
        ours = pair[0].generate(**options, **drafts(pair, source), cactus_delta=delta)
        assert torch.equal(ours, pair[0].generate(**options))


@DELTAS
@pytest.mark.parametrize("do_sample", (False, True))
def test_r10_one_tokenizer_and_two_paddings_of_it(do_sample, delta):
    """The tokenizers given or not; the draft's module, which stock rebuilds, stays as it is."""
    tokenizer, prompts = tiny.word_tokenizer(vocab=60), tiny.ragged_prompts((5, 17, 9), vocab=60)
    target = cactus_hf.enable(tiny.ARCHITECTURES["llama"].build(vocab=72))
    for vocab, tokenizers in product((64, 80), ({}, {"tokenizer": tokenizer, "assistant_tokenizer": tokenizer})):
        draft = tiny.ARCHITECTURES["llama"].build(vocab=vocab, seed=5)
        modules, state = [type(module) for module in draft.modules()], copy.deepcopy(draft.state_dict())
        options = {**prompts.inputs, **GREEDY, "do_sample": do_sample, **tokenizers, "cactus_delta": delta}
        for _ in range(2):  # a second call crashes stock
            text = target.generate(**options, assistant_model=draft)
            assert (text < 72).all()
            if not do_sample:
                assert torch.equal(text, target.generate(**prompts.inputs, **GREEDY))
        assert [type(module) for module in draft.modules()] == modules
        assert all(torch.equal(value, state[name]) for name, value in draft.state_dict().items())


@DELTAS
@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("lengths", ((26,), (5, 26, 9)), ids=("one row", "batch"))
def test_r11_windows_of_either_model(lengths, attention, delta):
    windowed, full = tiny.model("mistral", attention), tiny.model("llama", attention)
    prompts, options = tiny.ragged_prompts(lengths), GREEDY
    for target, other in ((windowed, tiny.perturbed(windowed)), (windowed, full), (full, windowed)):
        own = cactus_hf.enable(copy.copy(target))
        plain = target.generate(**prompts.inputs, **options)
        for source in ("assistant", "lookup"):
            ours = own.generate(**prompts.inputs, **options, **drafts((own, other), source), cactus_delta=delta)
            assert torch.equal(ours, plain)


@BATCHES
@DELTAS
@pytest.mark.parametrize("turns", ((False, True), (True, False), (True, True)), ids=str)
def test_r13_turns_plain_and_speculative(pair, lengths, turns, delta):
    """Whoever filled the cache, it holds what plain turns leave, and the logits are those of the whole text."""
    prompts = tiny.ragged_prompts(lengths)
    options = GREEDY | {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    cache, text, mask = DynamicCache(config=pair[0].config), prompts.input_ids, prompts.attention_mask
    for is_speculative in turns:
        own = {**drafts(pair, "assistant"), "cactus_delta": delta} if is_speculative else {}
        plain = tiny.model("llama").generate(text, attention_mask=mask, **options)
        ours = pair[0].generate(text, attention_mask=mask, **options, **own, **{CACHE_NAME: cache})
        assert torch.equal(ours.sequences, plain.sequences)
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), atol=1e-3, rtol=1e-3)
        cache = ours[CACHE_NAME]
        assert cache.get_seq_length() == ours.sequences.shape[1] - 1
        text = torch.cat([ours.sequences, prompts.input_ids[:, -2:]], 1)
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)


@BATCHES
@DELTAS
@SOURCES
@pytest.mark.parametrize("has_end", (False, True))
def test_r15_scores_and_transition_scores(pair, lengths, source, delta, has_end):
    prompts = tiny.ragged_prompts(lengths)
    end = int(tiny.plain_greedy(tiny.model("llama"), prompts, 10)[0][9])
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options |= {**prompts.inputs, **GREEDY, "eos_token_id": end if has_end else None}
    plain = pair[0].generate(**options)
    ours = pair[0].generate(**options, **drafts(pair, source), cactus_delta=delta)
    is_text = torch.arange(len(plain.scores)) < ours.speculation.emitted[:, None]
    for name in ("scores", "logits"):
        one, other = (torch.stack(output[name], 1)[is_text] for output in (plain, ours))
        torch.testing.assert_close(other, one, atol=1e-3, rtol=1e-3)
    one, other = (
        pair[0].compute_transition_scores(output.sequences, output.scores, normalize_logits=True)[is_text]
        for output in (plain, ours)
    )
    torch.testing.assert_close(other, one, atol=1e-3, rtol=1e-3)


@DELTAS
@SOURCES
def test_r15_streamers(pair, source, delta):
    prompt, streamer, text = tiny.ragged_prompts((9,)), Streamer(), TextIteratorStreamer(tiny.word_tokenizer())
    for each in (streamer, text):
        output = pair[0].generate(**prompt.inputs, **GREEDY, **drafts(pair, source), cactus_delta=delta, streamer=each)
    assert all(tokens.dim() == 1 for tokens in streamer.puts[1:]), "behind the prompt, as plain generation puts them"
    assert torch.cat([tokens.flatten() for tokens in streamer.puts]).tolist() == output[0].tolist()
    assert "".join(text).split() == tiny.word_tokenizer().decode(output[0]).split()


@BATCHES
@DELTAS
@pytest.mark.parametrize("schedule", ("constant", "heuristic"))
def test_r19_calls_leave_nothing_behind(pair, lengths, schedule, delta):
    target, draft = pair
    draft.generation_config.num_assistant_tokens_schedule = schedule
    configs = [copy.deepcopy(model.generation_config.to_dict()) for model in pair]
    options = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.2, "min_new_tokens": 3, "cactus_delta": delta}
    texts = []
    for _ in range(3):
        torch.manual_seed(7)
        inputs = {**tiny.ragged_prompts(lengths).inputs, **GREEDY, "do_sample": True}
        texts.append(target.generate(**inputs, **options, assistant_model=draft))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert [model.generation_config.to_dict() for model in pair] == configs


@BATCHES
@DELTAS
@SOURCES
def test_r25_bfloat16(lengths, source, delta):
    """Where the texts part, plain decoding was all but undecided: blocks and batches round differently."""
    model, draft = tiny.pair("llama", eps=0.02, dtype=torch.bfloat16)
    target = cactus_hf.enable(copy.copy(model))
    for seed in range(8):
        prompts = tiny.ragged_prompts(lengths, seed=seed)
        options = {**prompts.inputs, **GREEDY}
        plain = model.generate(**options, return_dict_in_generate=True, output_logits=True)
        ours = target.generate(**options, **drafts((target, draft), source), cactus_delta=delta)
        for row, (one, other) in enumerate(zip(plain.sequences, ours, strict=True)):
            if not torch.equal(one, other):
                place = int((one != other).long().argmax())
                logits = plain.logits[place - max(lengths)][row]
                # 8 bits of mantissa: one step at logits of 8 to 16 is 1/16
                assert logits[one[place]] - logits[other[place]] <= 0.25


def test_the_other_cases_are_where_they_are_said_to_be():
    assert all(has_test(name) for name in ELSEWHERE.values())
    here = (re.match(r"test_?(r\d\d)", name, re.IGNORECASE) for name in globals())
    cases = {name[:3] for name in ELSEWHERE} | {match[1].lower() for match in here if match}
    gone = {14, 20, 22, 24, 26}  # numbers that were never given
    assert cases == {f"r{number:02}" for number in range(1, 29) if number not in gone}
