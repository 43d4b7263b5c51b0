"""`generate(custom_generate=...)` with the folder under docs, on a model that was never enabled."""

from __future__ import annotations

import copy
import importlib.metadata
import shutil
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import cactus_hf
import tiny


FOLDER = Path(__file__).parents[1] / "docs" / "custom_generate"
TARGET, DRAFT = tiny.pair("llama", vocab=260)  # of `tiny.byte_tokenizer`
PROMPTS = tiny.ragged_prompts(vocab=260)
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD}
SAMPLE = {**GREEDY, "do_sample": True}


@pytest.fixture(autouse=True)
def modules_cache(monkeypatch, tmp_path):
    """Where transformers copies the folder's code, instead of the user's cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    try:
        importlib.metadata.version("cactus_hf")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("transformers looks for the packages of requirements.txt, and cactus_hf is not installed")


def custom(model, *args, **options):
    return model.generate(*args, custom_generate=str(FOLDER), trust_remote_code=True, **options)


def ours(**options):
    """What an enabled model gives for the same call."""
    return cactus_hf.enable(copy.deepcopy(TARGET)).generate(**options)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.tokens.append("end")


def test_leaves_the_model_as_it_was():
    model = copy.deepcopy(TARGET)
    before = model.generation_config.to_dict(), list(vars(model))
    with cactus_hf.track() as calls:
        output = custom(model, **PROMPTS.inputs, assistant_model=DRAFT, cactus_delta=1.0, **GREEDY)
    assert torch.equal(output, TARGET.generate(**PROMPTS.inputs, **GREEDY))
    assert len(calls) == 1
    assert type(model) is type(TARGET)
    assert (model.generation_config.to_dict(), list(vars(model))) == before
    with pytest.raises(ValueError, match="cactus_delta"):
        model.generate(**PROMPTS.inputs, assistant_model=DRAFT, cactus_delta=1.0, **GREEDY)


@pytest.mark.parametrize(
    "options",
    (
        {"tokenizer": tiny.byte_tokenizer(), "stop_strings": ["a", "b", "c", "d"]},
        {"tokenizer": tiny.byte_tokenizer(), "assistant_tokenizer": tiny.byte_tokenizer()},
        {"logits_processor": LogitsProcessorList([lambda ids, scores: scores.roll(1, -1)])},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] % 2 == 0])},
        {"prefix_allowed_tokens_fn": lambda row, text: list(range(10 * row, 10 * row + 30))},
        {"synced_gpus": False},
        {"num_return_sequences": 2},
        {"num_assistant_tokens": 2, "repetition_penalty": 1.3},
        {"cactus_delta": [0.0, 0.5, 1.0, 2.0]},
        {"cactus_delta": None, "acceptance_rule": cactus_hf.TopK(3)},
        {"generator": [1, 2, 3, 4]},
        {"assistant_model": None, "prompt_lookup_num_tokens": 3},
    ),
    ids=lambda options: "-".join(options),
)
def test_passes_arguments_on(options):
    call = {**PROMPTS.inputs, **SAMPLE, "assistant_model": DRAFT, "cactus_delta": 1.0, **options}
    torch.manual_seed(1)
    expected = ours(**call)
    torch.manual_seed(1)
    assert torch.equal(custom(copy.deepcopy(TARGET), **call), expected)


def test_passes_what_it_returns_on():
    call = {**PROMPTS.inputs, **SAMPLE, "assistant_model": DRAFT, "cactus_delta": 1.0}
    output = custom(TARGET, **call, speculation_kl=True, return_dict_in_generate=True, output_scores=True)
    assert output.speculation.emitted_kl > 0 and len(output.scores) == 12


def test_positional_prompts_a_config_and_a_streamer():
    config, streamer = GenerationConfig(**GREEDY), Recorder()
    config.cactus_delta = 1.0
    prompt = PROMPTS.row(1).input_ids
    with cactus_hf.track() as calls:
        output = custom(TARGET, prompt, config, assistant_model=DRAFT, streamer=streamer)
    assert len(calls) == 1
    assert torch.equal(output, TARGET.generate(prompt, **GREEDY))
    assert streamer.tokens == [*output[0].tolist(), "end"]


def test_errors_are_those_of_an_enabled_model():
    with pytest.raises(ValueError, match="nothing drafts"):
        custom(TARGET, **PROMPTS.inputs, cactus_delta=1.0, **GREEDY)


def test_without_our_options_it_is_plain_generation():
    call = {**PROMPTS.inputs, **GREEDY}
    assert torch.equal(custom(TARGET, **call), TARGET.generate(**call))


def test_another_thread_meets_the_stock_model_meanwhile():
    model, seen = copy.deepcopy(TARGET), []

    class Watcher(Recorder):
        def put(self, value):
            seen.append(type(model))

    call = {**PROMPTS.row(1).inputs, **GREEDY, "assistant_model": DRAFT, "cactus_delta": 1.0}
    threads = [threading.Thread(target=custom, args=(model,), kwargs=call | {"streamer": Watcher()}) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {type(TARGET)}


def test_a_model_whose_repository_has_the_folder(tmp_path):
    """`from_pretrained(trust_remote_code=True)` then makes it the model's `generate`."""
    TARGET.save_pretrained(tmp_path / "repository")
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "repository" / "custom_generate")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "repository", trust_remote_code=True)
    with cactus_hf.track() as calls:
        output = model.generate(**PROMPTS.inputs, assistant_model=DRAFT, cactus_delta=1.0, **GREEDY)
    assert len(calls) == 1
    assert torch.equal(output, TARGET.generate(**PROMPTS.inputs, **GREEDY))


def test_an_overridden_generate_runs_once():
    class Counts(type(TARGET)):
        num_calls = 0

        def generate(self, *args, **kwargs):
            Counts.num_calls += 1
            return super().generate(*args, **kwargs)

    model = Counts(TARGET.config).eval()
    custom(model, **PROMPTS.inputs, assistant_model=DRAFT, cactus_delta=1.0, **GREEDY)
    assert Counts.num_calls == 1
