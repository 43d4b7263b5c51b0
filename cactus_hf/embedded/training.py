"""Training of the draft on the target's own conversations.

The loss has three parts. Matching the target's final hidden state learns most from little data: 576 numbers a position instead of one law.
Kullback-Leibler divergence of the draft's law from the target's at the temperature of use keeps mass wherever the target has it. At the end the
acceptance itself, sum_x min(target_x, draft_x), is what speculative decoding gains from (Zhou et al., "DistillSpec", arXiv 2310.08461, train on
total variation for that reason); its gradient vanishes where the laws are disjoint, so it comes last.

Letters: N positions, H hidden size, K kept ids.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from .draft import build_draft, trained_parts
from .self_prompting import ANSWER
from .shards import Batch, Sample, collate, read_shard


@dataclass(frozen=True)
class TrainingConfig:
    """Options of a training run; the defaults made the shipped draft.

    Args:
        layers (`tuple[int, ...]`): layers of the target that the draft starts from, in order.
        steps (`int`): updates; learning rate and losses follow steps / `steps`.
        minutes (`float`, *optional*): wall time that ends the run instead of `steps`.
        tokens_per_step (`int`): padded tokens in a batch.
        temperature (`float`): at which the laws are compared.
        hidden_weight (`float`): of the hidden-state loss at the start; it falls to 0 over the run.
        acceptance_from (`float`): share of the run after which the acceptance loss takes over from KL.
        kind_weights: of given, question and answer tokens.
    """

    layers: tuple[int, ...] = (0, 1, 2, 28, 29)
    steps: int = 3000
    minutes: float | None = None
    tokens_per_step: int = 768
    learning_rate: float = 1e-3
    warmup: float = 0.01
    decay_from: float = 0.55
    weight_decay: float = 0.05
    average_decay: float = 0.998
    temperature: float = 0.7
    hidden_weight: float = 0.3
    acceptance_from: float = 0.3
    kind_weights: tuple[float, float, float] = (0.2, 0.3, 1.0)
    seed: int = 0


def start_draft(target: PreTrainedModel, layers: tuple[int, ...], kept_ids: Tensor) -> LlamaForCausalLM:
    """A draft whose layers and final norm are copies of the target's."""
    draft = build_draft(target, len(layers), kept_ids)
    with torch.no_grad():
        for own, index in zip(draft.model.layers, layers):
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
    """Gradient of the law losses with respect to the draft's hidden states, by hand: autograd would keep several [N, K] tensors.

    Args:
        hidden, target_hidden (`Tensor` [N, H]): draft's and target's final hidden states.
        head (`Tensor` [K, H]): rows of the kept ids.
        weights (`Tensor` [N]): sums to 1.
        temperature (`float`): of both laws.
        acceptance_share (`float`): 0 for KL(target || draft), 1 for 1 - acceptance, between for a mixture.
    Returns:
        gradient [N, H] and acceptance [N], both float32. In bfloat16 the laws are good to 0.4 %, which is below the noise of a batch.
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
                raise ValueError(f"No shards in {self.folder}. Write some with `cactus-hf distill sample --data {self.folder}`.")
            names = sorted(self.visits, key=lambda name: (self.visits[name], self.chooser.random()))[:3]
            samples = [sample for name in names for sample in read_shard(self.folder / name) if len(sample.tokens) > 1]
            for name in names:
                self.visits[name] += 1
            yield from self.batches(samples)

    def batches(self, samples: list[Sample]) -> list[Batch]:
        samples.sort(key=lambda sample: len(sample.tokens) + self.chooser.random())
        groups: list[list[Sample]] = [[]]
        for sample in samples:
            if (len(groups[-1]) + 1) * (len(self.prefix) + len(sample.tokens)) > self.config.tokens_per_step and groups[-1]:
                groups.append([])
            groups[-1].append(sample)
        self.chooser.shuffle(groups)
        return [collate(group, self.prefix, self.weights, self.pad) for group in groups]


def dev_acceptance(
    draft: LlamaForCausalLM, samples: list[Sample], prefix: list[int], pad: int, temperature: float
) -> float:
    """Mean acceptance over the answers of held-out conversations, both laws over the kept ids only (so slightly too high)."""
    total, count, head = 0.0, 0, draft.lm_head.weight
    with torch.inference_mode():
        for sample in samples:
            batch = collate([sample], prefix, torch.tensor([0.0, 0.0, 1.0]), pad)
            is_counted = batch.weights[0] > 0
            if not is_counted.any():
                continue
            hidden = draft.model(batch.tokens, use_cache=False).last_hidden_state[0][is_counted]
            laws = [(F.linear(h.to(head.dtype), head).float() / temperature).softmax(-1) for h in (hidden, batch.hidden[0][is_counted])]
            total += float(torch.minimum(*laws).sum())
            count += int(is_counted.sum())
    return total / max(count, 1)


def train(
    target: PreTrainedModel,
    draft: LlamaForCausalLM,
    stream: Iterator[Batch],
    config: TrainingConfig,
    on_step: Callable[[dict, dict[str, Tensor]], None],
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 240.0,
) -> tuple[dict, dict[str, Tensor]]:
    """Trains `draft` in place and returns the last figures and the running average of its weights.

    `on_step(figures, average)` is called after each update with the loss figures and the averaged weights. A run that was stopped goes on from
    `checkpoint` (the order of its batches does not).
    """
    parameters = trained_parts(draft)
    decayed = [p for p in parameters.values() if p.dim() > 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed}, {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=config.weight_decay,
        fused=True,
    )
    average = {name: p.detach().clone() for name, p in parameters.items()}
    head = draft.lm_head.weight.detach()
    fast_head = head.bfloat16()
    centred = head - head.mean(0)
    gram = (centred.T @ centred) / len(head)  # squared error of hidden states, measured in logits up to a common shift
    first_step, began = 0, time.monotonic()
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        first_step, began = state["step"], began - state["seconds"]
        optimiser.load_state_dict(state["optimiser"])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["weights"][name])
                average[name].copy_(state["average"][name])
    figures: dict = {"step": first_step}
    saved = time.monotonic()
    draft.train()
    for step, batch in enumerate(stream, first_step):
        progress = step / config.steps if config.minutes is None else (time.monotonic() - began) / (60 * config.minutes)
        if progress >= 1:
            break
        rate = config.learning_rate * min(1.0, progress / config.warmup + 0.01) * decay(progress, config.decay_from)
        for group in optimiser.param_groups:
            group["lr"] = rate
        is_learnt = batch.weights > 0
        weights = batch.weights[is_learnt]
        weights = weights / weights.sum()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = draft.model(batch.tokens, use_cache=False).last_hidden_state[is_learnt].float()
        target_hidden = batch.hidden[is_learnt].float()
        share = min(1.0, max(0.0, (progress - config.acceptance_from) / 0.3))
        with torch.no_grad():
            gradient, kept = law_gradient(
                hidden.bfloat16(), target_hidden.bfloat16(), fast_head, weights, config.temperature, share
            )
        error = hidden - target_hidden
        error = ((error @ gram) * error).sum(-1)
        hidden_scale = config.hidden_weight * (1 - progress)
        loss = (hidden * gradient).sum() + hidden_scale * (weights * error.clamp_min(1e-6).sqrt()).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        keep = min(config.average_decay, step / (step + 10))
        torch._foreach_lerp_(list(average.values()), [p.detach() for p in parameters.values()], 1 - keep)
        figures = {
            "step": step, "progress": progress, "lr": rate, "acceptance": float((weights * kept).sum()),
            "hidden": float((weights * error.detach().clamp_min(0).sqrt()).sum()), "norm": float(norm),
            "tokens": batch.tokens.numel(),
        }  # fmt: skip
        on_step(figures, average)
        if checkpoint is not None and time.monotonic() - saved > checkpoint_seconds:
            saved = time.monotonic()
            weights = {name: p.detach() for name, p in parameters.items()}
            state = {"step": step + 1, "seconds": saved - began, "weights": weights, "average": average, "optimiser": optimiser.state_dict()}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    draft.eval()
    return figures, average


def decay(progress: float, start: float) -> float:
    """1 until `start`, then a half cosine to 0."""
    return 1.0 if progress < start else 0.5 * (1 + math.cos(math.pi * (progress - start) / (1 - start)))
