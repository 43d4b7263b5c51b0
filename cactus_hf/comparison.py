"""Plain, lossless and Cactus decoding of one prompt side by side: what each costs and what each gives.

A call of `generate()` is timed as the user meets it, prefill included. The methods take turns, so that a machine that
slows down or speeds up meanwhile treats them alike, and the median over the turns is reported with its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from . import measuring
from .measuring import Counts, Speeds


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .counters import SpeculationStats


WARM_UP_TOKENS = 16
TIME_LIMIT = 120.0  # seconds after which no further turn is begun


class Method(NamedTuple):
    """A way to decode: without a draft, or with one at `delta` nats."""

    name: str
    delta: float | None  # None is plain decoding


class Run(NamedTuple):
    """One call of `generate()` for one prompt."""

    tokens: list[int]  # new ones
    seconds: float
    stats: SpeculationStats | None  # None for plain decoding


@dataclass(frozen=True)
class Row(Speeds):
    """
    What the runs of one method came to.

    Args:
        method (`str`): Name of the method.
        delta (`float`, *optional*): Budget in nats; `None` for plain decoding.
        new_tokens (`list[int]`): Tokens of each run, counted by ids.
        seconds (`list[float]`): Time of each run, prefill included.
        accepted_length (`float`, *optional*): AL, mean number of kept drafts a round, over the rounds of all runs.
        acceptance (`float`, *optional*): Kept share of the drafts that were checked (those up to a round's first
            rejection), over all runs.
        emitted_kl (`float`, *optional*): Mean KL(emitted law || target's law) in nats a checked position.
    """

    method: str
    delta: float | None
    new_tokens: list[int]
    seconds: list[float]
    accepted_length: float | None
    acceptance: float | None
    emitted_kl: float | None


class Comparison:
    """
    Decodes one prompt with several methods.

    Args:
        target (`PreTrainedModel`): A model after `cactus_hf.enable`.
        draft (`PreTrainedModel`): Its draft.
        inputs (`dict`): `input_ids` [1, T] and `attention_mask` [1, T] of the prompt.
        options (`dict`): Options of `generate()` that hold for every method.
        draft_options (`dict`): Options that only the methods with a draft take, as `num_assistant_tokens`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        inputs: dict[str, Any],
        options: dict[str, Any],
        draft_options: dict[str, Any],
    ) -> None:
        self.target = target
        self.draft = draft
        self.inputs = inputs
        self.options = options
        self.draft_options = draft_options

    def generate(self, method: Method, seed: int, **options: Any) -> Run:
        """One call of `generate()` with `method`; `options` go before those of the comparison."""
        import torch

        from .counters import track

        speculative = {"assistant_model": self.draft, "cactus_delta": method.delta, **self.draft_options}
        own = {} if method.delta is None else speculative
        every = {**self.inputs, **self.options, **own, **options, "do_sample": True}
        torch.manual_seed(seed)
        with track() as calls:  # with an output that has statistics, ours alone would also have a cache to give back
            ids, seconds = measuring.timed(lambda: self.target.generate(**every), self.target.device)
        tokens = ids[0, self.inputs["input_ids"].shape[1] :].tolist()
        return Run(tokens, seconds, calls[0] if calls else None)

    def rows(
        self, methods: Sequence[Method], seed: int, repeats: int, measured: dict[Method, Run], progress: bool = True
    ) -> list[Row]:
        """
        Times every method `repeats` times, turn by turn and with seeds `seed`, `seed` + 1, ...

        Args:
            methods (`Sequence[Method]`): What to compare.
            seed (`int`): Seed of the first turn.
            repeats (`int`): Turns; fewer are taken once `TIME_LIMIT` is over.
            measured (`dict[Method, Run]`): Runs made before with `speculation_kl=True`; they count as warm-up and give
                the row's KL. Measuring the KL costs time, so no timed run does. A method that is not in it is run for
                `WARM_UP_TOKENS` tokens first.
            progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar on standard error.
        """
        measured = dict(measured)
        runs: dict[Method, list[Run]] = {method: [] for method in methods}
        cold = [method for method in methods if method not in measured]
        num_runs = len(cold) + repeats * len(methods)
        disable = None if progress else True
        with tqdm(total=num_runs, desc="Comparing", unit="run", leave=False, disable=disable) as bar:
            for method in cold:
                options = {} if method.delta is None else {"speculation_kl": True}
                max_new_tokens = min(WARM_UP_TOKENS, self.options["max_new_tokens"])
                measured[method] = self.generate(method, seed, **{**options, "max_new_tokens": max_new_tokens})
                bar.update()
            for turn in measuring.turns(repeats, TIME_LIMIT):
                for method in methods:
                    bar.set_postfix_str(method.name)
                    runs[method].append(self.generate(method, seed + turn))
                    bar.update()
        return [_summarise(method, runs[method], measured[method]) for method in methods]


def _summarise(method: Method, runs: list[Run], measured: Run) -> Row:
    new_tokens, seconds = [len(run.tokens) for run in runs], [run.seconds for run in runs]
    if measured.stats is None:
        return Row(method.name, method.delta, new_tokens, seconds, None, None, 0.0)
    counts = Counts.of(run.stats for run in runs if run.stats is not None)
    emitted_kl = measured.stats.emitted_kl
    return Row(method.name, method.delta, new_tokens, seconds, counts.accepted_length, counts.acceptance, emitted_kl)
