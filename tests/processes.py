"""What tests/test_ranks.py runs in each of two processes; not collected by pytest.

    python -m torch.distributed.run --standalone --nproc_per_node 2 tests/processes.py MODE FOLDER

FOLDER holds the models that `save_models` put there. Each process leaves its results in FOLDER/MODE-RANK.pt. Anything
that differs between the processes where it must not is a hang, or a difference in these results.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import cactus_hf
import tiny
from cactus_hf import support
from cactus_hf.host import CACHE_NAME


VOCAB = 96  # even, as transformers 5.17 shards the head in equal parts
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tiny.PAD}
SAMPLE = {**GREEDY, "do_sample": True, "cactus_delta": 0.5, "temperature": 0.8}


def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A pair of one family; "outgrown": one whose draft holds fewer tokens than the texts come to have."""
    if name == "outgrown":
        return tiny.model("qwen3", vocab=VOCAB), tiny.model("gpt2", vocab=VOCAB, n_positions=40)
    return tiny.pair(name, vocab=VOCAB)


def save_models(folder: Path) -> None:
    for role, model in zip(("target", "draft"), models("qwen3"), strict=True):
        model.save_pretrained(folder / role)
        tiny.word_tokenizer(VOCAB).save_pretrained(folder / role)


def prompts(*lengths: int) -> dict[str, Tensor]:
    return tiny.ragged_prompts(lengths, vocab=VOCAB).inputs


class PassCounter:
    """Counts the forward passes of a model."""

    def __init__(self, model: PreTrainedModel):
        self.count = 0
        model.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.count += 1


class StopsAfter(StoppingCriteria):
    """Stops all rows at one of the calls, as a clock would."""

    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls < 0)


def parallel_calls(rank: int) -> dict[str, dict[str, Any]]:
    """Calls of a tensor-parallel model; what `rank` 0 asks for counts, and the others' seeds and clocks do not."""
    three = prompts(5, 17, 9)
    return {
        "greedy": {**three, **GREEDY, "cactus_delta": 1.0},
        "sampled": {**three, **SAMPLE},
        "seeds": {**three, **SAMPLE, "generator": [7 * rank, 8, 9 + rank]},
        "generator": {**three, **SAMPLE, "generator": torch.Generator().manual_seed(rank), "speculation_kl": True},
        "unsure": {
            **three,
            **SAMPLE,
            "assistant_confidence_threshold": 0.6,
            "num_assistant_tokens": 4,
            "num_assistant_tokens_schedule": "heuristic",
            "eos_token_id": list(range(10, 30)),
        },
        "clock": {**three, **SAMPLE, "stopping_criteria": StoppingCriteriaList([StopsAfter(4 + 3 * rank)])},
        "one row": {**prompts(7), **SAMPLE},
        "lookup": {**three, **SAMPLE, "prompt_lookup_num_tokens": 3},
        "early exit": {**three, **SAMPLE, "assistant_early_exit": 1},
    }


def run(
    target: PreTrainedModel, draft: PreTrainedModel, calls: dict[str, dict[str, Any]], rank: int
) -> dict[str, Any]:
    """What each call returns: token ids, and statistics as lists; of one row alone, its cache too."""
    results = {}
    for name, options in calls.items():
        torch.manual_seed(rank)
        has_source = options.keys() & {"prompt_lookup_num_tokens", "assistant_early_exit"}
        assistant = {} if has_source else {"assistant_model": draft}
        output = target.generate(**options, **assistant, return_dict_in_generate=True)
        stats = output.speculation
        results[name] = [x.tolist() for x in (output.sequences, stats.kinds, stats.drafted, stats.rounds)]
        if len(output.sequences) == 1:
            results[f"{name} cache"] = [layer.keys for layer in output[CACHE_NAME].layers]
    return results


