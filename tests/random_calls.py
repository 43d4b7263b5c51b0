"""Random `generate()` calls for tests of properties: models, prompts, drafts, options and stops.

Models are float64, so that neither near-ties nor the shape of a batch decide anything.
"""

from __future__ import annotations

import copy
import os
from functools import cache
from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

import cactus_hf
import tiny


NAMES = ("llama", "gemma3", "gpt2", "falcon_alibi")  # the last one takes one row at a time
# CACTUS_HF_TEST_EXAMPLES=10 tries ten times as many calls, other ones in every run
FACTOR = int(os.environ.get("CACTUS_HF_TEST_EXAMPLES", "1"))
Options = dict[str, Any]


def examples(count: int) -> settings:
    # Shrinking takes minutes, as models are slow functions
    return settings(max_examples=count * FACTOR, derandomize=FACTOR == 1, phases=(Phase.generate,))


@cache
def target(name: str) -> PreTrainedModel:
    return cactus_hf.enable(copy.copy(tiny.model(name, dtype=torch.float64)))


@cache
def draft(name: str, kind: str) -> PreTrainedModel:
    """A draft for `target(name)`, by its likeness to it."""
    architecture = tiny.ARCHITECTURES[name]
    made = {
        "same": lambda: target(name),
        "copy": lambda: tiny.perturbed(target(name), 0.0),
        "near": lambda: tiny.perturbed(target(name), 0.05),
        "far": lambda: tiny.perturbed(target(name), 0.3),
        "half": lambda: tiny.perturbed(target(name), 0.05).to(torch.bfloat16),
        "other": lambda: architecture.build(seed=99, dtype=torch.float64),
        "smaller vocabulary": lambda: architecture.build(seed=architecture.seed, vocab=90, dtype=torch.float64),
        "larger vocabulary": lambda: architecture.build(seed=architecture.seed, vocab=104, dtype=torch.float64),
        "short context": lambda: short(tiny.ARCHITECTURES["gpt2"].build(dtype=torch.float64)),
    }
    return made[kind]()


def short(model: PreTrainedModel, context: int = 11) -> PreTrainedModel:
    """The model with so many learned positions only."""
    model.config.n_positions = context
    model.transformer.wpe.weight.data = model.transformer.wpe.weight[:context].detach()
    return model


KINDS = ("same", "copy", "near", "near", "far", "half", "other", "smaller vocabulary", "larger vocabulary",
         "short context")  # fmt: skip


