"""Exceptions in the middle of a call: they come through, and leave all that the next call needs as it was."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor

import cactus_hf
import tiny
from cactus_hf.host import CACHE_NAME


OPTIONS = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": tiny.PAD, "num_assistant_tokens": 3}
PLACES = ("criterion", "processor target", "processor draft", "target", "draft")


class Fuse:
    """Raises at its call number `last`, and at every later one."""

    def __init__(self, error: type[BaseException], last: int):
        self.error, self.left = error, last

    def __call__(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise self.error("fuse")


class Streamer:
    def __init__(self, fuse: Fuse):
        self.fuse, self.puts = fuse, []

    def put(self, tokens):
        self.fuse()
        self.puts.append(tokens)

    def end(self):
        pass


def criterion(fuse: Fuse):
    def ask(input_ids, scores, **kwargs):
        fuse()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    return ask


def processor(fuse: Fuse, reading: list[str], side: str):
    """Counts the calls in which it is given the scores of the target, or those of the draft."""

    def process(input_ids, scores):
        if reading[-1] == side:
            fuse()
        return scores

    return process


@pytest.fixture
def pair():
    target, draft = tiny.pair("gemma3")
    return cactus_hf.enable(copy.deepcopy(target)), copy.deepcopy(draft)


def state(model) -> tuple:
    hooks = [name for module in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")
             if getattr(module, name)]  # fmt: skip
    return (
        type(model), model.training, model.config.to_dict(), model.generation_config.to_dict(), hooks,
        [(name, id(module), type(module)) for name, module in model.named_modules()],
        sorted(vars(model)), [(name, value.clone()) for name, value in model.state_dict().items()],
    )  # fmt: skip


def assert_same_state(one: tuple, other: tuple) -> None:
    assert one[:-1] == other[:-1]
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one[-1], other[-1], strict=True))


@contextlib.contextmanager
def watched(target, draft):
    """A list to which "target" or "draft" is added with every forward pass."""
    reading: list[str] = []
    handles = [
        model.register_forward_hook(lambda *_, name=name: reading.append(name))
        for name, model in (("target", target), ("draft", draft))
    ]
    try:
        yield reading
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def breaking(module, fuse: Fuse):
    handle = module.register_forward_hook(lambda *_: fuse())
    try:
        yield
    finally:
        handle.remove()


def interrupted(place: str, fuse: Fuse, target, draft, prompts, **options) -> None:
    """A call of which `fuse` makes an end at `place`."""
    draft_options = {"assistant_model": draft} if draft is not None else {"assistant_early_exit": 1}
    call = OPTIONS | prompts.inputs | draft_options | {"cactus_delta": 0.5} | options
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(fuse.error, match="fuse"))
        if place == "streamer":
            call["streamer"] = Streamer(fuse)
        elif place == "criterion":
            call["stopping_criteria"] = [criterion(fuse)]
        elif place.startswith("processor"):
            reading = stack.enter_context(watched(target, draft))
            call["logits_processor"] = [processor(fuse, reading, place.split()[1])]
        else:
            model = {"target": target, "draft": draft}[place]
            stack.enter_context(breaking(model.model.layers[-1].mlp, fuse))
        target.generate(**call)


@pytest.mark.parametrize(
    ("place", "rows", "error"),
    [("streamer", 1, error) for error in (RuntimeError, KeyboardInterrupt, GeneratorExit)]
    + [(place, rows, error) for place in PLACES for rows, error in ((1, RuntimeError), (3, KeyboardInterrupt))],
)
def test_models_are_left_as_they_were(pair, place, rows, error):
    target, draft = pair
    prompts = tiny.ragged_prompts((9, 4, 17)[:rows])
    options = prompts.inputs | OPTIONS | {"assistant_model": draft, "cactus_delta": 0.5, "do_sample": True}
    before, expected = [state(model) for model in pair], target.generate(**options, generator=list(range(rows)))
    for last in (1, 2, 5):
        with cactus_hf.track() as stats:
            interrupted(place, Fuse(error, last), target, draft, prompts, do_sample=True)
            assert stats == []
            assert torch.equal(target.generate(**options, generator=list(range(rows))), expected)
            assert len(stats) == 1
    for model, was in zip(pair, before, strict=True):
        assert_same_state(state(model), was)


@pytest.mark.parametrize("last", (1, 2, 5))
def test_early_exit_leaves_the_target_whole(pair, last):
    target, _ = pair
    prompts, before = tiny.ragged_prompts((9, 4, 17)), state(target)
    plain = tiny.plain_greedy(target, prompts, 16)
    with pytest.raises(RuntimeError, match="fuse"), breaking(target.model.layers[0].mlp, Fuse(RuntimeError, last)):
        target.generate(**prompts.inputs, **OPTIONS, assistant_early_exit=1, cactus_delta=0.5)
    assert_same_state(state(target), before)
    ours = target.generate(**prompts.inputs, **OPTIONS, assistant_early_exit=1, cactus_delta=0.5, do_sample=False)
    assert ours[:, 17:].tolist() == torch.stack(plain).tolist()


def test_rows_decoded_one_after_another():
    target, draft = tiny.pair("bloom", "eager")
    target, prompts = cactus_hf.enable(copy.deepcopy(target)), tiny.ragged_prompts((9, 4))
    before, call = state(target), prompts.inputs | OPTIONS | {"assistant_model": draft, "cactus_delta": 0.5}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*one after another")
        expected = target.generate(**call)
        for last in (1, 5, 12):  # in the first row, and in the second
            with pytest.raises(RuntimeError, match="fuse"), breaking(target.lm_head, Fuse(RuntimeError, last)):
                target.generate(**call)
            assert torch.equal(target.generate(**call), expected)
    assert_same_state(state(target), before)


@pytest.mark.parametrize("name", ("gemma3", "falcon_alibi"))  # the second takes one row at a time
def test_a_cache_passed_in_holds_the_prompt(name):
    model, draft = tiny.pair(name)
    target, prompt = cactus_hf.enable(copy.copy(model)), tiny.ragged_prompts((9,))
    expected = DynamicCache(config=model.config)
    model(**prompt.inputs, **{CACHE_NAME: expected})
    for last in (2, 4, 6):
        cache, streamer = DynamicCache(config=model.config), Streamer(Fuse(KeyboardInterrupt, last))
        call = OPTIONS | {"cactus_delta": 0.5, "assistant_model": draft, "do_sample": False, CACHE_NAME: cache}
        with pytest.raises(KeyboardInterrupt):
            target.generate(**prompt.inputs, **call, streamer=streamer)
        assert cache.get_seq_length() == 9
        for one, other in zip(cache.layers, expected.layers, strict=True):
            assert torch.equal(one.keys[:, :, -7:], other.keys[:, :, -7:])
            assert torch.equal(one.values[:, :, -7:], other.values[:, :, -7:])
        # The next turn, behind what was streamed
        text = torch.cat([*(put.flatten() for put in streamer.puts), torch.arange(40, 46)])[None]
        assert torch.equal(target.generate(text, **call), model.generate(text, **OPTIONS, do_sample=False))


class Counting(LogitsProcessor):
    """Remembers the lengths it has seen."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        return scores.roll(len(self.lengths) % 3)


