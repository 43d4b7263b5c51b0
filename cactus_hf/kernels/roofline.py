"""How long the verification takes on a GPU, against the time that its bytes take to be copied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..acceptance import AcceptanceRule, Cactus
from ..host import stock_verification
from ..probabilities import normalise
from ..verification import verify_block as reference
from .accounting import bytes_moved
from .verify import verify_block as fused


FLUSH_BYTES = 2**28  # more than the level 2 cache of any GPU so far


class Measurement(NamedTuple):
    """One method at one batch size."""

    method: str
    batch_size: int
    milliseconds: float  # median, by events on the device; the launches included
    low: float  # the fastest repeat
    high: float  # the slowest
    graph_milliseconds: float | None  # median of a replayed CUDA graph: without the launches
    bytes_moved: int | None  # `None` where they were not counted
    copy_bandwidth: float  # bytes a second

    @property
    def of_copy(self) -> float | None:
        """Share of the bandwidth of a copy that the method reaches; by its CUDA graph, if there is one."""
        if self.bytes_moved is None:
            return None
        return self.bytes_moved / self.copy_bandwidth / ((self.graph_milliseconds or self.milliseconds) / 1e3)


class Inputs(NamedTuple):
    """A block as a model and its draft might give it."""

    target: Tensor
    tokens: Tensor
    draft: Tensor | None
    lengths: Tensor
    uniforms: Tensor

    def arguments(self, rule: AcceptanceRule) -> tuple[Tensor, Tensor, Tensor | None, AcceptanceRule, Tensor, Tensor]:
        """Of `verify_block`."""
        return self.target, self.tokens, self.draft, rule, self.lengths, self.uniforms


def make_inputs(
    batch_size: int, num_drafted: int, vocab_size: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Inputs:
    """Laws that fall off like Zipf's, drafts drawn from the draft's."""
    generator = torch.Generator(device).manual_seed(seed)
    rank = torch.randperm(vocab_size, generator=generator, device=device)
    target = torch.randn(batch_size, num_drafted + 1, vocab_size, generator=generator, device=device)
    target -= 1.5 * (rank + 1).log()
    noise = torch.randn(batch_size, num_drafted, vocab_size, generator=generator, device=device)
    draft = (target[:, :num_drafted] + noise).to(dtype)
    laws = draft.float().softmax(-1).flatten(0, 1)
    return Inputs(
        target.to(dtype),
        torch.multinomial(laws, 1, generator=generator).view(batch_size, num_drafted),
        draft,
        torch.full((batch_size,), num_drafted, device=device),
        torch.rand(batch_size, num_drafted + 1, generator=generator, dtype=torch.float64, device=device),
    )


def measure(
    batch_sizes: Sequence[int], num_drafted: int, vocab_size: int, dtype: torch.dtype, repeats: int, tile: int
) -> list[Measurement]:
    """The fused verification without and with the draft's normaliser, the reference, and transformers' own code."""
    bandwidth = copy_bandwidth(repeats)
    found = []
    for batch_size in batch_sizes:
        inputs = make_inputs(batch_size, num_drafted, vocab_size, dtype, torch.device("cuda"))
        for method, (run, moved) in methods(inputs, tile).items():
            low, median, high = time_of(run, repeats)
            graph = None if moved is None else time_of(capture(run), repeats)[1]
            found.append(Measurement(method, batch_size, median, low, high, graph, moved, bandwidth))
    return found


def methods(inputs: Inputs, tile: int) -> dict[str, tuple[Callable[[], Any], int | None]]:
    """What is measured, and the bytes it moves, if they are counted."""
    rule, tokens, target, draft = Cactus(0.1), inputs.tokens, inputs.target, cast(Tensor, inputs.draft)
    batch_size, num_drafted = tokens.shape
    normaliser = normalise(draft)

    def stock() -> None:
        # It takes one sequence, and assisted decoding hands it float32 copies
        for b in range(batch_size):
            at = slice(b, b + 1)
            stock_verification(tokens[at], draft[at].float(), target[at].float())

    num_rejected = int((reference(*inputs.arguments(rule)).num_accepted < num_drafted).sum())
    count = functools.partial(
        bytes_moved, batch_size, num_drafted, target.shape[2], target.itemsize, num_rejected=num_rejected, tile=tile
    )
    return {
        "fused": (lambda: fused(*inputs.arguments(rule), tile=tile), count()),
        "fused, draft's normaliser given": (
            lambda: fused(*inputs.arguments(rule), normaliser, tile=tile),
            count(has_normaliser=True),
        ),
        "reference": (lambda: reference(*inputs.arguments(_Unserved(0.1))), None),
        "transformers, row by row": (stock, None),
    }


class _Unserved(Cactus):
    """Cactus for the reference, on a device on which the kernels would be picked."""

    needs = frozenset({"the reference"})


def time_of(run: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Fastest, median and slowest time in milliseconds, each with cold caches; three runs go before."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for repeat in range(repeats + 3):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end))
    times.sort()
    return times[0], times[len(times) // 2], times[-1]


def capture(run: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of it, which also shows that it never waits for the device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bandwidth(repeats: int) -> float:
    """Bytes a second, read and written, of the best copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    return 2 * len(source) / (time_of(lambda: destination.copy_(source), repeats)[0] / 1e3)


def table(measurements: Sequence[Measurement], vocab_size: int) -> str:
    """One line a measurement; bytes in units of V a sequence."""
    lines = [
        f"{'B':>4}  {'method':<32}{'ms':>9}{'(range)':>18}{'graph ms':>10}{'V bytes':>9}{'of copy':>9}",
    ]
    for one in measurements:
        graph = "-" if one.graph_milliseconds is None else f"{one.graph_milliseconds:.3f}"
        moved = "-" if one.bytes_moved is None else f"{one.bytes_moved / one.batch_size / vocab_size:.1f}"
        share = "-" if one.of_copy is None else f"{one.of_copy:.0%}"
        spread = f"({one.low:.3f}-{one.high:.3f})"
        lines.append(
            f"{one.batch_size:>4}  {one.method:<32}{one.milliseconds:>9.3f}{spread:>18}{graph:>10}{moved:>9}{share:>9}"
        )
    return "\n".join(lines)