def add_noise(model: PreTrainedModel) -> None:
    """Makes the logits of this process worse than any rounding could."""
    generator = torch.Generator().manual_seed(0)

    def disturb(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        output.logits = output.logits + torch.randn(output.logits.shape, generator=generator)
        return output

    model.register_forward_hook(disturb, with_kwargs=True)


def tensor_parallel(folder: Path) -> dict[str, Any]:
    """Target, and draft or not, spread over the processes; the second has other seeds, and noise on its logits."""
    from transformers.distributed import DistributedConfig

    results = {}
    for name, target_config, draft_config in (
        ("whole draft", {"tp_size": 2}, None),
        ("parallel draft", {"tp_size": 2}, {"tp_size": 2}),
        ("pipeline", {"pp_size": 2}, None),
    ):
        target, draft = (
            AutoModelForCausalLM.from_pretrained(
                folder / role, distributed_config=config and DistributedConfig(**config)
            )
            for role, config in (("target", target_config), ("draft", draft_config))
        )
        rank = torch.distributed.get_rank()
        for model in (target, draft) if rank == 1 else ():
            add_noise(model)
        own_calls = parallel_calls(rank)
        if name == "pipeline":
            del own_calls["early exit"]
        results[name] = run(cactus_hf.enable(target), draft, own_calls, rank)
        if name == "whole draft":
            different = {
                "prompts": prompts(5 + rank),
                "lengths": {**prompts(5), "max_new_tokens": 12 + rank},
                "criteria": {**prompts(5), "max_time": (9.0, None)[rank]},
            }
            for case, options in different.items():
                try:
                    target.generate(**GREEDY | options, assistant_model=draft, cactus_delta=1.0)
                except ValueError as error:
                    results[f"different {case}"] = str(error)
    return results


def synced_calls(rank: int) -> dict[str, dict[str, Any]]:
    """Calls of processes with prompts and options of their own, which need different numbers of passes."""
    own = prompts(*((5, 17, 9), (2,))[rank])
    short, long = ((12, 25), (25, 12))[rank]
    return {
        "greedy": {**own, **GREEDY, "cactus_delta": 1.0, "max_new_tokens": short},
        "sampled": {**own, **SAMPLE, "max_new_tokens": long, "num_assistant_tokens": 2 + 3 * rank},
        "seeds": {**own, **SAMPLE, "generator": [4, 5, 6][: len(own["input_ids"])]},
        "unsure": {
            **own,
            **SAMPLE,
            "assistant_confidence_threshold": 0.6 * rank,
            "num_assistant_tokens_schedule": "heuristic",
            "eos_token_id": list(range(10, 30)),
            "max_new_tokens": short,
        },
        "one token": {**own, **SAMPLE, "max_new_tokens": (1, 9)[rank]},
        "lookup": {**own, **SAMPLE, "prompt_lookup_num_tokens": 3, "max_new_tokens": long},
        "early exit": {**own, **SAMPLE, "assistant_early_exit": 1, "max_new_tokens": short},
        "outgrowing": {**own, **SAMPLE, "max_new_tokens": (40, 44)[rank]},
        "outgrowing row": {**prompts(9 - 7 * rank), **SAMPLE, "max_new_tokens": 44},
    }


def one_row_calls(rank: int) -> dict[str, dict[str, Any]]:
    """Such calls for models that take one row at a time; a batch is decoded row by row."""
    lengths = {"one": ((3,), (11,)), "many": ((3, 5, 2), (11,)), "few": ((4,), (6, 3))}
    return {
        name: {**prompts(*each[rank]), **SAMPLE, "max_new_tokens": (5, 20)[rank], "synced_gpus": True}
        for name, each in lengths.items()
    }


def synced(folder: Path) -> dict[str, Any]:
    """Target and draft whose weights are spread over the processes, gathered for each pass."""
    from torch.distributed.fsdp import FSDPModule
    from transformers.distributed import DistributedConfig

    results = {}
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / role, distributed_config=DistributedConfig(fsdp_size=2))
        for role in ("target", "draft")
    )
    rank = torch.distributed.get_rank()
    results["qwen3"] = counted_run(cactus_hf.enable(target), draft, synced_calls(rank), rank)
    tested, support.TESTED = support.TESTED, frozenset()  # then a batch is tried out first, which takes a pass
    calls = {name: synced_calls(rank)[name] for name in ("greedy", "sampled")}
    results["untested"] = counted_run(target, draft, calls, rank)
    calls = {name: synced_calls(rank)[name] for name in ("outgrowing", "outgrowing row")}
    results["outgrown"] = counted_run(target, sharded(copy.deepcopy(models("outgrown")[1])), calls, rank)
    support.TESTED = tested
    target, draft = (copy.deepcopy(model) for model in models("bloom"))  # one row at a time
    target, draft = sharded(cactus_hf.enable(target)), sharded(draft)
    results["bloom"] = counted_run(target, draft, one_row_calls(rank), rank)
    cactus_hf.disable(target)
    results["disabled"] = [type(target).__name__, isinstance(target, FSDPModule)]
    return results


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh)
    return model


def counted_run(target: PreTrainedModel, draft: PreTrainedModel, calls: dict[str, dict[str, Any]], rank: int) -> Any:
    counters = [PassCounter(model) for model in (target, draft)]
    results = run(target, draft, calls, rank)
    return results | {"passes": [counter.count for counter in counters]}


if __name__ == "__main__":
    mode, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    results = {"tensor_parallel": tensor_parallel, "synced": synced}[mode](folder)
    torch.save(results, folder / f"{mode}-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
