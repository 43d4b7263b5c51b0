"""What a call returns and hands out on the way: outputs, caches, streams."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer

import cactus_hf
import tiny
from cactus_hf import TokenKind
from cactus_hf.host import CACHE_NAME


SAMPLE = {"do_sample": True, "max_new_tokens": 15, "eos_token_id": None, "pad_token_id": tiny.PAD}


@pytest.fixture
def pair():
    target, draft = tiny.pair("qwen3")
    return cactus_hf.enable(copy.deepcopy(target)), draft


class TestOutput:
    def test_scores_are_the_targets_processed_logits(self, pair):
        target, draft = pair
        prompts = tiny.ragged_prompts()
        output = target.generate(
            **prompts.inputs,
            assistant_model=draft,
            cactus_delta=0.5,
            temperature=0.5,
            top_k=0,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **SAMPLE,
        )
        assert len(output.scores) == len(output.logits) == 15
        mask = torch.cat([prompts.attention_mask, torch.ones(4, 15, dtype=torch.long)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            logits = target(input_ids=output.sequences, attention_mask=mask, position_ids=positions).logits[:, 16:-1]
        torch.testing.assert_close(torch.stack(output.logits, 1), logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.stack(output.scores, 1), logits / 0.5, atol=1e-4, rtol=1e-4)

    def test_scores_of_finished_rows_are_zero(self, pair):
        target, draft = pair
        end = int(tiny.plain_greedy(tiny.model("qwen3"), tiny.ragged_prompts(), 3)[2][2])
        output = target.generate(
            **tiny.ragged_prompts().inputs,
            assistant_model=draft,
            cactus_delta=0.5,
            return_dict_in_generate=True,
            output_scores=True,
            **SAMPLE | {"do_sample": False, "eos_token_id": end},
        )
        ended = output.speculation.emitted.tolist()
        assert min(ended) < len(output.scores)
        for row, length in enumerate(ended):
            assert all(scores[row].any() for scores in output.scores[:length])
            assert not any(scores[row].any() for scores in output.scores[length:])

    def test_kinds_cover_the_text(self, pair):
        target, draft = pair
        output = target.generate(
            **tiny.ragged_prompts().inputs,
            assistant_model=draft,
            cactus_delta=0.5,
            return_dict_in_generate=True,
            **SAMPLE,
        )
        kinds = output.speculation.kinds
        assert kinds.shape == (4, 15) and (kinds[:, 0] == TokenKind.FIRST).all()
        assert (kinds != TokenKind.PAD).all()
        stats = output.speculation
        is_draft = (kinds == TokenKind.ACCEPTED) | (kinds == TokenKind.BOOSTED)
        assert torch.equal(is_draft.sum(1), stats.accepted)


class TestReturnedCache:
    @pytest.mark.parametrize("name", ("qwen3", "mistral", "gemma3", "llama4", "deepseek_v3"))
    @pytest.mark.parametrize("lengths", ((17,), (6, 17, 9)), ids=("one row", "batch"))
    def test_equals_that_of_plain_generation(self, name, lengths):
        model, draft = tiny.pair(name)
        prompts = tiny.ragged_prompts(lengths)
        options = {**SAMPLE, "do_sample": False, "return_dict_in_generate": True}
        plain = model.generate(**prompts.inputs, **options)
        target = cactus_hf.enable(copy.copy(model))
        ours = target.generate(**prompts.inputs, **options, assistant_model=draft, cactus_delta=1.0)
        mask = torch.cat([prompts.attention_mask, torch.ones(len(lengths), 14, dtype=torch.long)], 1)
        assert ours[CACHE_NAME].get_seq_length() == ours.sequences.shape[1] - 1 == plain[CACHE_NAME].get_seq_length()
        for one, other in zip(plain[CACHE_NAME].layers, ours[CACHE_NAME].layers, strict=True):
            real = mask[:, -one.keys.shape[2] :].bool()[:, None, :, None]
            for a, b in ((one.keys, other.keys), (one.values, other.values)):
                torch.testing.assert_close(a * real, b * real, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("name", ("qwen3", "mistral", "falcon_alibi"))
    @pytest.mark.parametrize("lengths", ((17,), (6, 17, 9)), ids=("one row", "batch"))
    def test_serves_the_next_turn(self, name, lengths):
        model, draft = tiny.pair(name)
        if name == "falcon_alibi" and len(lengths) > 1:
            pytest.skip("ALiBi models take one row at a time")
        target = cactus_hf.enable(copy.copy(model))
        prompts = tiny.ragged_prompts(lengths)
        options = {**SAMPLE, "do_sample": False, "assistant_model": draft, "cactus_delta": 1.0}
        cache = DynamicCache(config=model.config)
        first = target.generate(**prompts.inputs, **options, **{CACHE_NAME: cache})
        assert cache.get_seq_length() == first.shape[1] - 1, "a cache passed in is filled"
        ids = torch.cat([first, torch.full((len(lengths), 4), 50)], 1)
        pads = ids.shape[1] - prompts.attention_mask.shape[1]
        mask = torch.nn.functional.pad(prompts.attention_mask, (0, pads), value=1)
        second = target.generate(ids, attention_mask=mask, **options, **{CACHE_NAME: cache})
        plain = model.generate(ids, attention_mask=mask, **SAMPLE | {"do_sample": False})
        assert torch.equal(second, plain)
        assert cache.get_seq_length() == second.shape[1] - 1

    @pytest.mark.parametrize("is_useless", (False, True), ids=("good draft", "useless draft"))
    @pytest.mark.parametrize("place", (0, 3, 6))
    def test_rows_that_ended_early_are_in_it(self, pair, place, is_useless):
        """The pads behind their end too: a next turn whose mask shows them finds what plain decoding has left."""
        target, draft = pair
        draft = tiny.ARCHITECTURES["qwen3"].build(seed=99) if is_useless else draft
        prompts = tiny.ragged_prompts()
        end = int(tiny.plain_greedy(tiny.model("qwen3"), prompts, 7)[2][place])
        options = {**SAMPLE, "do_sample": False, "eos_token_id": end, "return_dict_in_generate": True}
        plain = target.generate(**prompts.inputs, **options)
        ours = target.generate(**prompts.inputs, **options, assistant_model=draft, cactus_delta=1.0)
        assert torch.equal(plain.sequences, ours.sequences)
        ended = 17 + ours.speculation.emitted
        assert ended.min() < ended.max()
        for one, other in zip(plain[CACHE_NAME].layers, ours[CACHE_NAME].layers, strict=True):
            for row, pads in enumerate((12, 0, 8, 15)):
                for a, b in ((one.keys, other.keys), (one.values, other.values)):
                    torch.testing.assert_close(a[row, :, pads:], b[row, :, pads:], atol=1e-4, rtol=1e-4)


class Collecting:
    def __init__(self):
        self.puts, self.has_ended = [], False

    def put(self, tokens):
        self.puts.append(tokens)

    def end(self):
        self.has_ended = True


class TestStreaming:
    def stream(self, pair, streamer, **options):
        target, draft = pair
        return target.generate(
            torch.tensor([[5, 6, 7]]),
            assistant_model=draft,
            streamer=streamer,
            **SAMPLE | {"cactus_delta": 0.5} | options,
        )

    def test_tokens_come_as_they_are_committed(self, pair):
        streamer = Collecting()
        sequences = self.stream(pair, streamer)
        prompt, *blocks = streamer.puts
        assert prompt.shape == (1, 3) and streamer.has_ended
        assert all(block.dim() == 1 and block.device.type == "cpu" for block in blocks)
        assert torch.cat(blocks).tolist() == sequences[0, 3:].tolist()
        assert len(blocks[0]) == 1, "the first token does not wait for drafts"

    @pytest.mark.parametrize("schedule, is_early", [("constant", False), ("auto", True)])
    def test_the_first_token_does_not_wait_for_the_draft_to_read(self, pair, schedule, is_early):
        """Unless rounds are timed: none of them is to hold the reading."""
        streamer, reads = Collecting(), []

        def note(module, args, kwargs):
            reads.append((len(streamer.puts), kwargs["input_ids"].shape[1]))

        hook = pair[1].register_forward_pre_hook(note, with_kwargs=True)
        try:
            self.stream(pair, streamer, num_assistant_tokens_schedule=schedule, eos_token_id=None)
            first, width = reads[0]
            assert (first, width) == ((1, 3) if is_early else (2, 4)), (
                "it reads the prompt, with the first token if late"
            )
            assert all(each < width for _, each in reads[1:])
            reads.clear()
            self.stream(pair, None, num_assistant_tokens_schedule=schedule, max_new_tokens=1)
            assert bool(reads) == is_early, "a text of one token needs no draft"
        finally:
            hook.remove()

    def test_nothing_behind_the_end(self, pair):
        greedy = {"do_sample": False, "eos_token_id": None}
        end = int(self.stream(pair, None, **greedy)[0, 8])
        streamer = Collecting()
        sequences = self.stream(pair, streamer, **greedy | {"eos_token_id": end})
        assert torch.cat(streamer.puts[1:]).tolist() == sequences[0, 3:].tolist()
        assert streamer.puts[-1][-1] == end

    def test_text_streamers(self, pair, capsys):
        tokenizer = tiny.word_tokenizer()
        sequences = self.stream(pair, TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out.split() == tokenizer.decode(sequences[0, 3:]).split()
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        sequences = self.stream(pair, streamer)
        assert "".join(streamer).split() == tokenizer.decode(sequences[0, 3:]).split()

    def test_blocks_with_kinds_for_streamers_that_take_them(self, pair):
        class Kinds(Collecting):
            def put_block(self, tokens, kinds):
                self.puts.append((tokens, kinds))

        streamer = Kinds()
        output = self.stream(pair, streamer, return_dict_in_generate=True)
        _, *blocks = streamer.puts
        assert torch.cat([tokens for tokens, _ in blocks]).tolist() == output.sequences[0, 3:].tolist()
        assert torch.cat([kinds for _, kinds in blocks]).tolist() == output.speculation.kinds[0].tolist()


class TestStopping:
    class AfterToken(StoppingCriteria):
        def __init__(self, token):
            self.token = token

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == self.token

    @pytest.mark.parametrize("rows", (1, 4))
    def test_criteria_of_the_user_end_rows_inside_a_block(self, pair, rows):
        target, draft = pair
        prompts = tiny.ragged_prompts((5, 17, 9, 2)[:rows])
        token = int(tiny.plain_greedy(tiny.model("qwen3"), prompts, 8)[0][5])
        options = {**SAMPLE, "do_sample": False, "stopping_criteria": StoppingCriteriaList([self.AfterToken(token)])}
        ours = target.generate(
            **prompts.inputs, assistant_model=draft, cactus_delta=1.0, num_assistant_tokens=9, **options
        )
        # Plain decoding pads rows that only a criterion ended with whatever it goes on to write, so go row by row
        width = prompts.input_ids.shape[1]
        for index in range(rows):
            row = prompts.row(index)
            text = target.generate(**row.inputs, **options)[0, row.input_ids.shape[1] :]
            assert ours[index, width : width + len(text)].tolist() == text.tolist()
            assert (ours[index, width + len(text) :] == tiny.PAD).all()

    def test_stop_strings(self):
        """A string of two tokens, found inside a block; the same text as plain generation, up to the same token."""
        tokenizer = tiny.byte_tokenizer()
        model = tiny.ARCHITECTURES["qwen3"].build(vocab=len(tokenizer))
        draft = tiny.perturbed(model, 0.05)
        prompt = tiny.ragged_prompts((5,), vocab=len(tokenizer)).inputs
        options = {**SAMPLE, "do_sample": False, "tokenizer": tokenizer}
        text = model.generate(**prompt, **options)[0, 5:]
        stops = [tokenizer.decode(text[i : i + 2]) for i in (6, 3)]
        plain = model.generate(**prompt, **options, stop_strings=stops)
        target = cactus_hf.enable(model)
        ours = target.generate(**prompt, assistant_model=draft, cactus_delta=1.0, stop_strings=stops, **options)
        assert torch.equal(ours, plain) and plain.shape[1] < 5 + 15


@pytest.mark.parametrize("lengths", ((6, 6, 6), (6, 4, 9)))
def test_untested_models_are_tried_and_decode_batches_together(lengths, pair, monkeypatch):
    target, draft = pair
    options = {"assistant_model": draft, "cactus_delta": 0.5, "generator": [1, 2, 3], **SAMPLE}
    prompts = tiny.ragged_prompts(lengths).inputs
    expected = target.generate(**prompts, **options)
    monkeypatch.setattr("cactus_hf.host.Host.is_tested", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as where rows are decoded one after another
        assert torch.equal(target.generate(**prompts, **options), expected)


class TestBrokenModels:
    @pytest.mark.parametrize("value", (float("nan"), float("inf")))
    def test_a_broken_target_is_an_error_that_names_the_row(self, pair, value):
        target, draft = pair
        target.lm_head.weight.data[5] = value
        with pytest.raises(ValueError, match="row 0"):
            target.generate(**tiny.ragged_prompts().inputs, assistant_model=draft, cactus_delta=1.0, **SAMPLE)

    def test_a_broken_draft_costs_speed_only(self, pair):
        target, draft = pair[0], copy.deepcopy(pair[1])
        draft.lm_head.weight.data[5] = float("nan")
        with pytest.warns(RuntimeWarning, match="draft") as warned:
            output = target.generate(
                **tiny.ragged_prompts().inputs,
                assistant_model=draft,
                cactus_delta=1.0,
                return_dict_in_generate=True,
                **SAMPLE,
            )
        assert sum("draft" in str(w.message) for w in warned) == 1
        assert output.speculation.accepted.sum() == 0
        assert output.speculation.emitted.tolist() == [15] * 4
