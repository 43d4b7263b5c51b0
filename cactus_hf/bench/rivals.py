"""Other packages that decode speculatively with transformers' models, if they are installed, by their own calls.

Written for economize 0.3.2 and flashspec 0.3.1. Both get the models that everything else here gets.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from ..measuring import Counts
from .forwards import Forward, Shape
from .prompts import Batch


# `pip install` alone would let them choose a torch
INSTALL = {
    "economize": "pip install --no-deps economize==0.3.2",
    "flashspec": "pip install --no-deps flashspec==0.3.1",
}


class Sampling(NamedTuple):
    """How tokens are drawn, as far as the rivals know it too."""

    is_greedy: bool
    temperature: float
    top_p: float


class Answer(NamedTuple):
    """What a rival made of a batch."""

    num_tokens: int
    counts: Counts
    forwards: list[Forward] | None  # shapes of its passes, by its own log; `None` if they can be seen from outside


Decode = Callable[[Batch, int, int], Answer]  # of a batch, new tokens a row, and a seed


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def check_installed(name: str) -> None:
    if not is_installed(name):
        raise ImportError(f"{name} is not installed: run `{INSTALL[name]}`, or leave it out of --methods.")


def economize(target: Any, draft: Any, num_drafts: int, sampling: Sampling) -> Decode:
    """Its `decode_batch`: its `generate` refuses transformers 5.24."""
    if hasattr(draft, "kept_ids"):
        raise ValueError(
            "economize takes the output layer of a draft for its whole vocabulary, and that of this one is cut: leave "
            "economize out of --methods."
        )
    economize = importlib.import_module("economize")
    draft_model = importlib.import_module("economize.techniques.draft_model")
    # It loads a draft from a folder or the Hub, and would load ours a second time, or in vain: not all have a folder
    technique = draft_model.technique
    with (
        mock.patch.object(technique, "load_draft_model", lambda *_: draft),
        mock.patch.object(technique, "load_local_tokenizer", lambda _: None),
    ):
        model = economize.apply(target, draft_model.DraftModelConfig(model="the draft at hand"))
    verifier = "greedy" if sampling.is_greedy else "rejection"
    config = economize.DecodeConfig(cycle_length=num_drafts + 1, verifier=verifier)

    def decode(batch: Batch, new_tokens: int, seed: int) -> Answer:
        selector = economize.GreedySelector()
        if not sampling.is_greedy:
            selector = economize.TopPSampler(sampling.temperature, sampling.top_p, seed=seed)
        prompts = [row.input_ids[0] for row in batch.rows()]
        rows = model.decode_batch(prompts, new_tokens, decoding=config, selector=selector)
        steps = [step for row in rows for step in row.acceptance]
        num_tokens = sum(row.tokens.numel() for row in rows)
        longest = max(rows, key=lambda row: len(row.acceptance))
        # The first token of a row belongs to no round
        counts = Counts.of_rounds(steps, num_tokens - len(rows))
        return Answer(num_tokens, counts, _logged_forwards(longest.cost, len(rows)))

    return decode


def _logged_forwards(log: Any, num_rows: int) -> list[Forward]:
    """The passes of a batch by the log of the row with most of them, as if all rows had stayed to the end."""
    forwards: list[Forward] = []
    caught_up = 0
    for event in log.events:
        if event.kind == "draft_catchup":  # read in one pass with the token of the event behind it
            caught_up += event.tokens
            continue
        role = "target" if event.kind == "exact" else "draft"
        width = event.tokens + (caught_up if role == "draft" else 0)
        forwards.append(Forward(Shape(role, num_rows, width), float("nan"), float(len(forwards))))
        caught_up = 0 if role == "draft" else caught_up
    return forwards


def flashspec(target: Any, draft: Any, num_drafts: int, sampling: Sampling) -> Decode:
    """Its engine with the draft alone, and the draft length of everything else; by default it looks up text too."""
    package = importlib.import_module("flashspec")
    engine_parts = importlib.import_module("flashspec.engine")
    logging.getLogger("flashspec").setLevel(logging.ERROR)  # it advises against a single draft
    device, dtype = target.device, target.dtype
    temperature = 0.0 if sampling.is_greedy else sampling.temperature
    verifier = engine_parts.TargetModel("target", device, dtype, model=target)
    drafter = engine_parts.HuggingFaceDrafter("draft", device, dtype, model=draft)
    if not sampling.is_greedy:
        drafter.set_temperature(temperature)

    # Without a seed of its own it draws from torch's generator, which the caller has seeded
    settings = package.SamplingConfig(gamma=num_drafts, temperature=temperature, top_p=sampling.top_p)
    config = package.FlashSpecConfig(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        drafter_strategy="bandit",
        bandit=package.BanditConfig(n_arms=1),
        sampling=settings,
    )
    engine = package.SpeculativeEngine(config, [drafter], verifier)

    def decode(batch: Batch, new_tokens: int, seed: int) -> Answer:
        result = engine.generate(batch.input_ids, max_new_tokens=new_tokens)
        steps = [(step.proposed, step.accepted) for step in result.arm_steps]
        return Answer(result.n_tokens_generated, Counts.of_rounds(steps, result.n_tokens_generated), None)

    return decode


RIVALS = {"economize": economize, "flashspec": flashspec}
