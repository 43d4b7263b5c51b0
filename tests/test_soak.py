"""Many calls of all kinds in one process leave nothing behind: no tensor, thread, file, or setting of anything.

`CACTUS_HF_TEST_SOAK=2000 pytest tests/test_soak.py -s` makes 2,000 calls and prints what was counted.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, TextIteratorStreamer, pipeline
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.stopping_criteria import STOP_STRING_EMBEDDING_CACHE

import cactus_hf
import tiny
from cactus_hf.host import CACHE_NAME


NUM_CALLS = int(os.environ.get("CACTUS_HF_TEST_SOAK", "150"))
NAMES = ("llama", "gemma3", "gpt2", "falcon_alibi")  # the last one takes one row at a time
Models = dict[str, tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]]
TOKENIZER, BYTES = tiny.word_tokenizer(), tiny.byte_tokenizer()


class Calls:
    """Random calls. Each method makes one, and its name says what is special about it."""

    def __init__(self, models: Models, seed: int = 0):
        self.models, self.random = models, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.kinds = [name for name in vars(Calls) if not name.startswith("_")]

    def _one(self) -> None:
        kind = self.random.choice(self.kinds)
        self.counts[kind] += 1
        getattr(self, kind)()

    def _options(self, rows: int | None = None) -> tuple[PreTrainedModel, dict[str, Any]]:
        """A target, and what its `generate()` is to take."""
        pick = self.random
        target, near, far = self.models[pick.choice(NAMES)]
        prompts = tiny.ragged_prompts(tuple(pick.randint(1, 20) for _ in range(rows or pick.randint(1, 8))))
        source = pick.choice((
            {"assistant_model": near}, {"assistant_model": far}, {"assistant_model": target},
            {"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": pick.randint(1, 6)},
        ))  # fmt: skip
        rule = pick.choice((
            {"cactus_delta": pick.choice((0.0, 0.3, 2.0))}, {"acceptance_rule": cactus_hf.TopK(3)},
            {"acceptance_rule": cactus_hf.TypicalAcceptance()},
        ))  # fmt: skip
        ends = {
            "max_new_tokens": pick.randint(1, 12),
            "eos_token_id": pick.choice((None, [5, 6, 7])),
            "pad_token_id": 0,
        }
        return target, {**prompts.inputs, **source, **rule, **ends, "do_sample": pick.random() < 0.7}

    def batches(self) -> None:
        target, options = self._options()
        target.generate(**options)

    def everything_returned(self) -> None:
        target, options = self._options()
        options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        options |= {"output_hidden_states": self.random.random() < 0.5}
        with cactus_hf.track():
            target.generate(**options)

    def seeds_and_processors(self) -> None:
        target, options = self._options()
        options |= {"top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "do_sample": True}
        options |= {"num_return_sequences": 2, "generator": torch.Generator().manual_seed(1)}
        target.generate(**options)

    def processors_that_remember(self) -> None:
        target, options = self._options()
        target.generate(**options, logits_processor=[Counting()])

    def stop_strings(self) -> None:
        target, options = self._options()
        target.generate(**options, stop_strings=["%", "Q("], tokenizer=BYTES)

    def streamers(self) -> None:
        target, options = self._options(rows=1)
        streamer = TextIteratorStreamer(TOKENIZER, timeout=60)
        thread = threading.Thread(target=target.generate, kwargs=options | {"streamer": streamer})
        thread.start()
        assert "".join(streamer)
        thread.join()

    def caches(self) -> None:
        target, options = self._options(rows=1)
        cache = DynamicCache(config=target.config)
        for _ in range(2):
            text = target.generate(**options, **{CACHE_NAME: cache})
            text = torch.cat([text, torch.tensor([[9, 8]])], dim=1)
            options |= {"input_ids": text, "attention_mask": torch.ones_like(text)}

    def pipelines(self) -> None:
        _, options = self._options()
        target, near, _ = self.models["llama"]
        pipe = pipeline("text-generation", model=target, tokenizer=TOKENIZER, assistant_model=near)
        names = ("max_new_tokens", "do_sample", "pad_token_id")
        pipe(["w5 w6", "w7 w8 w9", "w4"], batch_size=2, cactus_delta=0.5, **{name: options[name] for name in names})

    def failures(self) -> None:
        target, options = self._options()
        left = self.random.randint(0, 9)

        def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return scores

        with contextlib.suppress(KeyboardInterrupt):
            target.generate(**options, logits_processor=[fail])

    def refusals(self) -> None:
        target, options = self._options()
        options |= self.random.choice(({"num_beams": 2}, {"use_cache": False}, {"generator": [1] * 99}))
        with pytest.raises(ValueError, match=r"num_beams|use_cache|99 seeds"):
            target.generate(**options)

    def plain_calls(self) -> None:
        target, options = self._options()
        for name in ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "cactus_delta",
                     "acceptance_rule"):  # fmt: skip
            options.pop(name, None)
        target.generate(**options)

    def enabling(self) -> None:
        cactus_hf.enable()
        target, options = self._options()
        cactus_hf.disable(target)
        target.generate(**options)
        cactus_hf.disable()
        cactus_hf.enable(target)


class Counting(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.roll(self.calls % 3, dims=-1)


@pytest.fixture
def models() -> Models:
    models = {
        name: (cactus_hf.enable(copy.deepcopy(target)), tiny.perturbed(target, 0.05), tiny.perturbed(target, 0.3))
        for name in NAMES
        for target in [tiny.model(name)]
    }
    for target, *_ in models.values():  # transformers gives models hooks for this, which stay
        target(torch.tensor([[5]]), output_hidden_states=True)
    return models


def held() -> dict[str, int]:
    """What the process holds, by kind; memory in bytes."""
    STOP_STRING_EMBEDDING_CACHE.clear()  # of transformers, which keeps the last eight
    gc.collect()
    objects = gc.get_objects()
    # `type`, as `isinstance` would ask proxies of transformers for what they stand for
    tensors = [each for each in objects if issubclass(type(each), torch.Tensor)]
    return {
        "tensors": len(tensors),
        "caches": sum(issubclass(type(each), (Cache, CacheLayerMixin)) for each in objects),
        "modules": sum(issubclass(type(each), torch.nn.Module) for each in objects),
        "classes": len(PreTrainedModel.__subclasses__()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
    }


def memory() -> int:
    """Resident memory in bytes; 0 where the system does not tell."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def settings(models: Models) -> list[Any]:
    """Everything that a call has no business to change."""
    classes = [cls for name in NAMES for cls in type(models[name][0]).__mro__ if cls is not object]
    own = [model for group in models.values() for model in group]
    return [
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), list(warnings.filters), transformers.logging.get_verbosity(),
        [(cls, dict(vars(cls))) for cls in classes],
        [(type(model), model.config.to_dict(), model.generation_config.to_dict(), list(vars(model))) for model in own],
        [(len(module._forward_hooks), len(module._forward_pre_hooks), type(module), module.training)
         for model in own for module in model.modules()],
    ]  # fmt: skip