@st.composite
def prompts(draw: Any) -> tiny.Prompts:
    """One to four rows of one to twelve tokens, special ones and repeated runs among them, rows twice at times."""
    token = st.integers(0, tiny.VOCAB - 1) | st.sampled_from((tiny.PAD, tiny.EOS, 5, 6, 7))
    rows = draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=4))
    if len(rows) > 1 and draw(st.booleans()):
        rows[-1] = rows[0]
    width = max(map(len, rows))
    ids = torch.tensor([[tiny.PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return tiny.Prompts(ids, mask)


@st.composite
def sources(draw: Any, name: str, kinds: tuple[str, ...] = KINDS) -> Options:
    """What drafts, and how much."""
    kind = draw(st.sampled_from((*kinds, "early exit", "lookup")))
    length = draw(st.integers(1, 9))
    if kind == "lookup":
        ngram = {"max_matching_ngram_size": draw(st.integers(1, 4))} if draw(st.booleans()) else {}
        return {"prompt_lookup_num_tokens": length} | ngram
    options = {"num_assistant_tokens": length}
    if draw(st.booleans()):
        options["num_assistant_tokens_schedule"] = draw(st.sampled_from(("constant", "heuristic")))
    if draw(st.booleans()):
        options["assistant_confidence_threshold"] = draw(st.sampled_from((0.0, 0.2, 0.7)))
    if kind == "early exit":
        layers = target(name).config.num_hidden_layers
        return options | {"assistant_early_exit": draw(st.integers(1, layers - 1))}
    return options | {"assistant_model": draft(name, kind)}


class Rolling(LogitsProcessor):
    """Context-free, and not known to be."""

    def __call__(self, input_ids, scores):
        return scores.roll(1, dims=-1) * 0.9


class LastToken(LogitsProcessor):
    """Looks at the last token and at the length."""

    def __call__(self, input_ids, scores):
        factor = 1 + (input_ids[:, -1:] + input_ids.shape[1]) % 3 / 4
        return scores * factor


class Counting(LogitsProcessor):
    """Remembers how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.roll(self.calls % 5, dims=-1)


class NthMultiple(StoppingCriteria):
    """Stops at the n-th token that three divides; remembers how many there were."""

    def __init__(self, count: int):
        self.left = count

    def __call__(self, input_ids, scores, **kwargs):
        self.left = self.left - (input_ids[:, -1] % 3 == 0).long()
        return self.left <= 0


TOKENS = st.integers(0, tiny.VOCAB - 1)
OWN = st.lists(st.sampled_from((Rolling, LastToken, Counting)), min_size=1, max_size=2)
PREFIX_PROCESSORS = {
    "repetition_penalty": st.sampled_from((0.7, 1.3, 2.5)),
    "no_repeat_ngram_size": st.integers(1, 3),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=4),
    "sequence_bias": st.lists(
        st.tuples(st.lists(TOKENS, min_size=1, max_size=2), st.floats(-5, 5)), min_size=1, max_size=3,
        unique_by=lambda pair: tuple(pair[0]),
    ).map(lambda pairs: [list(pair) for pair in pairs]),
    "suppress_tokens": st.lists(TOKENS, min_size=1, max_size=20),
    "min_length": st.integers(1, 20),
    "logits_processor": OWN,  # classes: each call needs objects of its own
}  # fmt: skip
PROMPT_PROCESSORS = {  # their meaning depends on where the prompt ends
    "min_new_tokens": st.integers(1, 8),
    "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=20),
    "exponential_decay_length_penalty": st.tuples(st.integers(1, 4), st.floats(1.01, 2.0)),
    "encoder_repetition_penalty": st.sampled_from((0.7, 1.5)),
    "encoder_no_repeat_ngram_size": st.integers(1, 2),
    "forced_eos_token_id": TOKENS,
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
}
WARPERS = {
    "temperature": st.sampled_from((0.3, 0.7, 1.5)),
    "top_k": st.integers(1, 30),
    "top_p": st.sampled_from((0.3, 0.8, 0.95)),
    "min_p": st.sampled_from((0.01, 0.1)),
    "typical_p": st.sampled_from((0.3, 0.9)),
    "epsilon_cutoff": st.sampled_from((0.001, 0.02)),
    "eta_cutoff": st.sampled_from((0.001, 0.02)),
}


@st.composite
def some_of(draw: Any, choices: dict[str, st.SearchStrategy], most: int = 3) -> Options:
    names = draw(st.lists(st.sampled_from(sorted(choices)), max_size=most, unique=True))
    return {name: draw(choices[name]) for name in names}


DELTAS = st.sampled_from((0.0, 0.01, 0.5, 2.0, float("inf")))


@st.composite
def rules(draw: Any, num_rows: int) -> Options:
    """An acceptance rule, some of them with a value for each row."""
    choices = [
        st.builds(
            lambda delta: {"cactus_delta": delta}, DELTAS | st.lists(DELTAS, min_size=num_rows, max_size=num_rows)
        ),
        st.just({"acceptance_rule": cactus_hf.SpeculativeSampling()}),
        st.sampled_from(("argmax", "sample")).map(
            lambda recovery: {"acceptance_rule": cactus_hf.TypicalAcceptance(recovery=recovery)}
        ),
        st.integers(1, 6).map(lambda k: {"acceptance_rule": cactus_hf.TopK(k)}),
        st.sampled_from((0.1, 0.9)).map(lambda weight: {"acceptance_rule": cactus_hf.Mixture(weight)}),
        st.sampled_from((cactus_hf.Lenience(0.5), cactus_hf.Mentored(0.1), cactus_hf.Mentored(0.2, "js"))).map(
            lambda rule: {"acceptance_rule": rule}
        ),
        st.sampled_from(("reverse_kl", "tv")).map(
            lambda name: {"acceptance_rule": cactus_hf.Cactus(0.2, divergence=name, solver="exact")}
        ),
    ]
    return draw(st.one_of(choices))


@st.composite
def stops(draw: Any, texts: list[Tensor]) -> Options:
    """Ends chosen from `texts`, new tokens that go on without; and others that may not come."""
    kinds = draw(st.lists(st.sampled_from(("eos", "strings", "criterion")), max_size=2, unique=True))
    options: Options = {}
    text = draw(st.sampled_from(texts)).tolist()
    place = draw(st.integers(0, len(text) - 1))
    if "eos" in kinds:
        options["eos_token_id"] = [text[place], *draw(st.lists(TOKENS, max_size=2))]
    if "strings" in kinds:
        tokenizer = tiny.byte_tokenizer()
        string = tokenizer.decode(text[place : place + draw(st.integers(1, 3))])
        options |= {"stop_strings": [string or "!", "zzzz"], "tokenizer": tokenizer}
    if "criterion" in kinds:
        options["stopping_criteria"] = draw(st.integers(1, 4))
    return options


def ready(options: Options) -> Options:
    """The options with new processors and criteria, which may remember nothing from another call."""
    options = dict(options)
    if "logits_processor" in options:
        options["logits_processor"] = [kind() for kind in options["logits_processor"]]
    if "stopping_criteria" in options:
        options["stopping_criteria"] = [NthMultiple(options["stopping_criteria"])]
    return options
