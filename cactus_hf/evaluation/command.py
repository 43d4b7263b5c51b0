"""`cactus-hf eval`: lets methods answer a benchmark's questions with a pair of models, and says how well they did."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import (
    Pair,
    add_models,
    check_folders,
    check_models,
    check_room,
    load,
    number,
    pad_token_id,
    quiet_transformers,
)
from ..json_lines import claimed
from .methods import PLAIN, Method, method_name, syntax


if TYPE_CHECKING:
    from .records import Records
    from .running import Evaluation
    from .summary import Summary
    from .tasks import Question

TASKS = ("gsm8k", "ifeval", "gpqa_diamond")
METHODS = (PLAIN, "sps", "cactus:0.5", "cactus:1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the evaluation to `parser`."""
    count, default = number(1, is_whole=True), "(default: %(default)s)"
    add_models(parser)

    add = parser.add_argument_group("what to compare").add_argument
    add("--task", choices=TASKS, default="gsm8k", help=default)
    add(
        "--methods",
        nargs="+",
        type=method_name,
        default=list(METHODS),
        metavar="NAME",
        help=f"{PLAIN} (the target alone), {syntax()} (default: {' '.join(METHODS)})",
    )
    add(
        "--num-assistant-tokens",
        nargs="+",
        type=count,
        default=[10],
        metavar="M",
        help="drafted tokens a round (default: 10)",
    )
    add("--data", metavar="FILE", help="the questions: JSON lines, or GPQA's zip archive (default: from the Hub)")
    add("--limit", type=count, metavar="N", help="the first N questions (default: all)")

    add = parser.add_argument_group("decoding, as in the paper unless said otherwise").add_argument
    add("--batch-size", type=count, default=8, metavar="B", help=f"rows decoded together {default}")
    add("--max-new-tokens", type=count, default=4096, metavar="N", help=default)
    add("--temperature", type=number(0, is_open=True), default=0.6, metavar="T", help=default)
    add("--top-p", type=number(0, 1, is_open=True), default=0.95, metavar="P", help=f"1 is off {default}")
    add("--top-k", type=number(0, is_whole=True), default=20, metavar="K", help=f"0 is off {default}")
    add("--seed", type=number(0, is_whole=True), default=0, help=default)
    add("--no-chat-template", action="store_true", help="give the model the bare question")
    add("--think-end", default="</think>", metavar="TEXT", help=f"what stands before it is not scored {default}")
    add(
        "--emitted-kl",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the divergence of the emitted law; takes time, little behind a top-k (default: on)",
    )

    add = parser.add_argument_group("output").add_argument
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="JSON lines, one an answer; an existing file is continued",
    )
    add("--json", metavar="FILE", help="write JSON lines, one a method")


