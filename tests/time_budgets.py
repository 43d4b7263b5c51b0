"""What finding delta costs a drafted position, on drawn rows: `python tests/time_budgets.py [--device cuda]`.

Milliseconds are of the processor (of the clock on a GPU), in the median of the repeats, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from cactus_hf import Cactus
from cactus_hf.kl_budget import find_deltas_of_block


VOCAB, POSITIONS = 152064, 4


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits [1, m, V] of a target and of a draft near it; fifty tokens stand out, as in a model's rows."""
    generator = torch.Generator().manual_seed(seed)
    target, noise = torch.randn(2, 1, POSITIONS, VOCAB, generator=generator) * 3
    likely = torch.randint(0, VOCAB, (1, POSITIONS, 50), generator=generator)
    target.scatter_(2, likely, torch.rand(likely.shape, generator=generator) * 8 + 8)
    return target, 0.9 * target + 0.4 * noise


def top_k(logits: Tensor, k: int) -> Tensor:
    return logits.masked_fill(logits < logits.topk(k, dim=-1).values[..., -1:], -torch.inf)


def milliseconds(target: Tensor, draft: Tensor, budget: float, repeats: int) -> float:
    """A position."""
    clock = time.perf_counter if target.is_cuda else time.process_time
    none = torch.zeros(1, POSITIONS, dtype=torch.float64, device=target.device)
    found = []
    for _ in range(repeats + 1):  # the first warms up
        begin = clock()
        find_deltas_of_block(target, draft, Cactus(kl_budget=budget), none).delta.cpu()
        found.append(1e3 * (clock() - begin) / POSITIONS)
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, draft = (logits.to(args.device) for logits in rows())
    for name, pair in (("all tokens", (target, draft)), ("top-k 20", (top_k(target, 20), top_k(draft, 20)))):
        for budget in (0.001, 0.01, 0.1):
            print(f"{name}, budget {budget}: {milliseconds(*pair, budget, args.repeats):.1f} ms a position")


if __name__ == "__main__":
    main()
