"""Command that makes a draft for a Llama-family target: `cactus-hf distill sample | train | average | evaluate`.

`sample` lets the target write conversations, `train` trains a few of its layers on them, `average` joins runs that
went on separately, `evaluate` measures how often the target would keep the draft's tokens:

    cactus-hf distill sample --data shards --prompts gsm8k_train.jsonl
    cactus-hf distill train --data shards --out one.safetensors
    cactus-hf distill evaluate --draft one.safetensors --prompts questions.jsonl

The draft of SmolLM2-135M-Instruct that ships with this package (from layers 0, 1, 2, 28 and 29) was made in two runs,
each with the last fifth to third of the updates made twice, on copies of the state with different `--seed`, and
averaged. The first had 837,000 tokens, 19 shards of `--written-share 0 --opening-share 0.5` and 4 of `--given-share 0
--written-share 0.9 --opening-share 0.05`, and 4,300 updates; the defaults are its own, with its two kinds of shards
mixed. The second went on from there (`--start`, and the optimiser's state) with 972,000 new tokens, 6 shards of
`--given-share 0 --written-share 0.5` and 13 of `--given-share 0 --written-share 0.6 --opening-share 0.25 --answer-len
256 --slots 480`, and 514,000 of the old ones, for 4,500 updates of `--learning-rate 7e-4 --warmup 0.03 --decay-from
0.4 --acceptance-from -0.3 --acceptance-ramp 0.6 --hidden-weight 0`. Two shared CPU cores took three and a half hours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..json_lines import read_lines
from .draft import SHIPPED_DRAFT, average_drafts, load_draft, save_draft, set_trained, trained_parts
from .evaluation import acceptance, sample_answers
from .options import add_options, read_options
from .pair import load_target
from .self_prompting import SamplingConfig, SelfPrompting, Template
from .shards import rank_ids, read_shard, write_shard
from .training import Stream, Trainer, TrainingConfig, dev_acceptance, start_draft


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the steps and their options to `parser`."""
    steps = parser.add_subparsers(dest="step", required=True, metavar="{sample,train,average,evaluate}")
    prompts = "JSON lines with `prompt`, `question` or `turns` (the first counts)"
    shown = " (default: %(default)s)"

    sample = steps.add_parser("sample", help="let the target write conversations to train on")
    add = sample.add_argument
    add("--data", type=Path, required=True, help="folder for the shards; finished ones are kept")
    add("--tokens", type=int, default=1_000_000, help="stop when the folder holds so many tokens" + shown)
    add("--prompts", type=Path, help=prompts)
    add("--first", type=int, default=0, help="number and seed of the first shard" + shown)
    add("--stride", type=int, default=1, help="step between shard numbers, to share a folder among processes" + shown)
    add_options(sample, SamplingConfig)

    learn = steps.add_parser("train", help="train a draft on them")
    add = learn.add_argument
    add("--data", type=Path, required=True, help="folder written by `sample`, which may still be running")
    add("--out", type=Path, required=True, help="file to write; beside it, as .state, all that is needed to go on")
    add("--start", type=Path, help="draft to begin with (default: layers of the target); a .state goes first")
    add("--kept-ids", type=int, default=16384, help="token ids in the draft's head" + shown)
    add("--dev-conversations", type=int, default=32, help="conversations held out for progress figures" + shown)
    add("--report-seconds", type=float, default=300, help="seconds between them" + shown)
    add_options(learn, TrainingConfig)

    average = steps.add_parser("average", help="average drafts that went on separately from one .state")
    average.add_argument("drafts", type=Path, nargs="+", help="draft files")
    average.add_argument("--out", type=Path, required=True, help="file to write")

    measure = steps.add_parser("evaluate", help="measure the acceptance of a draft on the target's own answers")
    add = measure.add_argument
    add("--draft", type=Path, default=SHIPPED_DRAFT, help="draft file (default: the shipped one)")
    add("--prompts", type=Path, required=True, help=prompts + "; never train on them")
    add("--categories", help="comma-separated values of the field `category` to keep (default: all)")
    add("--limit", type=int, help="use the first so many prompts")
    add("--temperature", type=float, default=0.7, help="of both laws and of the answers" + shown)
    add("--max-new-tokens", type=int, default=128, help="most tokens of an answer" + shown)
    add("--batch", type=int, default=16, help="prompts answered together" + shown)
    add("--seed", type=int, default=0, help="of the answers" + shown)

    for step in (sample, learn, average, measure):
        step.add_argument("--target", help="model id or folder (default: the embedded SmolLM2-135M-Instruct)")
        step.add_argument("--threads", type=int, help="CPU threads (default: torch's)")


