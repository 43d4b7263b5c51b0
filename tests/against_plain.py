"""What tests of models in other hands share: our greedy text held against plain generation's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import cactus_hf
import tiny


TARGET, DRAFT = tiny.pair("llama")
PROMPTS = tiny.ragged_prompts()
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD}


def enabled(model: Any = TARGET) -> Any:
    return cactus_hf.enable(copy.deepcopy(model))


def plain(model: Any, prompts: tiny.Prompts = PROMPTS) -> Tensor:
    return model.generate(**prompts.inputs, **GREEDY)


def ours(model: Any, draft: Any = DRAFT, prompts: tiny.Prompts = PROMPTS, **options: Any) -> Any:
    with cactus_hf.track() as calls:
        output = model.generate(**prompts.inputs, assistant_model=draft, cactus_delta=1.0, **GREEDY | options)
    assert len(calls) == 1, "transformers' own code ran"
    return output


def assert_plain(model: Any, draft: Any = DRAFT, like: Any = None) -> None:
    """Greedy text under `model` is plain generation's with `like`, or `model`, for one prompt and a ragged batch."""
    for prompts in (PROMPTS.row(1), PROMPTS):
        assert torch.equal(ours(model, draft, prompts), plain(like or model, prompts))
