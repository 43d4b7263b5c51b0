"""The ways to decode that `bench` compares, each as one call for a batch of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import CompileConfig

from ..acceptance import Mixture
from ..counters import track
from ..host import Host
from ..measuring import Counts, timed
from ..vllm_backend import TRANSFORMERS
from . import rivals
from .forwards import Forward, ForwardClock
from .prompts import Batch
from .rivals import Sampling
from .synthetic import AcceptByLot


ONE_ROW = ("stock", "flashspec")  # take no batch; flashspec takes one, but no rows of unequal lengths
UNSEEN = ("compiled", "economize")  # passes that hooks do not see: torch traces through them, or they run layers
NO_LENGTH = ("plain", "auto")  # have no number of drafts a round to set


class Method(NamedTuple):
    """A way to decode and its settings."""

    kind: str
    num_drafts: int | None = None  # a round
    delta: float | None = None  # nats
    backend: str = TRANSFORMERS

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.kind if self.backend == TRANSFORMERS else f"{self.kind} ({self.backend})"


class Call(NamedTuple):
    """A call for a batch, or for a row of one where the method takes single rows."""

    num_tokens: int
    seconds: float
    counts: Counts | None  # `None` for plain decoding
    forwards: list[Forward]
    emitted_kl: float | None = None  # nats a checked draft


class BlockCounter:
    """A streamer for stock assisted generation, which tells the size of each round's block in no other way."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.sizes.append(tokens.numel())

    def end(self) -> None:
        """There is nothing to finish."""


@dataclass
class Decoders:
    """Runs methods on a pair.

    Args:
        target (`PreTrainedModel`): a model after `cactus_hf.enable`.
        draft (`PreTrainedModel`): its draft.
        options (`dict`): options of `generate()` for every method, `max_new_tokens` among them.
        sampling (`Sampling`): the same, for those that have no `generate()`.
        mixture_weight (`float`): the target's weight of the mixture rule.
        acceptance (`float`, *optional*): accept drafts by lot, with this probability.
    """

    target: Any
    draft: Any
    options: dict[str, Any]
    sampling: Sampling
    mixture_weight: float = 0.5
    acceptance: float | None = None
    _rivals: dict[tuple[str, int], rivals.Decode] = field(default_factory=dict)

    @property
    def models(self) -> dict[str, Any]:
        return {"target": self.target, "draft": self.draft}

    def takes_batches(self, kind: str) -> bool:
        if kind == "plain" or kind in rivals.RIVALS or kind in ONE_ROW:
            return kind not in ONE_ROW
        models = [self.target] if kind == "prompt-lookup" else [self.target, self.draft]
        return all(Host(model).is_ragged for model in models)

    def run(
        self, method: Method, batches: Sequence[Batch], seed: int, *, is_timing: bool, **options: Any
    ) -> list[Call]:
        """One call after the other; `options` go before those for all methods. Seeds torch's generator once, so that
        no two calls draw the same numbers.
        """
        torch.manual_seed(seed)
        calls = []
        models = {} if method.kind == "compiled" else self.models
        with ForwardClock(models, self.target.device, is_timing) as clock:
            for batch in batches:
                for part in [batch] if self.takes_batches(method.kind) else batch.rows():
                    calls.append(self._call(method, part, clock, {**self.options, **options}))
        return calls

    def _call(self, method: Method, batch: Batch, clock: ForwardClock, options: dict[str, Any]) -> Call:
        if method.kind in rivals.RIVALS:
            return self._rival_call(method, batch, clock, options)
        if method.kind == "stock":
            return self._stock_call(method, batch, clock, options)
        every = {**batch._asdict(), **options, **self._own_options(method)}
        with track() as stats:  # a dictionary as output would bring the cache into a form that nobody here asks for
            output, seconds = timed(lambda: self.target.generate(**every), self.target.device)
        num_tokens = output[:, batch.input_ids.shape[1] :].numel()
        if method.kind == "plain":
            return Call(num_tokens, seconds, None, clock.take())
        return Call(num_tokens, seconds, Counts.of(stats), clock.take(), stats[0].emitted_kl)

    def _own_options(self, method: Method) -> dict[str, Any]:
        if method.kind == "plain":
            return {}
        # Whatever the draft's own config says
        own: dict[str, Any] = {"assistant_model": self.draft, "assistant_confidence_threshold": 0.0}
        if method.kind == "prompt-lookup":
            own = {"prompt_lookup_num_tokens": method.num_drafts}
        elif method.kind == "auto":
            own["num_assistant_tokens_schedule"] = "auto"
        else:
            own |= {"num_assistant_tokens": method.num_drafts, "num_assistant_tokens_schedule": "constant"}
        if method.kind == "compiled":
            own |= {"cache_implementation": "static", "compile_config": CompileConfig(dynamic=False)}
        if self.acceptance is not None:
            return own | {"acceptance_rule": AcceptByLot(self.acceptance)}
        if method.kind == "mixture":
            return own | {"acceptance_rule": Mixture(self.mixture_weight)}
        return own | {"cactus_delta": method.delta or 0.0}

    def _stock_call(self, method: Method, batch: Batch, clock: ForwardClock, options: dict[str, Any]) -> Call:
        blocks = BlockCounter()
        every = {**batch._asdict(), **options, "assistant_model": self.draft, "streamer": blocks}
        with _stock_draft(self.draft, method.num_drafts):
            output, seconds = timed(lambda: self.target.generate(**every), self.target.device)
        forwards = clock.take()
        sizes = blocks.sizes[1:]  # the first is the prompt's
        widths = [each.shape.width for each in forwards if each.shape.role == "target"]
        widths[0] -= batch.input_ids.shape[1] - 1  # it read the prompt too
        steps = [(width - 1, size - 1) for width, size in zip(widths, sizes, strict=True)]
        num_tokens = output[:, batch.input_ids.shape[1] :].numel()
        return Call(num_tokens, seconds, Counts.of_rounds(steps, num_tokens), forwards)

    def _rival_call(self, method: Method, batch: Batch, clock: ForwardClock, options: dict[str, Any]) -> Call:
        key = (method.kind, method.num_drafts or 1)
        if key not in self._rivals:
            self._rivals[key] = rivals.RIVALS[method.kind](self.target, self.draft, key[1], self.sampling)
        decode, seed = self._rivals[key], int(torch.randint(2**31, ()))
        answer, seconds = timed(lambda: decode(batch, options["max_new_tokens"], seed), self.target.device)
        seen = clock.take()
        return Call(answer.num_tokens, seconds, answer.counts, seen if answer.forwards is None else answer.forwards)


@contextmanager
def _stock_draft(draft: Any, num_drafts: int | None) -> Iterator[None]:
    """Stock assisted generation reads the draft length from the draft's own config, and ends drafts at its ends."""
    config = draft.generation_config
    wanted = {
        "num_assistant_tokens": num_drafts,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
        "eos_token_id": None,
    }
    before = {name: getattr(config, name, None) for name in wanted}
    vars(config).update(wanted)
    try:
        yield
    finally:
        vars(config).update(before)
