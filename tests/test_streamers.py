"""Streamers get what plain decoding gives them, in the same calls: greedily the same text, never one taken back."""

from __future__ import annotations

import asyncio
import inspect
import threading
import types
from queue import Empty

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import BaseStreamer, streamers

import cactus_hf
import tiny


TEXT_STREAMERS = [
    cls
    for _, cls in inspect.getmembers(streamers, inspect.isclass)
    if issubclass(cls, TextStreamer) and not hasattr(cls, "__iter__") and not hasattr(cls, "__aiter__")
]
GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": tiny.PAD}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_tokenizer()


@pytest.fixture(scope="module")
def pair(tokenizer):
    target = tiny.ARCHITECTURES["qwen3"].build(vocab=len(tokenizer))
    return cactus_hf.enable(target), tiny.perturbed(target, 0.05)


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return tokenizer("In a desert\nat night, ", return_tensors="pt")


@pytest.fixture(params=({}, {"cactus_delta": 1.0}), ids=("plain", "ours"))
def drafting(request, pair):
    """Nothing, or what makes a call one of ours."""
    return {**request.param, "assistant_model": pair[1]} if request.param else {}


class Recording(BaseStreamer):
    """Writes down its calls."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((tuple(value.shape), str(value.device), value.dtype, value.flatten().tolist()))

    def end(self):
        self.calls.append("end")


def both(pair, prompt, make, **options):
    """The streamers of a plain call and of one of ours, and the two texts."""
    target, draft = pair
    streamed, texts = [], []
    for drafting in ({}, {"assistant_model": draft, "cactus_delta": 1.0, "num_assistant_tokens": 7}):
        streamer = make()
        texts.append(target.generate(**prompt, **GREEDY | options, **drafting, streamer=streamer))
        streamed.append(streamer)
    return streamed, texts


def ends(pair, prompt, tokenizer):
    """Ways to stop: none, an end and a stop string inside a block, a criterion, and each at the first token."""
    text = pair[0].generate(**prompt, **GREEDY)[0, prompt["input_ids"].shape[1] :].tolist()
    word, first = tokenizer.decode(text[9:11]), tokenizer.decode(text[:1])
    return [
        {},
        {"eos_token_id": text[7]},
        {"eos_token_id": text[0]},
        {"stop_strings": [word], "tokenizer": tokenizer},
        {"stop_strings": [first], "tokenizer": tokenizer},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] == text[10]])},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: True])},
        {"max_new_tokens": 1},
    ]


@pytest.mark.parametrize("way", range(8))
def test_every_call_is_that_of_plain_decoding(pair, prompt, tokenizer, way):
    options = ends(pair, prompt, tokenizer)[way]
    (plain, ours), texts = both(pair, prompt, Recording, **options)
    assert torch.equal(*texts)
    assert ours.calls == plain.calls
    assert ours.calls.count("end") == 1 and ours.calls[-1] == "end"
    assert all(call[:2] == ((1,), "cpu") for call in ours.calls[1:-1])


@pytest.mark.parametrize("cls", TEXT_STREAMERS)
@pytest.mark.parametrize(
    "options", ({}, {"skip_prompt": True}, {"skip_prompt": True, "skip_special_tokens": True}), ids=str
)
def test_printed_text(pair, prompt, tokenizer, capsys, cls, options):
    printed = []
    for way in ends(pair, prompt, tokenizer)[:4]:
        for draft in ({}, {"assistant_model": pair[1], "cactus_delta": 1.0}):
            pair[0].generate(**prompt, **GREEDY | way, **draft, streamer=cls(tokenizer, **options))
            printed.append(capsys.readouterr().out)
    assert printed[::2] == printed[1::2] and all(printed)


def test_iterated_pieces(pair, prompt, tokenizer):
    for skip_prompt in (False, True):
        pieces, _ = both(pair, prompt, lambda: TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=30))  # noqa: B023
        plain, ours = (list(streamer) for streamer in pieces)
        assert plain == ours and len(ours) > 5


def test_iterated_from_another_thread(pair, prompt, tokenizer):
    target, draft = pair
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    call = {**prompt, **GREEDY, "assistant_model": draft, "cactus_delta": 1.0, "streamer": streamer}
    thread = threading.Thread(target=target.generate, kwargs=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = target.generate(**prompt, **GREEDY)[0, prompt["input_ids"].shape[1] :]
    assert text == tokenizer.decode(expected)


def test_iterated_asynchronously(pair, prompt, tokenizer):
    async def pieces(**drafting):
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
        call = {**prompt, **GREEDY, **drafting, "streamer": streamer}
        running = asyncio.get_running_loop().run_in_executor(None, lambda: pair[0].generate(**call))
        result = [piece async for piece in streamer]
        await running
        return result

    if not hasattr(asyncio, "timeout"):
        pytest.skip("transformers' asynchronous streamer needs Python 3.11")
    assert asyncio.run(pieces()) == asyncio.run(pieces(assistant_model=pair[1], cactus_delta=1.0))


def test_sampled_text_is_the_one_returned(pair, prompt):
    target, draft = pair
    streamer = Recording()
    text = target.generate(
        **prompt,
        **GREEDY | {"do_sample": True, "top_k": 5, "eos_token_id": list(range(50, 90))},
        assistant_model=draft,
        cactus_delta=0.5,
        streamer=streamer,
    )
    assert [token for call in streamer.calls[:-1] for token in call[-1]] == text[0].tolist()


class TestRefusedAsByPlainDecoding:
    """After the prompt has been put, as plain decoding puts it before anything else."""

    def test_batches(self, pair, tokenizer, drafting):
        prompts = tiny.ragged_prompts((3, 3), vocab=len(tokenizer)).inputs
        with pytest.raises(ValueError, match="batch size 1"):
            pair[0].generate(**prompts, **GREEDY, **drafting, streamer=TextStreamer(tokenizer))

    def test_several_sequences(self, pair, prompt, tokenizer, drafting):
        options = GREEDY | {"do_sample": True, "num_return_sequences": 3}
        with pytest.raises(ValueError, match="batch size 1"):
            pair[0].generate(**prompt, **options, **drafting, streamer=TextStreamer(tokenizer))

    def test_a_users_streamer_gets_no_batch_either(self, pair, tokenizer):
        prompts = tiny.ragged_prompts((3, 3), vocab=len(tokenizer)).inputs
        with pytest.raises(ValueError, match="one row, but there are 2.*one at a time"):
            pair[0].generate(**prompts, **GREEDY, assistant_model=pair[1], cactus_delta=1.0, streamer=Recording())


class TestExceptions:
    """As in plain decoding the streamer is not told: one that waits does so for its `timeout`."""

    @pytest.mark.parametrize("where", ("put", "processor", "criterion"))
    def test_end_is_not_called(self, pair, prompt, drafting, where):
        class Fails(Recording):
            def put(self, value):
                super().put(value)
                if where == "put" and len(self.calls) == 4:
                    raise KeyError("put")

        def processor(ids, scores):
            if where == "processor" and ids.shape[1] > prompt["input_ids"].shape[1] + 5:
                raise KeyError("processor")
            return scores

        def criterion(ids, scores, **_):
            if where == "criterion" and ids.shape[1] > prompt["input_ids"].shape[1] + 5:
                raise KeyError("criterion")
            return False

        streamer = Fails()
        hooks = {"logits_processor": [processor], "stopping_criteria": StoppingCriteriaList([criterion])}
        with pytest.raises(KeyError, match=where):
            pair[0].generate(**prompt, **GREEDY, **hooks, **drafting, streamer=streamer)
        assert "end" not in streamer.calls

    def test_a_consumer_waits_for_its_timeout(self, pair, prompt, tokenizer, drafting):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=0.05)
        criteria = StoppingCriteriaList([lambda ids, scores, **_: 1 / 0])
        with pytest.raises(ZeroDivisionError):
            pair[0].generate(**prompt, **GREEDY, **drafting, streamer=streamer, stopping_criteria=criteria)
        with pytest.raises(Empty):
            list(streamer)

    def test_the_next_call_is_none_the_wiser(self, pair, prompt, drafting):
        expected = pair[0].generate(**prompt, **GREEDY)
        broken = types.SimpleNamespace(put=lambda value: 1 / 0, end=lambda: None)
        with pytest.raises(ZeroDivisionError):
            pair[0].generate(**prompt, **GREEDY, **drafting, streamer=broken)
        assert torch.equal(pair[0].generate(**prompt, **GREEDY, **drafting), expected)
