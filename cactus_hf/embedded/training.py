"""Training of the draft on the target's own conversations.

The loss has three parts. Kullback-Leibler divergence of the draft's law from the target's at the temperature of use
keeps mass wherever the target has it. Later the acceptance itself, sum_x min(target_x, draft_x), takes over: it is
what speculative decoding gains from (Zhou et al., "DistillSpec", arXiv 2310.08461, train on total variation for that
reason), but its gradient vanishes where the laws are disjoint. The distance from the target's final hidden state helps
a little in the beginning.

Letters: N positions, H hidden size, K kept ids.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from .draft import build_draft, trained_parts
from .options import option
from .shards import Batch, Sample, collate, read_shard


@dataclass(frozen=True)
class TrainingConfig:
    """Options of a training run (`cactus-hf distill train --help`), by default those of the shipped draft's first."""

    layers: tuple[int, ...] = option((0, 1, 2, 28, 29), "layers of the target that the draft starts from, in order")
    steps: int = option(4300, "updates; learning rate and losses follow the share of them that is done")
    minutes: float | None = option(None, "wall time that ends the run instead of `steps`")
    tokens_per_step: int = option(768, "most tokens in a batch, padding included")
    learning_rate: float = option(1e-3, "highest learning rate")
    warmup: float = option(0.01, "share of the run in which the learning rate rises")
    decay_from: float = option(0.55, "share of the run after which it falls to 0")
    weight_decay: float = option(0.05, "of the matrices")
    average_decay: float = option(0.998, "of the running average of the weights, which is what is written")
    temperature: float = option(0.7, "at which the laws are compared")
    hidden_weight: float = option(0.3, "of the hidden-state loss at the start; it falls to 0 over the run")
    acceptance_from: float = option(0.3, "share of the run after which the acceptance loss takes over from KL")
    acceptance_ramp: float = option(0.3, "share of the run that this takes")
    kind_weights: tuple[float, float, float] = option((0.2, 0.3, 1.0), "of given, question and answer tokens")
    seed: int = option(0, "of the order of the batches")


def start_draft(target: PreTrainedModel, layers: tuple[int, ...], kept_ids: Tensor) -> LlamaForCausalLM:
    """A draft whose layers and final norm are copies of the target's."""
    draft = build_draft(target, len(layers), kept_ids)
    with torch.no_grad():
        for own, index in zip(draft.model.layers, layers, strict=True):
            own.load_state_dict(target.model.layers[index].state_dict())
        draft.model.norm.load_state_dict(target.model.norm.state_dict())
    # The fused kernel is several times slower than plain products at these lengths on a CPU.
    draft.set_attn_implementation("eager")
    for parameter in draft.parameters():
        parameter.requires_grad_(False)
    for parameter in trained_parts(draft).values():
        parameter.requires_grad_(True)
    return draft


def law_gradient(
    hidden: Tensor, target_hidden: Tensor, head: Tensor, weights: Tensor, temperature: float, acceptance_share: float
) -> tuple[Tensor, Tensor]:
    """Gradient of the law losses with respect to the draft's hidden states, by hand: autograd would keep several [N,
    K] tensors.

    Args:
        hidden, target_hidden (`Tensor` [N, H]): draft's and target's final hidden states.
        head (`Tensor` [K, H]): rows of the kept ids.
        weights (`Tensor` [N]): sums to 1.
        temperature (`float`): of both laws.
        acceptance_share (`float`): 0 for KL(target || draft), 1 for 1 - acceptance, between for a mixture.
    Returns:
        gradient [N, H] and acceptance [N], both float32. In bfloat16 the laws are good to 0.4 %, which is below the
        noise of a batch.
    """
    draft_law = F.linear(hidden / temperature, head).softmax(-1)
    target_law = F.linear(target_hidden / temperature, head).softmax(-1)
    kept = draft_law.minimum(target_law).sum(-1, dtype=torch.float32)
    gradient = draft_law - target_law
    if acceptance_share > 0:
        # d acceptance / d logit_x = draft_x (1[draft_x < target_x] - draft mass where draft < target)
        short = draft_law * (gradient < 0)
        short -= draft_law * short.sum(-1, keepdim=True)
        gradient = gradient.mul_(1 - acceptance_share).sub_(short, alpha=acceptance_share)
    return F.linear(gradient, head.t()).float() * (weights / temperature)[:, None], kept


class Stream:
    """Endless batches from the shards of a folder, which may still be growing: least visited shards first."""

    def __init__(self, folder: Path, held_out: set[str], prefix: list[int], pad: int, config: TrainingConfig):
        self.folder, self.held_out, self.prefix, self.pad, self.config = folder, held_out, prefix, pad, config
        self.visits: dict[str, int] = {}
        self.chooser = random.Random(config.seed)
        self.weights = torch.tensor(config.kind_weights)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            for path in self.folder.glob("*.safetensors"):
                if path.name not in self.held_out:
                    self.visits.setdefault(path.name, 0)
            if not self.visits:
                raise ValueError(
                    f"No shards in {self.folder}. Write some with `cactus-hf distill sample --data {self.folder}`."
                )
            names = sorted(self.visits, key=lambda name: (self.visits[name], self.chooser.random()))[:3]
            samples = [sample for name in names for sample in read_shard(self.folder / name) if len(sample.tokens) > 1]
            for name in names:
                self.visits[name] += 1
            yield from self.batches(samples)

    def batches(self, samples: list[Sample]) -> Iterator[Batch]:
        samples.sort(key=lambda sample: len(sample.tokens) + self.chooser.random())
        groups: list[list[Sample]] = [[]]
        for sample in samples:
            if (len(groups[-1]) + 1) * (
                len(self.prefix) + len(sample.tokens)
            ) > self.config.tokens_per_step and groups[-1]:
                groups.append([])
            groups[-1].append(sample)
        self.chooser.shuffle(groups)
        for group in groups:
            yield collate(group, self.prefix, self.weights, self.pad)


