"""docs/options.md is what the table of options says, which is true and names all that transformers has.

An option that is "equal" gives plain `generate()`'s greedy text. Its law is compared along a sampled text: plain
sampling is made to draw that same text, and must report the same processed scores at every position.
"""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from options_page import PAGE, STATUS, Call, Option, page
from options_table import ARGUMENTS, CONFIG, OPTIONS, SECTIONS
from pointers import has_test
from test_validation import forbidden
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import cactus_hf
import tiny
from cactus_hf.host import CACHE_NAME


PLAIN = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD}
LENGTHS = {1: (9,), 3: (5, 17, 9)}
SOURCES = ("assistant_model", "prompt_lookup_num_tokens")


@functools.cache
def prompts_of(rows: int) -> tiny.Prompts:
    """Ragged prompts that repeat their last tokens, so that prompt lookup finds something."""
    prompts = tiny.ragged_prompts(LENGTHS[rows])
    prompts.input_ids[:, -5:-3] = prompts.input_ids[:, -2:]
    return prompts


@functools.cache
def enabled() -> torch.nn.Module:
    return cactus_hf.enable(copy.deepcopy(tiny.pair("llama")[0]))


def call_of(option: Call, rows: int, **rest) -> dict:
    prompts = prompts_of(rows)
    return copy.copy({**prompts.inputs, **PLAIN, **(option(prompts) if callable(option) else option), **rest})


def source(name: str) -> dict:
    return {name: tiny.pair("llama")[1] if name == "assistant_model" else 3, "cactus_delta": 1.0}


