"""vLLM's Model Runner V2, the default on GPUs: the rule of each request, and the function that accepts drafts.

`RejectionSampler` makes laws of a step's logits, a row a drafted token and one more a request, and `rejection_sample`
verifies the drafts, losslessly and in Triton. Two things go around them:

* in the sampler's list of logits processors, whose official interface says which request is in which slot of the
  runner's tables, an object that changes no logits and remembers each request's rule;
* a wrapper of `rejection_sample` that raises the drafted logits for the length of the call (`flat_rows.py`). It comes
  behind temperature, top-k, top-p and all else that makes the target's law, so it is exact for all of them; a logits
  processor comes before top-p. Requests under a rule with another test are verified anew, and their tokens written
  over.

Read in vLLM 0.32 and 0.33, where `rejection_sample` takes these arguments alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule
from ..parameters import to_device
from ..randomness import SeededUniforms
from ..verification import num_leading, verify_block
from .flat_rows import cactus_rows, other_rules, raised
from .vllm import Statistics, own_rule


def install(model_runner: Any, rule: AcceptanceRule, statistics: Statistics) -> None:
    """
    Makes a model runner follow `rule` as soon as it has its model; other runners of the process stay as they are.

    Its `load_model` then raises `ValueError` where the runner does not sample by vLLM's lossless verification.
    """
    load = model_runner.load_model

    def load_model(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        if model_runner.is_last_pp_rank:  # the others do not sample
            _attach(model_runner, rule, statistics)

    model_runner.load_model = load_model


def _attach(model_runner: Any, rule: AcceptanceRule, statistics: Statistics) -> None:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

    sampler = model_runner.rejection_sampler
    if type(sampler) is not module.RejectionSampler:
        raise ValueError(
            f"cactus_hf cannot follow {rule!r} with this model: it samples by {type(sampler).__name__}, not by vLLM's "
            "own RejectionSampler. Serve it without a rule."
        )
    if sampler.enable_adaptive_verification:
        raise ValueError(
            f"cactus_hf cannot follow {rule!r} with `enable_adaptive_verification`, which leaves out drafts by what "
            "lossless verification would keep: turn it off."
        )
    sampler.cactus_rules = SlotRules(rule, statistics)
    sampler.sampler.logits_processors.append(sampler.cactus_rules)
    if module.rejection_sample.__module__ != __name__:
        module.RejectionSampler.__call__ = _serving_requests(module.RejectionSampler.__call__)
        module.rejection_sample = _following_rules(module.rejection_sample)


class SlotRules:
    """The rule of the request in each slot that vLLM's own code does not decide: a logits processor of V2's interface.

    A slot keeps its rule until its next request comes.
    """

    def __init__(self, default: AcceptanceRule, statistics: Statistics):
        self.default = default
        self.statistics = statistics
        self.rules: dict[int, AcceptanceRule] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        rule = own_rule(sampling_params, self.default)
        if rule is None:
            self.rules.pop(req_idx, None)
        else:
            self.rules[req_idx] = rule
        return False  # no logits are changed here

    def apply_staged_writes(self) -> None:
        pass

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        return logits


class _Serving:
    """What the host knows of a step. Large steps are verified in chunks: some requests after the others."""

    def __init__(self, rules: SlotRules, slots: list[int], num_drafts: list[int], seeds: Tensor):
        self.rules, self.slots, self.num_drafts, self.seeds = rules, slots, num_drafts, seeds

    def take(self, num_requests: int) -> tuple[list[int], list[int]]:
        """Slots and numbers of drafted tokens of the next requests."""
        taken = self.slots[:num_requests], self.num_drafts[:num_requests]
        self.slots, self.num_drafts = self.slots[num_requests:], self.num_drafts[num_requests:]
        return taken


_serving: ContextVar[_Serving | None] = ContextVar("cactus_serving", default=None)


def _serving_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        rules: SlotRules | None = getattr(self, "cactus_rules", None)
        if rules is None:
            return original(self, logits, input_batch, *args, **kwargs)
        num_rows = input_batch.cu_num_logits_np
        seeds = self.sampler.sampling_states.seeds.gpu
        step = _Serving(rules, input_batch.idx_mapping_np.tolist(), (num_rows[1:] - num_rows[:-1] - 1).tolist(), seeds)
        token = _serving.set(step)
        try:
            return original(self, logits, input_batch, *args, **kwargs)
        finally:
            _serving.reset(token)

    return __call__


class Batch(NamedTuple):
    """What `rejection_sample` takes first: N rows of R requests, which have slots in a table of the runner."""

    target_logits: Tensor  # [N, V], in the model's dtype if no request has them processed, else float32
    draft_logits: Tensor | None  # [slots, m, V or less], before temperature
    draft_sampled: Tensor  # [N], the token before each row; -1 where a draft was taken back
    starts: Tensor  # [R + 1]
    pos: Tensor  # [N], places in the texts
    slots: Tensor  # [R]
    row_slots: Tensor  # [N]
    local_pos: Tensor  # [N], places among the rows of the request
    temperature: Tensor  # [slots]

    @property
    def vocab_size(self) -> int:
        """How much of a row vLLM reads: a target's may be padded beyond the draft's."""
        sizes = [self.target_logits.shape[1]]
        return min(sizes if self.draft_logits is None else [*sizes, self.draft_logits.shape[2]])

    def tokens_at(self, index: Tensor) -> Tensor:
        """The drafts that some rows verify, of the shape of `index`."""
        return self.draft_sampled[index + 1].long()

    def draft_logits_at(self, index: Tensor) -> Tensor | None:
        """Logits of the laws that the drafts of some rows were drawn from, of the shape of `index` and V."""
        if self.draft_logits is None:
            return None
        slot = self.row_slots[index].long()
        place = self.local_pos[index].long().clamp(max=self.draft_logits.shape[1] - 1)
        logits = self.draft_logits[slot, place, : self.vocab_size].float()
        return logits / self.temperature[slot].unsqueeze(-1)


def _following_rules(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rejection_sample(target_logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        serving = _serving.get()
        if serving is None:
            return original(target_logits, *args, **options)
        batch = Batch(target_logits, *args[: len(Batch._fields) - 1])
        device = target_logits.device
        slots, num_drafts = serving.take(len(batch.starts) - 1)
        rules = {at: rule for at, slot in enumerate(slots) if (rule := serving.rules.rules.get(slot)) is not None}
        starts = [0]
        for number in num_drafts:
            starts.append(starts[-1] + number + 1)
        if rules:
            # Of its own where it may be the model's bfloat16, in which a logit cannot be raised by just so much
            batch = batch._replace(target_logits=target_logits.float())
        rows = cactus_rows(rules, starts, num_drafts, device)
        logits = batch.target_logits[:, : batch.vocab_size]
        with raised(logits, rows, batch.tokens_at, batch.draft_logits_at) as ball_kl:
            sampled, num_sampled = original(batch.target_logits, *args, **options)
        for rule, requests in other_rules(rules, num_drafts).items():
            _write_verified(rule, requests, batch, serving.seeds, sampled, num_sampled)
        is_draft = [i for start, number in zip(starts, num_drafts, strict=False) for i in range(start, start + number)]
        serving.rules.statistics.add(
            num_drafts, num_sampled - 1, ball_kl[to_device(torch.tensor(is_draft, dtype=torch.int64), device)]
        )
        return sampled, num_sampled

    return rejection_sample


def _write_verified(
    rule: AcceptanceRule, requests: list[int], batch: Batch, seeds: Tensor, sampled: Tensor, num_sampled: Tensor
) -> None:
    """Writes what `verify_block` makes of some requests into `sampled` [R, m + 1] and `num_sampled` [R]."""
    chosen = to_device(torch.tensor(requests), sampled.device)
    start, end = batch.starts[chosen].long(), batch.starts[chosen + 1].long()
    num_drafts = sampled.shape[1] - 1
    position = torch.arange(num_drafts + 1, device=sampled.device)
    index = torch.minimum(start[:, None] + position, end[:, None] - 1)  # what is beyond a request's rows is not used
    drafted = batch.draft_sampled[index[:, 1:]].long()
    lengths = num_leading((start[:, None] + position[1:] < end[:, None]) & (drafted >= 0))
    uniforms = SeededUniforms(seeds).draws(batch.slots[chosen].long(), batch.pos[start].long(), num_drafts)
    result = verify_block(
        batch.target_logits[index, : batch.vocab_size],
        drafted,
        batch.draft_logits_at(index[:, :-1]),
        rule,
        lengths,
        uniforms[:, num_drafts:],
    )
    kept = torch.nn.functional.pad(drafted, (0, 1))
    sampled[chosen] = torch.where(position == result.num_accepted[:, None], result.next_token[:, None], kept)
    num_sampled[chosen] = (result.num_accepted + 1).to(num_sampled.dtype)