def check_options(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: for options that contradict one another or cannot be met.
        ImportError: if lm-eval is missing.
        OSError: if what scores answers cannot be fetched.
    """
    from .tasks import check_lm_eval, check_sentences

    check_models(args)
    check_lm_eval()
    check_folders(args, "output", "json")
    if args.data and not Path(args.data).is_file():
        raise ValueError(f"--data {args.data}: there is no such file. Without --data the questions come from the Hub.")
    if args.task == "ifeval":
        check_sentences()


def run(args: argparse.Namespace) -> int:
    """Runs the evaluation and returns the exit status."""
    check_options(args)
    with _quiet_lm_eval():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    import torch
    from accelerate import PartialState
    from tqdm import tqdm

    from .. import report
    from .records import Records, part_of
    from .running import batches, run, share
    from .tasks import load_task, questions

    state = PartialState(cpu=not torch.cuda.is_available())
    with _own_data(args):
        task = load_task(args.task, args.data)
    pair = load(args)
    evaluation = _evaluation(args, pair)
    with _own_data(args):
        asked = questions(task, pair.tokenizer, args.limit, not args.no_chat_template)
        if not asked:
            raise ValueError("there are none")
    _check_lengths(args, pair, asked)
    methods = _methods(args)
    work = list(share(batches(asked, args.batch_size), state.process_index, state.num_processes))
    total = len(methods) * sum(map(len, work))
    is_main = state.is_main_process
    with (
        claimed(part_of(Path(args.output), state.process_index)),
        tqdm(total=total, desc=f"Answering {args.task}", unit="answer", disable=None if is_main else True) as bar,
    ):
        records = Records(args.output, _settings(args, pair, asked), state.process_index)
        records.check_questions(args.task, {each.index: each.sha256 for each in asked})
        if is_main:
            print(f"{report.describe(pair.name, pair.target, pair.draft)}\n", flush=True)

        def progress(name: str, num: int) -> None:
            bar.set_postfix_str(name)
            bar.update(num)

        run(evaluation, args.task, work, methods, records, progress)
    state.wait_for_everyone()
    if is_main:
        records.reload()
        _report(args, task, records, methods, [question.index for question in asked])
    return 0


def _evaluation(args: argparse.Namespace, pair: Pair) -> Evaluation:
    from ..generation import enable
    from .running import Evaluation

    tokenizer: Any = pair.tokenizer
    tokenizer.padding_side = "left"
    pad = pad_token_id(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {
        "do_sample": True,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "repetition_penalty": 1.0,  # whatever the checkpoint's own config says: the paper's settings have none
        "pad_token_id": pad,
    }
    return Evaluation(enable(pair.target), pair.draft, tokenizer, options, args.seed, args.emitted_kl, args.think_end)


def _check_lengths(args: argparse.Namespace, pair: Pair, asked: list[Question]) -> None:
    tokenizer: Any = pair.tokenizer
    longest = max(len(tokenizer(each.prompt, add_special_tokens=False)["input_ids"]) for each in asked)
    check_room(pair.target, longest + args.max_new_tokens, "give fewer --max-new-tokens")


def _settings(args: argparse.Namespace, pair: Pair, asked: list[Question]) -> dict[str, Any]:
    """What all answers of a file have in common; how many questions, which methods and batches may change."""
    from .. import report

    names = ("task", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "think_end", "emitted_kl")
    return {
        "models": pair.name,
        "dtype": report.dtype_name(pair.target),
        **{name: getattr(args, name) for name in names},
        "first_prompt_sha256": asked[0].sha256,
    }


def _methods(args: argparse.Namespace) -> list[Method]:
    lengths = dict.fromkeys(args.num_assistant_tokens)
    names = dict.fromkeys(args.methods)
    return [Method(name, m) for name in names for m in ([None] if name == PLAIN else lengths)]


def _report(args: argparse.Namespace, task: Any, records: Records, methods: list[Method], indices: list[int]) -> None:
    from ..bench.provenance import git_revision
    from ..report import versions
    from .table import LEGEND, entry, table

    summaries = _summaries(args.task, task, records, methods, indices)
    print(f"{table(summaries)}\n\n{LEGEND}")
    if args.json:
        facts = {"settings": records.settings, "batch_size": args.batch_size, "versions": versions()}
        facts["git_revision"] = git_revision()
        lines = [json.dumps({**entry(each, summaries), **facts}, allow_nan=False) for each in summaries]
        Path(args.json).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _summaries(name: str, task: Any, records: Records, methods: list[Method], indices: list[int]) -> list[Summary]:
    from .records import Key
    from .summary import summarise
    from .tasks import TASKS as definitions
    from .tasks import scores

    found = []
    for method in methods:
        answers = [records.answers[Key(name, index, method)] for index in indices]
        texts = {answer.question: answer.text for answer in answers}
        found.append(summarise(name, method, answers, scores(task, definitions[name], texts)))
    return found


@contextlib.contextmanager
def _own_data(args: argparse.Namespace) -> Iterator[None]:
    """Turns whatever lm-eval and datasets make of a file that does not fit into an error about that file."""
    try:
        yield
    except Exception as error:
        if args.data is None or isinstance(error, ImportError):
            raise
        cause = error.__cause__ or error
        raise ValueError(
            f"--data {args.data} does not hold questions of {args.task} ({type(cause).__name__}: {cause}): give JSON "
            "lines with the fields of the Hub's data set, or GPQA's zip archive for gpqa_diamond."
        ) from error


@contextlib.contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Keeps lm-eval's and datasets' own words and bars out of the output."""
    import os

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    with quiet_transformers():
        yield
