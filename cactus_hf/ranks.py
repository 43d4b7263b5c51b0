"""Several processes at one `generate()` call: which of them decides, and how many forward passes all must make.

Tensor and pipeline parallelism: each process computes a part of every pass, so all have to decode the same tokens.
Their random numbers may differ, and their logits by rounding; so whatever comes out of either is taken from the first
process. What follows from that is integer arithmetic, the same everywhere.

`synced_gpus` (FSDP, DeepSpeed ZeRO-3): the processes decode prompts of their own, but every pass of one gathers
weights from all. So all make as many passes as the one that needs most.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        device (`torch.device`, *optional*): where the groups communicate; needed unless alone.
    """

    groups: tuple[Any, ...] = ()
    is_synced: bool = False
    device: torch.device | None = None

    def same(self, tensor: Tensor) -> Tensor:
        """`tensor` as the first process has it, whose shape all know."""
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

    def check_alike(self, input_ids: Tensor, padding: Tensor, *limits: int) -> None:
        """Raises `ValueError` on all processes that decode the same rows if they were given different ones.

        Args:
            input_ids (`torch.Tensor` of shape [R, P]): the prompts.
            padding (`torch.Tensor` of shape [R]): padded columns of each row.
            limits (`int`): what else the number and the shapes of the passes depend on.
        """
        if not self.groups:
            return
        sums = [
            int((x.flatten() * torch.arange(1, x.numel() + 1, device=x.device)).sum()) for x in (input_ids, padding)
        ]
        own = torch.tensor([*input_ids.shape, *sums, *limits], device=self.device)
        largest = torch.cat([own, -own])
        for group in self.groups:
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        if largest.view(2, -1).sum(0).any():  # the largest less the smallest
            raise ValueError(
                "The processes of one tensor- or pipeline-parallel model were given different prompts, length limits, "
                "draft lengths or `do_sample`: give all of them the same. (For prompts of their own, every process "
                "needs a whole model.)"
            )


ALONE = Ranks()


def make_ranks(hosts: Iterable[Host], synced_gpus: bool, device: torch.device) -> Ranks:
    """The processes that a call with these models has to agree with."""
    groups = {}
    for mesh in (host.device_mesh for host in hosts):
        # transformers 5.17 gives no names where there is tensor parallelism only
        for i, name in enumerate(mesh.mesh_dim_names or ("tp",) if mesh else ()):
            if name in ("tp", "pp") and mesh.size(i) > 1:
                group = mesh.get_group(i)
                groups[tuple(torch.distributed.get_process_group_ranks(group))] = group
    is_synced = synced_gpus and torch.distributed.is_available() and torch.distributed.is_initialized()
    return Ranks(tuple(groups.values()), is_synced, device)