@pytest.mark.parametrize("rows", (1, 3))
def test_a_processor_that_remembers_has_seen_committed_text_only(pair, rows):
    target, draft = pair
    prompts, processor = tiny.ragged_prompts((9, 4, 17)[:rows]), Counting()
    interrupted("target", Fuse(RuntimeError, 4), target, draft, prompts, logits_processor=[processor])
    width = prompts.input_ids.shape[1]
    # In a batch rows have copies; alone, it has been called as plain decoding would have called it up to there
    assert processor.lengths == ([] if rows > 1 else list(range(width, width + len(processor.lengths))))
    assert rows > 1 or processor.lengths


WORDS = [[4 + (i * 31 + j * 17 + i * j) % 90 for j in range(5)] + [tiny.EOS] for i in range(60)]


def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
    """What may follow, in a dictionary of words behind a prompt of 17; anything else is an error."""
    begin = ids[17:].tolist()
    following = sorted({word[len(begin)] for word in WORDS if word[: len(begin)] == begin and word != begin})
    if not following:
        raise KeyError(f"no word begins like {begin}")
    return following


class Dictionary(LogitsProcessor):
    def __call__(self, input_ids, scores):
        mask = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids):
            mask[row, allowed(row, ids)] = 0.0
        return scores + mask


class TestDraftsThatAProcessorDoesNotTake:
    """Behind an end, or looked up from elsewhere. Plain decoding would not come to them, so they are no errors."""

    @pytest.mark.parametrize("source", ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"))
    @pytest.mark.parametrize("options", (
        {"prefix_allowed_tokens_fn": allowed}, {"logits_processor": [Dictionary()]},
        {"prefix_allowed_tokens_fn": allowed, "renormalize_logits": True, "eta_cutoff": 0.01, "top_p": 0.9},
    ), ids=("function", "processor", "others behind it"))  # fmt: skip
    @pytest.mark.parametrize("rows", (1, 3))
    def test_texts(self, pair, source, options, rows):
        target, draft = pair
        prompts = tiny.ragged_prompts((17, 9, 4)[:rows])
        prompts.input_ids[:, -6:] = torch.tensor([WORDS[3][:2] + WORDS[7][2:4] + WORDS[3][:2]])  # to be looked up
        call = prompts.inputs | options | {"max_new_tokens": 12, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
        draft = {source: {"assistant_model": draft, "prompt_lookup_num_tokens": 3}.get(source, 1)}
        greedy = [call | {"do_sample": False} | extra for extra in ({}, draft | {"cactus_delta": 0.5})]
        if "top_p" not in options:
            assert torch.equal(*(target.generate(**each) for each in greedy))
        for seed in range(8):
            text = target.generate(
                **call, **draft, do_sample=True, cactus_delta=0.5, generator=[seed + 10 * row for row in range(rows)]
            )
            assert all(row in WORDS for row in text[:, 17:].tolist())

    def test_what_the_text_itself_comes_to_is_an_error(self, pair):
        target, draft = pair
        call = tiny.ragged_prompts((17,)).inputs | OPTIONS | {"assistant_model": draft, "cactus_delta": 0.5}
        with pytest.raises(KeyError, match="no word begins like"):  # nothing ends the text where the word ends
            target.generate(**call, prefix_allowed_tokens_fn=allowed)
