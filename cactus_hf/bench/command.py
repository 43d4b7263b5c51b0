"""`cactus-hf bench`: loads a pair, lets the methods take turns on the same prompts, and says what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments import (
    Pair,
    Prompt,
    check_room,
    encode,
    load,
    pad_token_id,
    prepared,
    quiet_transformers,
    sampling_options,
)
from ..vllm_backend import TRANSFORMERS, VLLM
from . import options
from .options import VLLM_KINDS, add_arguments, chosen_kinds


if TYPE_CHECKING:
    import torch
    from tqdm import tqdm
    from transformers import PreTrainedConfig

    from .methods import Decoders, Method
    from .running import Cell, Result

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and returns the exit status."""
    options.check_options(args)
    with _threads(args.threads), quiet_transformers():
        if args.verify:
            from .verifying import run_verify

            return run_verify(args)
        return _run_pair(args)


class Findings(NamedTuple):
    """What was measured, and of what."""

    cells: list[tuple[Cell, list[Result]]]
    facts: dict[str, Any]  # for each line of JSON
    title: str


def _run_pair(args: argparse.Namespace) -> int:
    from . import writing

    prompts = _prompts(args)
    findings = None
    if TRANSFORMERS in args.backend:
        findings = _run_transformers(args, prompts)
    if VLLM in args.backend:
        findings = _run_vllm(args, prompts, findings)
    assert findings is not None
    print(writing.legend(findings.cells))
    if args.plot:
        writing.plot(args.plot, findings.cells, args.synthetic_acceptance, findings.title)
    return 0


def _run_transformers(args: argparse.Namespace, prompts: list[Prompt]) -> Findings:
    from .. import report
    from . import running
    from .provenance import of_models, surroundings

    models = _load(args, prompts)
    cells = _cells(args, models.prompts, models.pad_token_id, models.target.config, models.target.device)
    methods = _methods(args, chosen_kinds(args), TRANSFORMERS)
    decoders = _decoders(args, models)
    title = report.describe(models.name, models.target, models.draft)
    if args.synthetic_acceptance is not None:
        title += f"\n{_synthetic_note(args)}"
    print(f"{title}\n")
    facts = {"models": models.name, **of_models(models.target, models.draft), **surroundings(models.prompts)}
    findings = Findings([], {**facts, "settings": _settings(args)}, title)
    with _bar(len(cells) * len(methods) * (1 + args.repeats)) as bar:
        for cell in cells:
            results = running.measure(decoders, cell, methods, args.seed, args.repeats, _progress(bar))
            findings.cells.append((cell, results))
            bar.clear()
            # At once, as the next may take hours; but for rows that vLLM's are to stand below
            _write(args, findings, [] if VLLM in args.backend else [(cell, results)])
    return findings


def _run_vllm(args: argparse.Namespace, prompts: list[Prompt], before: Findings | None) -> Findings:
    """Adds vLLM's rows to those of transformers, if there are any."""
    import torch

    from ..vllm_backend import Vllm, find_source, version
    from . import vllm_runs
    from .provenance import surroundings

    source = find_source(args)
    ids = [encode(source.tokenizer, prompt) for prompt in prompts]
    cells = _cells(args, ids, pad_token_id(source.tokenizer), source.config, torch.device("cpu"))
    methods = _methods(args, [kind for kind in chosen_kinds(args) if kind in VLLM_KINDS], VLLM)
    sampling = {"max_tokens": args.max_new_tokens, "ignore_eos": True, **sampling_options(args)}
    sampling |= {"temperature": 0.0} if args.greedy else {}
    weight = args.mixture_weight or options.MIXTURE_WEIGHT
    print(f"{source.title}\n")
    with (
        closing(Vllm(source, args.vllm_options, args.seed)) as vllm,
        _bar(len(cells) * len(methods) * (1 + args.repeats)) as bar,
    ):
        results = vllm_runs.measure(vllm, cells, methods, sampling, weight, args.repeats, _progress(bar))
    facts = {"models": source.name, "dtype": source.dtype, **surroundings(ids), "settings": _settings(args)}
    title = source.title
    others: list[list[Result]] = [[] for _ in cells]
    if before is not None:
        facts, title, others = before.facts, f"{before.title}\n{title}", [each for _, each in before.cells]
    facts = {**facts, "versions": {**facts["versions"], VLLM: version()}}
    rows = [(cell, [*other, *own]) for cell, other, own in zip(cells, others, results, strict=True)]
    findings = Findings(rows, facts, title)
    _write(args, findings, rows)
    return findings


def _bar(num_steps: int) -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(total=num_steps, desc="Measuring", unit="run", leave=False, disable=None)


