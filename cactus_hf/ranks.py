"""Several processes at one `generate()` call: which of them decides, and how many forward passes all must make.

Tensor and pipeline parallelism: each process computes a part of every pass, so all have to decode the same tokens.
Their random numbers may differ, and their logits by rounding; so whatever comes out of either is taken from the first
process. What follows from that is integer arithmetic, the same everywhere.

`synced_gpus` (FSDP, DeepSpeed ZeRO-3): the processes decode prompts of their own, but every pass of one gathers
weights from all. So all make as many passes as the one that needs most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


if TYPE_CHECKING:
    from .host import Host


@dataclass(frozen=True)
class Ranks:
    """The processes of a call; alone by default.

    Args:
        groups (tuple of `ProcessGroup`): in each, all processes decode the same rows, and the first decides. A process
            has one group a dimension of the grid that the model is spread over.
        is_synced (`bool`): whether all processes of the default group make the same passes.
        has_stages (`bool`): whether a process holds some of the target's layers only.
        device (`torch.device`, *optional*): where the groups communicate; needed unless alone.
    """

    groups: tuple[Any, ...] = ()
    is_synced: bool = False
    has_stages: bool = False
    device: torch.device | None = None

    def same(self, tensor: Tensor) -> Tensor:
        """`tensor` as the first process has it; all know its shape. May overwrite what it is given."""
        if not self.groups:
            return tensor
        shared = tensor.to(self.device).contiguous()
        for group in self.groups:
            torch.distributed.broadcast(shared, group=group, group_src=0)
        return shared.to(tensor.device)

    def most(self, number: int) -> int:
        """The largest `number` among processes that must make the same passes."""
        if not self.is_synced:
            return number
        largest = torch.tensor(int(number), device=self.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return int(largest)

    def some(self, flag: bool) -> bool:
        """Whether `flag` is set in any of the processes that must agree on it."""
        return bool(self.most(bool(self.same(torch.tensor(flag)))))

    def check_alike(self, input_ids: Tensor, padding: Tensor, options: Sequence[int]) -> None:
        """Raises `ValueError` on all processes that decode the same rows if they were given different ones.

        Args:
            input_ids (`torch.Tensor` of shape [R, P]): the prompts.
            padding (`torch.Tensor` of shape [R]): padded columns of each row.
            options (list of `int`): what else decides how often the processes communicate, and how much.
        """
        if not self.groups:
            return
        texts = (x.flatten() for x in (input_ids, padding))
        sums = [int((x * torch.arange(1, len(x) + 1, device=x.device)).sum()) for x in texts]
        own = torch.tensor([*input_ids.shape, *sums, *options], device=self.device)
        largest = torch.cat([own, -own])
        for group in self.groups:
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        if largest.view(2, -1).sum(0).any():  # the largest less the smallest
            raise ValueError(
                "The processes of a tensor- or pipeline-parallel model were given different prompts or options: give "
                "all of them the same prompts, length limits, draft options and stopping criteria, and the same "
                "`do_sample` and `speculation_kl`. (For prompts of their own, processes need models of their own.)"
            )


ALONE = Ranks()


def make_ranks(target: Host, draft: Host | None, synced_gpus: bool, device: torch.device) -> Ranks:
    """The processes that a call with these models has to agree with."""
    spread = [target.process_groups, {} if draft is None else draft.process_groups]
    found = [groups[name] for groups in spread for name in ("tp", "pp") if name in groups]
    by_members = {tuple(torch.distributed.get_process_group_ranks(group)): group for group in found}
    is_synced = synced_gpus and torch.distributed.is_available() and torch.distributed.is_initialized()
    return Ranks(tuple(by_members.values()), is_synced, "pp" in spread[0], device)
