"""`cactus-hf eval`: lets methods answer a benchmark's questions with a pair of models, and says how well they did."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import vllm_backend
from ..arguments import (
    LARGEST_SEED,
    Pair,
    add_models,
    check_folders,
    check_models,
    check_room,
    load,
    number,
    pad_token_id,
)
from ..json_lines import claimed
from ..vllm_backend import BACKENDS, TRANSFORMERS, VLLM, Source, Vllm, find_source
from .methods import PLAIN, Method, method_name, syntax


if TYPE_CHECKING:
    from .records import Records
    from .running import Backend, Evaluation
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

    vllm_backend.add_backend(add)

    add = parser.add_argument_group("decoding, as in the paper unless said otherwise").add_argument
    add("--batch-size", type=count, default=8, metavar="B", help=f"rows decoded together {default}")
    add("--max-new-tokens", type=count, default=4096, metavar="N", help=default)
    add("--temperature", type=number(0, is_open=True), default=0.6, metavar="T", help=default)
    add("--top-p", type=number(0, 1, is_open=True), default=0.95, metavar="P", help=f"1 is off {default}")
    add("--top-k", type=number(0, is_whole=True), default=20, metavar="K", help=f"0 is off {default}")
    add("--seed", type=number(0, LARGEST_SEED, is_whole=True), default=0, help=default)
    add("--no-chat-template", action="store_true", help="give the model the bare question")
    add("--think-end", default="</think>", metavar="TEXT", help=f"what stands before it is not scored {default}")
    add(
        "--emitted-kl",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="measure the divergence of the emitted law; takes time, little behind a top-k (default: on; not in vLLM)",
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
    vllm_backend.check_backend(args)
    if args.emitted_kl and vllm_backend.is_vllm_alone(args):
        raise ValueError("--emitted-kl: vLLM does not measure it. Leave it out, or add the backend transformers.")
    check_lm_eval()
    check_folders(args, "output", "json")
    if args.data and not Path(args.data).is_file():
        raise ValueError(f"--data {args.data}: there is no such file. Without --data the questions come from the Hub.")
    if args.task == "ifeval":
        check_sentences()


def run(args: argparse.Namespace) -> int:
    """Runs the evaluation and returns the exit status."""
    from .tasks import quiet_lm_eval

    check_options(args)
    with quiet_lm_eval():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    import torch
    from accelerate import PartialState

    from .tasks import load_task, own_data

    state = PartialState(cpu=not torch.cuda.is_available())
    if state.num_processes > 1 and VLLM in args.backend:
        raise ValueError('vLLM starts its own processes: run one, with "tensor_parallel_size" in --vllm-options.')
    with own_data(args.task, args.data):
        task = load_task(args.task, args.data)
    for backend in dict.fromkeys(args.backend):
        records, asked = _answer(args, backend, task, state)
    state.wait_for_everyone()
    if state.is_main_process:
        records.reload()
        indices = [question.index for question in asked]
        _report(args, task, records, _shown(args, records, indices), indices)
    return 0


def _answer(args: argparse.Namespace, backend: str, task: Any, state: Any) -> tuple[Records, list[Question]]:
    """Has one backend's methods answer the questions; returns all answers of the file, and the questions."""
    from tqdm import tqdm

    from .. import report
    from .records import Records, part_of
    from .running import batches, run, share
    from .tasks import own_data, questions

    pair = load(args) if backend == TRANSFORMERS else find_source(args)
    with own_data(args.task, args.data):
        asked = questions(task, pair.tokenizer, args.limit, not args.no_chat_template)
        if not asked:
            raise ValueError("there are none")
    _check_lengths(args, pair, asked)
    methods = _methods(args, backend)
    work = list(share(batches(asked, args.batch_size), state.process_index, state.num_processes))
    total = len(methods) * sum(map(len, work))
    is_main = state.is_main_process
    with (
        claimed(part_of(Path(args.output), state.process_index)),
        contextlib.ExitStack() as stack,
        tqdm(total=total, desc=f"Answering {args.task}", unit="answer", disable=None if is_main else True) as bar,
    ):
        records = Records(args.output, _settings(args, pair, asked), state.process_index)
        records.check_questions(args.task, {each.index: each.sha256 for each in asked})
        if is_main:
            title = pair.title if isinstance(pair, Source) else report.describe(pair.name, pair.target, pair.draft)
            print(f"{title}\n", flush=True)

        def progress(name: str, num: int) -> None:
            bar.set_postfix_str(name)
            bar.update(num)

        evaluation: Backend
        if isinstance(pair, Source):
            evaluation = _vllm_evaluation(args, pair, stack)
        else:
            evaluation = _evaluation(args, pair)
        run(evaluation, args.task, work, methods, records, progress)
    return records, asked


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
    with_kl = args.emitted_kl is not False
    return Evaluation(enable(pair.target), pair.draft, tokenizer, options, args.seed, with_kl, args.think_end)