def dev_acceptance(
    draft: LlamaForCausalLM, samples: list[Sample], prefix: list[int], pad: int, temperature: float
) -> float:
    """Mean acceptance over held-out answers, both laws over the kept ids only (so slightly too high)."""
    total, count, head = 0.0, 0, draft.lm_head.weight
    with torch.inference_mode():
        for sample in samples:
            batch = collate([sample], prefix, torch.tensor([0.0, 0.0, 1.0]), pad)
            is_counted = batch.weights[0] > 0
            if not is_counted.any():
                continue
            hidden = draft.model(batch.tokens, use_cache=False).last_hidden_state[0][is_counted]
            laws = [
                (F.linear(h.to(head.dtype), head).float() / temperature).softmax(-1)
                for h in (hidden, batch.hidden[0][is_counted])
            ]
            total += float(torch.minimum(*laws).sum())
            count += int(is_counted.sum())
    return total / max(count, 1)


class Trainer:
    """The draft's optimiser, the running average of its weights, and how far the run has come.

    Args:
        draft (`LlamaForCausalLM`): trained in place.
        config (`TrainingConfig`): the options.
    """

    def __init__(self, draft: LlamaForCausalLM, config: TrainingConfig):
        self.draft, self.config = draft, config
        self.parameters = trained_parts(draft)
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        vectors = [p for p in self.parameters.values() if p.dim() <= 1]
        groups: list[dict] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay, fused=True
        )
        head = draft.lm_head.weight.detach()
        self.head = head.bfloat16()
        centred = head - head.mean(0)
        self.gram = (centred.T @ centred) / len(head)  # measures an error of hidden states in logits, up to a shift
        self.step, self.seconds = 0, 0.0

    @property
    def progress(self) -> float:
        if self.config.minutes is None:
            return self.step / self.config.steps
        return self.seconds / (60 * self.config.minutes)

    def update(self, batch: Batch) -> dict[str, float]:
        """One step on `batch`; returns its figures, each a weighted mean over the positions."""
        config, progress = self.config, self.progress
        rate = config.learning_rate * min(1.0, progress / config.warmup + 0.01) * decay(progress, config.decay_from)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        is_learnt = batch.weights > 0
        weights = batch.weights[is_learnt]
        weights = weights / weights.sum()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.draft.model(batch.tokens, use_cache=False).last_hidden_state[is_learnt].float()
        target_hidden = batch.hidden[is_learnt].float()
        share = min(1.0, max(0.0, (progress - config.acceptance_from) / config.acceptance_ramp))
        with torch.no_grad():
            laws = (hidden.bfloat16(), target_hidden.bfloat16(), self.head)
            gradient, kept = law_gradient(*laws, weights, config.temperature, share)
        error = hidden - target_hidden
        distance = ((error @ self.gram) * error).sum(-1).clamp_min(1e-6).sqrt()  # in logits; robust to outliers
        distance = (weights * distance).sum()
        loss = (hidden * gradient).sum() + config.hidden_weight * (1 - progress) * distance
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        keep = min(config.average_decay, self.step / (self.step + 10))
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.parameters.values()], 1 - keep)
        self.step += 1
        figures = {"acceptance": (weights * kept).sum(), "distance": distance.detach(), "gradient_norm": norm}
        return {"step": self.step, "progress": progress, "lr": rate} | {k: float(v) for k, v in figures.items()}

    def run(self, stream: Iterable[Batch], on_step: Callable[[dict[str, float]], None]) -> None:
        """Updates until `progress` is 1 or the stream ends, calling `on_step(figures)` after each update."""
        self.draft.train()
        began = time.monotonic() - self.seconds
        for batch in stream:
            figures = self.update(batch)
            self.seconds = time.monotonic() - began
            on_step(figures | {"tokens": batch.tokens.numel()})
            if self.progress >= 1:
                break
        self.draft.eval()

    def save(self, path: Path) -> None:
        """Writes all that `restore` needs to go on (the order of the batches is not kept)."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "weights": {name: p.detach() for name, p in self.parameters.items()},
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        self.optimiser.load_state_dict(state["optimiser"])
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["weights"][name])
                self.average[name].copy_(state["average"][name])


def decay(progress: float, start: float) -> float:
    """1 until `start`, then a half cosine to 0."""
    return 1.0 if progress < start else 0.5 * (1 + math.cos(math.pi * (progress - start) / (1 - start)))