@pytest.fixture
def empty_directory(tmp_path, monkeypatch) -> Iterator[Path]:
    """The working directory, and the place of temporary files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_left_behind(models, empty_directory):
    calls = Calls(models)
    for kind in calls.kinds:  # whatever is made once and kept, by transformers or torch
        for _ in range(2):
            getattr(calls, kind)()
    weights = [
        [value.clone() for value in model.state_dict().values()] for group in models.values() for model in group
    ]
    was, before, size = settings(models), held(), memory()
    for number in range(NUM_CALLS):
        calls._one()
        if number % 500 == 499:
            print(f"after {number + 1} calls: {memory() / 2**20:.1f} MiB, {held()}")
    after = held()  # of what was there before, other tests may have left some to be let go
    assert not {kind: (before[kind], count) for kind, count in after.items() if count > before[kind]}
    assert settings(models) == was
    for model, values in zip([model for group in models.values() for model in group], weights, strict=True):
        assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), values, strict=True))
    assert list(empty_directory.iterdir()) == []
    grown = (memory() - size) / 2**20
    print(f"{NUM_CALLS} calls ({dict(calls.counts)}) leave {before}, memory has grown by {grown:.1f} MiB")
    assert grown < 30  # the allocator keeps some: as much after 150 calls as after 2,000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"))
def test_caches_go_when_the_call_ends(models, name, source):
    """Without the garbage collector, which does not know how large they are."""
    target, near, _ = models[name]
    options = {source: {"assistant_model": near}.get(source, 1), "cactus_delta": 0.5, "max_new_tokens": 8}

    def count() -> int:
        return sum(issubclass(type(each), (Cache, CacheLayerMixin)) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = count()
        for rows in ((5,), (4, 9, 2)):
            target.generate(**tiny.ragged_prompts(rows).inputs, **options, pad_token_id=0)
        assert count() == before
    finally:
        gc.enable()


def test_greedy_calls_draw_no_random_numbers(models):
    for target, near, _ in models.values():
        state = torch.get_rng_state()
        for source in ({"assistant_model": near}, {"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3}):
            target.generate(
                **tiny.ragged_prompts((5,)).inputs, **source, cactus_delta=0.5, max_new_tokens=8, pad_token_id=0
            )
        assert torch.equal(torch.get_rng_state(), state)