def _vllm_evaluation(args: argparse.Namespace, source: Source, stack: contextlib.ExitStack) -> Backend:
    from .vllm_answers import VllmEvaluation

    vllm = stack.enter_context(contextlib.closing(Vllm(source, args.vllm_options, args.seed)))
    names = ("temperature", "top_p", "top_k")
    sampling = {"max_tokens": args.max_new_tokens, **{name: getattr(args, name) for name in names}}
    return VllmEvaluation(vllm, source.tokenizer, sampling, args.seed, args.think_end)


def _check_lengths(args: argparse.Namespace, pair: Pair | Source, asked: list[Question]) -> None:
    tokenizer: Any = pair.tokenizer
    config = pair.config if isinstance(pair, Source) else pair.target.config
    longest = max(len(tokenizer(each.prompt, add_special_tokens=False)["input_ids"]) for each in asked)
    check_room(config, longest + args.max_new_tokens, "give fewer --max-new-tokens")


def _settings(args: argparse.Namespace, pair: Pair | Source, asked: list[Question]) -> dict[str, Any]:
    """What all answers of a file have in common; how many questions, which methods and batches may change."""
    from .. import report

    names = ("task", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "think_end")
    return {
        "models": pair.name,
        "dtype": pair.dtype if isinstance(pair, Source) else report.dtype_name(pair.target),
        **{name: getattr(args, name) for name in names},
        "emitted_kl": args.emitted_kl is not False,
        "first_prompt_sha256": asked[0].sha256,
    }


def _methods(args: argparse.Namespace, backend: str) -> list[Method]:
    lengths = dict.fromkeys(args.num_assistant_tokens)
    names = dict.fromkeys(args.methods)
    return [Method(name, m, backend) for name in names for m in ([None] if name == PLAIN else lengths)]


def _shown(args: argparse.Namespace, records: Records, indices: list[int]) -> list[Method]:
    """This run's methods, and the other backend's whose answers to the same questions are in the file."""
    from .records import Key

    own = [method for backend in dict.fromkeys(args.backend) for method in _methods(args, backend)]
    others = dict.fromkeys(key.method for key in records.answers if key.method.backend not in args.backend)
    whole = [each for each in others if all(Key(args.task, index, each) in records.answers for index in indices)]
    return sorted([*whole, *own], key=lambda method: BACKENDS.index(method.backend))


def _report(args: argparse.Namespace, task: Any, records: Records, methods: list[Method], indices: list[int]) -> None:
    from ..bench.provenance import git_revision
    from ..report import versions
    from .table import LEGEND, entry, table

    summaries = _summaries(args.task, task, records, methods, indices)
    print(f"{table(summaries)}\n\n{LEGEND}")
    if args.json:
        facts = {"settings": records.settings, "batch_size": args.batch_size, "versions": versions()}
        if VLLM in args.backend:
            facts["versions"][VLLM] = vllm_backend.version()
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