def sequences(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


@functools.cache
def untouched(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain greedy text without any option, and the scores of its first token under sampling."""
    model = tiny.pair("llama")[0]
    scores = model.generate(
        **call_of({}, rows, do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True)
    ).scores
    return model.generate(**call_of({}, rows)), scores[0]


def examples(kind: str) -> list:
    names = set(GenerationConfig().to_dict())
    absent = {option.name for option in CONFIG} - names
    skip = pytest.mark.skip("not in this transformers")
    rows = [(option, example) for option in OPTIONS for example in getattr(option, kind)]
    return [pytest.param(*row, id=row[0].name, marks=[skip] * (row[0].name in absent)) for row in rows]


@pytest.mark.parametrize(("option", "example"), examples("calls"))
@pytest.mark.parametrize("rows", LENGTHS)
def test_equal(option: Option, example: Call, rows: int, monkeypatch):
    plain = sequences(tiny.pair("llama")[0].generate(**call_of(example, rows)))
    for name in SOURCES:
        assert torch.equal(sequences(enabled().generate(**call_of(example, rows), **source(name))), plain), name
    if rows > 1:  # a single text may miss what the option is about
        scores = [assert_same_law(example, rows, name, monkeypatch) for name in SOURCES][0]
        text, first_scores = untouched(rows)
        is_without_effect = torch.equal(plain, text) and torch.allclose(scores, first_scores, atol=1e-3)
        assert is_without_effect == option.is_inert


def assert_same_law(example: Call, rows: int, name: str, monkeypatch) -> torch.Tensor:
    """Samples by us, then plainly along the same text; returns the scores of the first token."""
    call = call_of(example, rows, do_sample=True, return_dict_in_generate=True, output_scores=True)
    ours = enabled().generate(**call, **source(name), generator=torch.Generator().manual_seed(7))
    steps = iter(ours.sequences[:, ours.sequences.shape[1] - len(ours.scores) :].unbind(1))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda *_, **__: next(steps)[:, None])
        plain = tiny.pair("llama")[0].generate(**call)
    assert torch.equal(plain.sequences, ours.sequences) and len(plain.scores) == len(ours.scores)
    is_written = torch.arange(len(ours.scores)) < ours.speculation.emitted[:, None]
    left, right = (torch.stack(output.scores, 1)[is_written] for output in (ours, plain))
    torch.testing.assert_close(left, right, atol=1e-3, rtol=1e-3)  # float32, one token or a block at a time
    return plain.scores[0]


@pytest.mark.filterwarnings("ignore:The rows of this batch are decoded one after another")
@pytest.mark.parametrize("rows", LENGTHS)
def test_attention_of_the_users_own(rows: int):
    """Blocks of drafts need masks, which transformers makes for implementations that it knows masks of."""
    target, draft = (copy.deepcopy(model) for model in tiny.pair("llama"))
    AttentionInterface.register("with_mask", sdpa_attention_forward)
    AttentionMaskInterface.register("with_mask", sdpa_mask)
    AttentionInterface.register("without_mask", sdpa_attention_forward)
    target.set_attn_implementation("with_mask")
    plain = target.generate(**call_of({}, rows))
    for name in SOURCES:
        ours = cactus_hf.enable(target).generate(**call_of({}, rows), **source(name))
        assert torch.equal(ours, plain)
    target.set_attn_implementation("without_mask")
    with pytest.raises(ValueError, match="target.*'without_mask'.*AttentionMaskInterface.register"):
        target.generate(**call_of({}, rows), assistant_model=draft, cactus_delta=1.0)


@pytest.mark.parametrize(("option", "example"), examples("refused"))
@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("name", SOURCES)
def test_refused(option: Option, example: tuple[Call, str], rows: int, name: str, monkeypatch):
    target, draft = (copy.deepcopy(model) for model in tiny.pair("llama"))
    for model in (target, draft):
        monkeypatch.setattr(model, "forward", forbidden(model.forward))
    call, words = example
    own = source(name) | ({"assistant_model": draft} if name == "assistant_model" else {})
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        cactus_hf.enable(target).generate(**own | call_of(call, rows))


@pytest.mark.parametrize("rows", LENGTHS)
def test_prompts_are_read_in_chunks(rows: int):
    target, draft = (copy.deepcopy(model) for model in tiny.pair("llama"))
    widths = {id(model): [] for model in (target, draft)}
    for model in (target, draft):
        model.register_forward_pre_hook(
            lambda model, args, kwargs: widths[id(model)].append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
    cactus_hf.enable(target).generate(
        **call_of({"prefill_chunk_size": 4}, rows), assistant_model=draft, cactus_delta=1.0
    )
    for model, num_behind in ((target, 0), (draft, 1)):  # the draft reads the first token too
        chunks = [len(chunk) for chunk in torch.arange(max(LENGTHS[rows]) + num_behind).split(4)]
        assert widths[id(model)][: len(chunks)] == chunks


@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_positions_that_start_elsewhere(name: str, rows: int):
    model, draft = tiny.pair(name)
    positions = (prompts_of(rows).attention_mask.cumsum(1) - 1).clamp_min(0) + 3
    call = call_of({"position_ids": positions}, rows)
    plain = model.generate(**call)
    target = cactus_hf.enable(copy.copy(model))
    for own in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(target.generate(**call, **own, cactus_delta=1.0), plain)
    assert name != "gpt2" or not torch.equal(plain, model.generate(**call_of({}, rows))), "positions are learned"


@pytest.mark.parametrize("name", ("qwen3", "mistral", "gpt2", "bloom"))
@pytest.mark.parametrize("lengths", ((16,), (5, 17, 9)), ids=("one row", "batch"))
def test_a_prefilled_prompt(name: str, lengths: tuple[int, ...]):
    """A cache that a forward pass filled with the first tokens, and the ids of the whole text."""
    model, draft = tiny.pair(name)
    if name == "bloom" and len(lengths) > 1:
        pytest.skip("ALiBi models take one row at a time, and a cache cannot be split into rows")
    prompts = tiny.ragged_prompts(lengths)
    plain = model.generate(**prompts.inputs, **PLAIN)
    for own in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        cache, mask = DynamicCache(config=model.config), prompts.attention_mask[:, :14]
        first = {"input_ids": prompts.input_ids[:, :14], "attention_mask": mask, CACHE_NAME: cache, "use_cache": True}
        if name != "bloom":
            first["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            model(**first)
        target = cactus_hf.enable(copy.copy(model))
        ours = target.generate(**prompts.inputs, **PLAIN, **own, cactus_delta=1.0, **{CACHE_NAME: cache})
        assert torch.equal(ours, plain)
        assert cache.get_seq_length() == ours.shape[1] - 1


@pytest.mark.parametrize("name", SOURCES)
def test_caches_that_do_not_fit(name: str, monkeypatch):
    target, draft = (copy.deepcopy(model) for model in tiny.pair("llama"))
    ids, cache = prompts_of(1).input_ids, DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids, **{CACHE_NAME: cache}, use_cache=True)
    for model in (target, draft):
        monkeypatch.setattr(model, "forward", forbidden(model.forward))
    own = source(name) | ({"assistant_model": draft} if name == "assistant_model" else {})
    more = torch.cat([ids, ids], 1)
    for words, inputs in {
        "holds 9 tokens.*9: pass the whole": {"input_ids": ids},
        "holds 9 tokens.*4: pass the whole": {"input_ids": ids[:, :4]},
        "_(ids|mask)`.*4.*cache holds": {"input_ids": ids[:, :4], "attention_mask": torch.ones(1, 13)},
        "_(ids|mask)`.*12.*cache holds": {"input_ids": more[:, :12], "attention_mask": torch.ones(1, 21)},
        "attention_mask.*cache holds": {
            "input_ids": more[:, :12], "attention_mask": (torch.arange(21) > 0).long()[None]
        },
        "holds 1 rows.*2.*batch_repeat_interleave": {"input_ids": more.repeat(2, 1)},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            cactus_hf.enable(target).generate(**inputs, **PLAIN, **own, **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="holds 1 rows.*3.*batch_repeat_interleave"):
        options = PLAIN | {"do_sample": True, "num_return_sequences": 3}
        target.generate(more, **options, **own, **{CACHE_NAME: cache})


@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_half_precision(name: str, attention: str, dtype: torch.dtype, rows: int):
    """Equal texts are no law in half precision; the seeds of these models keep clear of near-ties."""
    model, draft = tiny.pair(name, attention, dtype=dtype)
    target = cactus_hf.enable(copy.copy(model))
    plain = model.generate(**call_of({}, rows))
    for own in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(target.generate(**call_of({}, rows), **own, cactus_delta=1.0), plain)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("lengths", ((1,), (1, 1, 1), (1, 4, 2)), ids=str)
def test_prompts_of_one_token(lengths: tuple[int, ...], name: str):
    prompts = tiny.ragged_prompts(lengths)
    plain = tiny.pair("llama")[0].generate(**prompts.inputs, **PLAIN)
    assert torch.equal(enabled().generate(**prompts.inputs, **PLAIN, **source(name)), plain)


def test_continuous_batching(monkeypatch):
    """A delta in the model's generation config does not disturb it; keywords of ours are refused, not ignored."""
    target = cactus_hf.enable(copy.deepcopy(tiny.pair("llama")[0]))
    target.generation_config.cactus_delta = 1.0
    calls = []
    monkeypatch.setattr(ContinuousMixin, "generate_batch", lambda model, *args, **options: calls.append(options) or {})
    target.generate_batch([[5, 6]], max_new_tokens=3)
    assert calls == [{"max_new_tokens": 3}]
    for own in ({"cactus_delta": 1.0}, {"acceptance_rule": cactus_hf.TopK(3)}, {"generator": [1]}):
        with pytest.raises(ValueError, match=f"generate_batch.*leave `{next(iter(own))}` out"):
            target.generate_batch([[5, 6]], max_new_tokens=3, **own)
    with pytest.raises(ValueError, match="paged.*generate_batch"):
        target.generate(prompts_of(1).input_ids, cache_implementation="paged", **source("prompt_lookup_num_tokens"))
    with pytest.raises(NotImplementedError, match="assistant_model"):  # transformers' own, before our checks
        target.generate(prompts_of(1).input_ids, cache_implementation="paged", **source("assistant_model"))
    assert len(calls) == 1


def test_nothing_of_the_installed_transformers_is_missing():
    config = set(GenerationConfig().to_dict())
    arguments = set(inspect.signature(GenerationMixin.generate).parameters)
    modes = set(inspect.signature(GenerationMixin._assisted_decoding).parameters)
    prepared = {"self", "kwargs", "model_kwargs", "input_ids", "inputs_tensor"}
    known = {option.name for option in CONFIG + ARGUMENTS}
    missing = {name for name in config | (arguments | modes) - prepared if not name.startswith("_")} - known
    assert not missing, f"add rows for {sorted(missing)} to tests/options_table.py, see CONTRIBUTING.md"


def test_every_row_is_proven():
    names = [option.name for option in OPTIONS]
    assert len(names) == len(set(names))
    for option in OPTIONS:
        proofs = {"equal": option.calls, "refused": option.refused or option.tests, "honoured": option.tests}
        assert option.status in STATUS and proofs[option.status], option.name


def test_the_tests_that_rows_name_exist():
    missing = [name for option in OPTIONS for name in option.tests if not has_test(name)]
    assert not missing


def test_the_page_is_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page(SECTIONS), "run `python tests/options_page.py`"