def run(args: argparse.Namespace) -> int:
    """Runs the step that was parsed; figures go to stdout as JSON lines."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.target is None:
        target, tokenizer = load_target(device="cpu", dtype=torch.float32)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    if args.step == "average":
        average_drafts(target, args.drafts, args.out)
    else:
        {"sample": run_sample, "train": run_train, "evaluate": run_evaluate}[args.step](args, target, tokenizer)
    return 0


def read_prompts(path: Path, categories: str | None = None) -> list[str]:
    """The prompts of a JSON-lines file; of several turns the first."""
    prompts = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        if categories and row.get("category") not in categories.split(","):
            continue
        prompt = row.get("prompt") or row.get("question") or (row.get("turns") or [None])[0]
        if not isinstance(prompt, str):
            raise ValueError(
                f"{path}, line {number} has no text in `prompt`, `question` or `turns`; found {', '.join(row)}."
            )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts{f' of the categories {categories}' if categories else ''}.")
    return prompts


def run_sample(args: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    args.data.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(args.prompts) if args.prompts else []
    sampler = SelfPrompting(target, tokenizer, prompts, read_options(args, SamplingConfig))
    number, tokens = args.first, 0
    counted: set[Path] = set()
    with tqdm(total=args.tokens, unit=" tokens", desc="Sampling") as bar:
        while True:
            for path in set(args.data.glob("*.safetensors")) - counted:
                counted.add(path)
                tokens += sum(len(sample.tokens) for sample in read_shard(path))
            bar.update(tokens - bar.n)
            if tokens >= args.tokens:
                break
            path = args.data / f"{number:05d}.safetensors"
            if not path.exists():
                began = time.monotonic()
                written = write_shard(path, sampler.wave(seed=number))
                print(
                    json.dumps({"shard": path.name, "tokens": written, "seconds": round(time.monotonic() - began, 1)}),
                    flush=True,
                )
            number += args.stride


def run_train(args: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    config = read_options(args, TrainingConfig)
    template = Template.of(tokenizer)
    shards = sorted(args.data.glob("*.safetensors"))
    if len(shards) < 2:
        raise ValueError(
            f"{args.data} holds {len(shards)} shards; at least 2 are needed, of which the first is held out. "
            "Run `cactus-hf distill sample`."
        )
    start = load_draft(target, args.start) if args.start else None
    if start is not None and start.config.num_hidden_layers != len(config.layers):
        raise ValueError(
            f"The draft to begin with has {start.config.num_hidden_layers} layers, and {len(config.layers)} are asked "
            "for: give as many `--layers`."
        )
    held_out = shards[0]
    dev = [sample for sample in read_shard(held_out) if len(sample.tokens) > 1][: args.dev_conversations]
    head = target.get_output_embeddings().weight.detach()
    torch.manual_seed(config.seed)
    ranked = rank_ids(shards[1:], head, config.temperature)
    draft = start_draft(target, config.layers, ranked[: args.kept_ids].sort().values)
    if start is not None:
        set_trained(draft, trained_parts(start))
    averaged = start_draft(target, config.layers, draft.kept_ids)
    stream = Stream(args.data, {held_out.name}, template.prefix, template.stop, config)
    trainer = Trainer(draft, config)
    state = args.out.with_suffix(".state")
    if state.exists():
        trainer.restore(state)
    visited, reported = 0, time.monotonic()

    def report(figures: dict, *, is_last: bool = False) -> None:
        nonlocal visited, reported
        visited += figures.pop("tokens", 0)
        if not is_last and time.monotonic() - reported < args.report_seconds:
            return
        set_trained(averaged, trainer.average)
        kept = dev_acceptance(averaged, dev, template.prefix, template.stop, config.temperature)
        figures |= {"dev_acceptance": kept, "tokens_visited": visited, "shards": len(stream.visits)}
        save_draft(averaged, args.out, metadata={"layers": list(config.layers), **figures})
        trainer.save(state)
        print(json.dumps(figures), flush=True)
        reported = time.monotonic()

    trainer.run(stream, report)
    report({"step": trainer.step, "progress": trainer.progress}, is_last=True)


def run_evaluate(args: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    draft = load_draft(target, args.draft)
    prompts = read_prompts(args.prompts, args.categories)[: args.limit]
    answers = sample_answers(
        target,
        tokenizer,
        prompts,
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        batch=args.batch,
        progress=partial(tqdm, desc="Answering", unit=" batches"),
    )
    rows = [acceptance(target, draft, *row, temperature=args.temperature) for row in tqdm(answers, desc="Scoring")]
    kept, ceiling = (torch.cat(parts) for parts in zip(*rows, strict=True))
    figures = {
        "acceptance": round(float(kept.mean()), 4),
        "standard_error": round(float(kept.std() / len(kept) ** 0.5), 4),
        "ceiling": round(float(ceiling.mean()), 4),
        "temperature": args.temperature,
        "prompts": len(prompts),
        "positions": len(kept),
        "seed": args.seed,
        "draft_bytes": args.draft.stat().st_size,
    }
    print(json.dumps(figures))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cactus_hf.embedded.distill", description=__doc__.split("\n\n")[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
