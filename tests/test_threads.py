"""Calls at the same time, from several threads or asyncio tasks: each is what it would be alone."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer

import cactus_hf
import tiny


OPTIONS = {
    "do_sample": True, "cactus_delta": 0.5, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": tiny.PAD,
}  # fmt: skip
SOURCES = ("draft", "early exit", "lookup")


@pytest.fixture
def pairs():
    """Enabled targets of two families, with drafts."""
    return [(cactus_hf.enable(copy.copy(target)), draft) for target, draft in map(tiny.pair, ("qwen3", "gemma3"))]


def text(pair, source: str, seed: int, **options) -> list[list[int]]:
    """A ragged batch of three rows, its seeds made from `seed`."""
    target, draft = pair
    sources = {
        "draft": {"assistant_model": draft},
        "early exit": {"assistant_early_exit": 1},
        "lookup": {"prompt_lookup_num_tokens": 3},
    }
    seeds = [seed, seed + 100, seed + 200]
    prompts = tiny.ragged_prompts((4, 9, 6), seed=seed)
    return target.generate(**prompts.inputs, generator=seeds, **sources[source] | OPTIONS | options).tolist()


def together(*functions) -> list:
    """The results of functions that begin at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


def test_two_models_and_one_model_twice(pairs):
    cases = list(itertools.product(pairs, SOURCES, (1, 2)))
    expected = [text(*case) for case in cases]
    for _ in range(2):
        assert together(*(lambda case=case: text(*case) for case in cases)) == expected


def test_a_model_that_is_its_own_draft(pairs):
    (target, _), *_ = pairs
    cases = [((target, target), "draft", seed) for seed in range(4)]
    assert together(*(lambda case=case: text(*case) for case in cases)) == [text(*case) for case in cases]


def test_track_collects_the_calls_of_its_own_thread(pairs):
    def tracked(number: int):
        with cactus_hf.track() as stats:
            for seed in range(number):
                text(pairs[0], "lookup", seed)
        return len(stats)

    with cactus_hf.track() as outer:
        assert together(*(lambda n=n: tracked(n) for n in (1, 2, 3))) == [1, 2, 3]
    assert outer == []


def test_models_are_enabled_and_disabled_while_others_generate(pairs):
    expected = text(pairs[0], "draft", 1)
    is_over = threading.Event()

    def switch():
        models = [copy.copy(tiny.model("gemma3")) for _ in range(3)]
        while not is_over.is_set():
            cactus_hf.enable()
            for model in models:
                cactus_hf.enable(model)
            cactus_hf.disable()
            for model in models:
                cactus_hf.disable(model)

    def generate():
        try:
            return [text(pairs[0], "draft", 1) for _ in range(4)]
        finally:
            is_over.set()

    stock = tiny.model("gemma3")
    plain = tiny.plain_greedy(stock, tiny.ragged_prompts(), 12)
    texts, _, again = together(generate, switch, lambda: tiny.plain_greedy(stock, tiny.ragged_prompts(), 12))
    assert texts == [expected] * 4
    assert [row.tolist() for row in again] == [row.tolist() for row in plain]
    assert type(stock).generate is type(pairs[0][0]).generate, "transformers' classes are as they were"
    assert not any(hasattr(getattr(type(stock), name), "cactus_hf_stock") for name in dir(type(stock)))


def test_one_model_is_enabled_by_many_threads():
    for _ in range(20):
        model = copy.copy(tiny.model("gemma3"))
        together(*[lambda model=model: cactus_hf.enable(model)] * 8)
        assert type(model).__mro__[2] is type(tiny.model("gemma3"))


def streamed(pair, streamer, seed: int) -> torch.Tensor:
    target, draft = pair
    inputs = tiny.ragged_prompts((5,), seed=seed).inputs
    return target.generate(**inputs, assistant_model=draft, streamer=streamer, generator=[seed], **OPTIONS)


def test_text_is_streamed_from_threads(pairs):
    tokenizer = tiny.word_tokenizer()
    streamers = [TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60) for _ in range(3)]
    expected = [tokenizer.decode(streamed(pairs[0], None, seed)[0, 5:]) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for seed, streamer in enumerate(streamers):
            pool.submit(streamed, pairs[0], streamer, seed)
        texts = ["".join(streamer) for streamer in streamers]
    assert [text.split() for text in texts] == [text.split() for text in expected]


def test_text_is_streamed_into_asyncio_tasks(pairs):
    tokenizer = tiny.word_tokenizer()
    expected = [tokenizer.decode(streamed(pairs[0], None, seed)[0, 5:]) for seed in range(3)]

    async def collect(seed: int) -> tuple[str, int]:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        with cactus_hf.track() as stats:  # the thread that a task starts belongs to the task
            call = asyncio.create_task(asyncio.to_thread(streamed, pairs[0], streamer, seed))
            text = "".join([part async for part in streamer])
            await call
        return text, len(stats)

    async def all_of_them() -> list[tuple[str, int]]:
        return await asyncio.gather(*map(collect, range(3)))

    assert [(text.split(), count) for text, count in asyncio.run(all_of_them())] == [
        (text.split(), 1) for text in expected
    ]