def _progress(bar: tqdm[Any]) -> Callable[[str], None]:
    def progress(name: str) -> None:
        bar.set_postfix_str(name)
        bar.update()

    return progress


def _write(args: argparse.Namespace, findings: Findings, shown: list[tuple[Cell, list[Result]]]) -> None:
    """Prints tables of the cells in `shown`, and all lines of JSON."""
    from . import writing

    for cell, results in shown:
        print(f"{writing.table(cell, results, args.synthetic_acceptance)}\n", flush=True)
    if args.json:
        lines = writing.records(findings.cells, args.synthetic_acceptance, findings.facts)
        writing.write_json_lines(args.json, lines)


class Models(NamedTuple):
    """A pair, and the prompts in its ids."""

    name: str
    target: Any
    draft: Any
    pad_token_id: int
    prompts: list[list[int]]


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    from .prompts import BUILT_IN, read_prompts

    prompts = read_prompts(args.prompts) if args.prompts else list(BUILT_IN)
    usual = len(prompts) if args.prompts else min(len(prompts), max(2, *args.batch_sizes))
    wanted = args.num_prompts or usual
    if wanted > len(prompts):
        raise ValueError(f"--num-prompts {wanted}: there are {len(prompts)} prompts. Give a file with more.")
    return prompts[:wanted]


def _load(args: argparse.Namespace, prompts: list[Prompt]) -> Models:
    if not args.preset:
        pair = load(args)
        ids = [encode(pair.tokenizer, prompt) for prompt in prompts]
        return Models(pair.name, pair.target, pair.draft, pad_token_id(pair.tokenizer), ids)
    import torch

    from .. import pairs
    from .presets import build_pair
    from .prompts import random_prompts

    device = pairs.find_device(args.device)
    usual = "float32" if device.type == "cpu" else "bfloat16"
    target, draft = build_pair(args.preset, device, getattr(torch, args.dtype or usual), args.layers)
    layers = f" of {args.layers} layers" if args.layers else ""
    ids = random_prompts(target.config.vocab_size, args.seed)[: len(prompts)]
    name, target, draft, _ = prepared(args, Pair(f"random weights, {args.preset}{layers}", target, draft, None))
    return Models(name, target, draft, 0, ids)


def _cells(
    args: argparse.Namespace, prompts: list[list[int]], pad: int, config: PreTrainedConfig, device: torch.device
) -> list[Cell]:
    from .prompts import batches, stretch
    from .running import Cell

    cells = []
    for context in args.contexts or [None]:
        ids = prompts if context is None else stretch(prompts, context)
        longest = max(map(len, ids)) + args.max_new_tokens
        check_room(config, longest, "give fewer --max-new-tokens, or shorter prompts or --contexts")
        for size in args.batch_sizes:
            cells.append(Cell(size, context, batches(ids, size, pad, device)))
    return cells


def _methods(args: argparse.Namespace, kinds: Sequence[str], backend: str) -> list[Method]:
    """Those of a kind with several settings next to one another."""
    from .methods import NO_LENGTH, Method

    is_one_rule = args.greedy or args.synthetic_acceptance is not None
    deltas = (None,) if is_one_rule else tuple(dict.fromkeys(args.deltas or options.DELTAS))
    methods = []
    for kind in kinds:
        lengths = (None,) if kind in NO_LENGTH else tuple(dict.fromkeys(args.num_assistant_tokens))
        for delta in deltas if kind in options.WITH_DELTA else (None,):
            methods += [Method(kind, length, delta, backend) for length in lengths]
    return methods


def _decoders(args: argparse.Namespace, models: Models) -> Decoders:
    from ..generation import enable
    from .methods import Decoders
    from .rivals import Sampling

    settings = {"max_new_tokens": args.max_new_tokens, "pad_token_id": models.pad_token_id, "eos_token_id": None}
    settings |= {"do_sample": False} if args.greedy else {"do_sample": True, **sampling_options(args)}
    return Decoders(
        enable(models.target),
        models.draft,
        settings,
        Sampling(args.greedy, args.temperature, args.top_p or 1.0),
        args.mixture_weight or options.MIXTURE_WEIGHT,
        args.synthetic_acceptance,
    )


def _synthetic_note(args: argparse.Namespace) -> str:
    weights = "random weights; " if args.preset else ""
    return (
        f"SYNTHETIC: {weights}drafts are kept by lot with probability {args.synthetic_acceptance:g}. Speed is the "
        "machine's, text and acceptance are not a model's."
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    from ..report import json_number

    settings = {name: value for name, value in vars(args).items() if name not in ("run", "command")}
    if args.deltas:
        settings["deltas"] = [json_number(delta) for delta in args.deltas]
    return settings


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
