"""Runs the methods that vLLM has on the prompts of transformers' runs, in turns where they share an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import measuring
from ..measuring import Counts
from ..vllm_backend import DELTAS, Completion, Decoded, Engine, Vllm, until_end
from .methods import Method
from .running import WARM_UP_TOKENS, Cell, Result


class Turn(NamedTuple):
    """One run of a method over all prompts."""

    decoded: list[Decoded]

    @property
    def completions(self) -> list[Completion]:
        return [each for batch in self.decoded for each in batch.completions]


def measure(
    vllm: Vllm,
    cells: Sequence[Cell],
    methods: Sequence[Method],
    sampling: dict[str, Any],
    mixture_weight: float,
    repeats: int,
    progress: Callable[[str], Any],
) -> list[list[Result]]:
    """
    The results of each cell, in the order of `methods`.

    Args:
        vllm (`Vllm`): The pair.
        cells (`Sequence[Cell]`): The prompts.
        methods (`Sequence[Method]`): Of the kinds in `options.VLLM_KINDS`.
        sampling (`dict`): Arguments of `vllm.SamplingParams`, `max_tokens` among them.
        mixture_weight (`float`): The target's weight of the mixture rule.
        repeats (`int`): Turns.
        progress (`Callable`): Called with the name of what has been done, `1 + repeats` times a cell and method.
    """
    engines = {method: _engine(method, mixture_weight) for method in methods}
    found: list[dict[Method, Result]] = [{} for _ in cells]
    for engine in dict.fromkeys(engines.values()):
        vllm.start(engine)
        sharing = [method for method in methods if engines[method] == engine]
        for cell, results in zip(cells, found, strict=True):
            turns = _take_turns(vllm, cell, sharing, sampling, repeats, progress)
            results.update({method: _sum_up(method, turns[method]) for method in sharing})
    return [[results[method] for method in methods] for results in found]


def _engine(method: Method, mixture_weight: float) -> Engine:
    """Cactus with any delta shares one, in which each request says its delta."""
    rules = {"cactus": DELTAS, "mixture": f"mixture:{mixture_weight:g}"}
    return Engine(method.num_drafts, rules.get(method.kind))


def _take_turns(
    vllm: Vllm,
    cell: Cell,
    methods: Sequence[Method],
    sampling: dict[str, Any],
    repeats: int,
    progress: Callable[[str], Any],
) -> dict[Method, list[Turn]]:
    found: dict[Method, list[Turn]] = {method: [] for method in methods}
    batches = [[row.input_ids[0].tolist() for row in batch.rows()] for batch in cell.batches]
    few = min(WARM_UP_TOKENS, sampling["max_tokens"])
    for method in methods:
        _run(vllm, batches[:1], {**sampling, "max_tokens": few}, method)
        progress(method.title)
    for _ in measuring.turns(repeats):
        for method in methods:
            found[method].append(_run(vllm, batches, sampling, method))
            progress(method.title)
    return found


def _run(vllm: Vllm, batches: Sequence[list[list[int]]], sampling: dict[str, Any], method: Method) -> Turn:
    own = {} if method.delta is None else {"extra_args": {"cactus_delta": method.delta}}
    return Turn([vllm.decode(prompts, [{**sampling, **own}] * len(prompts)) for prompts in batches])


def _sum_up(method: Method, turns: Sequence[Turn]) -> Result:
    counts = None
    if method.num_drafts is not None:
        counts = Counts()
        for batch in (each for turn in turns for each in turn.decoded):
            rounds = [each for row in batch.completions for each in until_end(row.rounds, len(row.ids))]
            emitted = sum(len(row.ids) - 1 for row in batch.completions)  # the first token belongs to no round
            own = Counts.of_rounds(rounds, emitted)
            counts = counts.plus(own._replace(ball_kl_sum=batch.ball_kl * own.verified))
    return Result(
        method,
        is_row_by_row=False,
        new_tokens=[sum(len(each.ids) for each in turn.completions) for turn in turns],
        seconds=[sum(batch.seconds for batch in turn.decoded) for turn in turns],
        counts=counts,
    )
