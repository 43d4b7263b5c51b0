"""`cactus-hf bench --verify`: the check of a drafted block alone, its time and the memory it moves.

Three ways: ours ([`verify_block`], what the loop calls), transformers' (single rows only), and a naive one that turns
every row of logits into probabilities. All get the same logits, drafts and work: how many drafts are kept, and which
token follows them.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from .. import host, kernels, measuring, pairs
from ..acceptance import Cactus
from ..probabilities import Normaliser, normalise
from ..report import aligned, versions
from ..verification import Verification, verify_block
from .provenance import git_revision
from .writing import WIDTH, write_json_lines


VOCAB_SIZES = (32000, 151936)
RULE = Cactus(0.0)
OURS = ("cactus_hf", "cactus_hf*")  # with the draft's own sums the second
TURN_SECONDS = 0.1  # least time of a way's part of a turn
GATHERS = ("gather", "index", "index_select", "searchsorted")  # read what they return, not all they are given
LEGEND = (
    "ms: median of the calls. bytes: read and written by the operations of a call, or by our kernels, in units of V a "
    "request. Ours also returns the KL spent. *: as in the loop, where the draft has kept the sums by which it drew."
)


class Block(NamedTuple):
    """Drafted tokens and the logits to check them by."""

    target_logits: Tensor  # [B, m + 1, V]
    draft_tokens: Tensor  # [B, m] int64
    draft_logits: Tensor  # [B, m, V]


class Measured(NamedTuple):
    """A way to verify blocks of one shape."""

    way: str
    milliseconds: list[float]
    bytes_per_request: float  # in units of V


def run_verify(args: argparse.Namespace) -> int:
    """Measures, prints, and writes JSON; returns the exit status."""
    device = pairs.find_device(args.device)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    shapes = [
        (batch_size, num_drafts, vocab_size)
        for vocab_size in args.vocab_sizes or VOCAB_SIZES
        for num_drafts in args.num_assistant_tokens
        for batch_size in args.batch_sizes
    ]
    found = {}
    with tqdm(shapes, desc="Measuring", unit="shape", leave=False, disable=None) as bar:
        for shape in bar:
            block = drawn_block(*shape, dtype=dtype, device=device, seed=args.seed)
            found[shape] = measure(block, args.repeats)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}"
    kind = str(dtype).removeprefix("torch.")
    print(f"verification of drawn logits, {kind} on {where}\n\n{table(found)}\n\n{textwrap.fill(LEGEND, WIDTH)}")
    if args.json:
        facts: dict[str, Any] = {"device": where, "dtype": kind, "threads": torch.get_num_threads()}
        facts |= {"versions": versions(), "git_revision": git_revision(), "seed": args.seed}
        write_json_lines(args.json, (record | facts for record in records(found)))
    return 0


def drawn_block(
    batch_size: int, num_drafts: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Block:
    """A block whose draft is near enough to the target that some drafts are kept and some are not."""
    generator = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(batch_size, num_drafts + 1, vocab_size, generator=generator)
    draft = target[:, :-1] + torch.randn(batch_size, num_drafts, vocab_size, generator=generator)
    tokens = torch.multinomial(draft.softmax(-1).flatten(0, 1), 1, generator=generator).view(batch_size, num_drafts)
    return Block(target.to(device, dtype), tokens.to(device), draft.to(device, dtype))


def ways(block: Block) -> dict[str, Callable[[], object]]:
    """What is compared, each as a call."""
    batch_size, num_drafts = block.draft_tokens.shape
    device = block.draft_tokens.device
    lengths = torch.full((batch_size,), num_drafts, device=device)

    def ours(normaliser: Normaliser | None = None) -> object:
        uniforms = torch.rand(batch_size, num_drafts + 1, dtype=torch.float64, device=device)
        drafted = block.draft_tokens, block.draft_logits
        return verify_block(block.target_logits, *drafted, RULE, lengths, uniforms, normaliser)

    def stock() -> object:
        # Its loop widens logits first
        return host.stock_verification(block.draft_tokens, block.draft_logits.float(), block.target_logits.float())

    kept = normalise(block.draft_logits)
    both = dict(zip(OURS, (ours, lambda: ours(kept)), strict=True))
    found: dict[str, Callable[[], object]] = {**both, "stock": stock, "naive": lambda: naive(block)}
    return found if batch_size == 1 else {name: way for name, way in found.items() if name != "stock"}


def naive(block: Block) -> tuple[Tensor, Tensor]:
    """Lossless speculative sampling as one would first write it: numbers kept [B] and next tokens [B]."""
    target, draft = block.target_logits.float().softmax(-1), block.draft_logits.float().softmax(-1)
    num_drafts = block.draft_tokens.shape[1]
    ratio = (target[:, :-1] / draft).gather(-1, block.draft_tokens[..., None])[..., 0]
    num_kept = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    residual = torch.cat([(target[:, :-1] - draft).clamp(min=0), target[:, -1:]], dim=1)
    row = residual[torch.arange(len(num_kept), device=num_kept.device), num_kept.clamp(max=num_drafts)]
    return num_kept, torch.multinomial(row, 1)[:, 0]


def measure(block: Block, repeats: int) -> list[Measured]:
    """Times each way, in turns after a warm-up, and counts its bytes."""
    device, batch_size, vocab_size = block.target_logits.device, len(block.draft_tokens), block.target_logits.shape[-1]
    calls = ways(block)
    moved = {}
    for name, call in calls.items():
        call()
        is_fused = name in OURS and kernels.serves(block.target_logits, block.draft_logits, RULE)
        moved[name] = _moved_by_kernels(call, block, name) if is_fused else bytes_moved(call)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in measuring.turns(repeats):
        for name, call in calls.items():
            end = time.perf_counter() + TURN_SECONDS
            while True:
                seconds[name].append(measuring.timed(call, device)[1])
                if time.perf_counter() > end:
                    break
    requests = batch_size * vocab_size
    return [Measured(name, [1e3 * each for each in seconds[name]], moved[name] / requests) for name in calls]


def _moved_by_kernels(call: Callable[[], object], block: Block, name: str) -> int:
    """By the kernels' own accounting, as torch does not see what they read; it depends on how many drafts are kept."""
    from ..kernels import accounting  # imports Triton

    batch_size, num_drafts = block.draft_tokens.shape
    verdict = cast(Verification, call())
    return accounting.bytes_moved(
        batch_size,
        num_drafts,
        block.target_logits.shape[2],
        block.target_logits.itemsize,
        num_rejected=int((verdict.num_accepted < num_drafts).sum()),
        has_normaliser=name == OURS[1],
    )


def bytes_moved(call: Callable[[], object]) -> int:
    """
    Bytes that the operations of torch inside `call` read and write.

    Counted by what each operation is given and returns: every tensor among its arguments is read once, whole, and
    every tensor it returns is written once. Views cost nothing. Operations that pick entries (`GATHERS`) read as much
    as they return. So it is the traffic of operations run one after another without a cache between them: what a cache
    saves is left out, and so is what an operation does inside, as softmax, which reads its rows more than once.
    """
    counter = _ByteCounter()
    with counter:
        call()
    return counter.num_bytes


class _ByteCounter(TorchDispatchMode):
    """Adds up the traffic of the operations that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        results = _tensors(output)
        given = _tensors((args, kwargs or {}))
        # A view returns its argument's storage and is not the same tensor, as in-place operations are
        storages = {each.untyped_storage().data_ptr() for each in given}
        is_view = bool(results) and all(
            each.untyped_storage().data_ptr() in storages and not any(each is other for other in given)
            for each in results
        )
        written = sum(each.nbytes for each in results)
        read = sum(each.nbytes for each in given)
        is_gather = function.overloadpacket.__name__.rstrip("_") in GATHERS
        if not is_view:
            self.num_bytes += written + (written if is_gather else read)
        return output


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


Found = dict[tuple[int, int, int], list[Measured]]


def table(found: Found) -> str:
    """A line for each shape and way."""
    lines: list[Sequence[str]] = [("", "B", "m", "V", "ms", "+-", "x stock", "x naive", "bytes / V")]
    for shape, ways in found.items():
        median = {way.way: statistics.median(way.milliseconds) for way in ways}
        for way, milliseconds, moved in ways:
            ratios = (f"{median[other] / median[way]:.2f}" if other in median else "-" for other in ("stock", "naive"))
            low, *_, high = statistics.quantiles(milliseconds, n=4) if len(milliseconds) > 1 else (*milliseconds,) * 2
            spread = f"{(high - low) / median[way]:.0%}"
            lines.append((way, *map(str, shape), f"{median[way]:.3f}", spread, *ratios, f"{moved:.1f}"))
    return aligned(lines)


def records(found: Found) -> list[dict[str, Any]]:
    """One a shape and way."""
    return [
        {
            "way": way,
            "batch_size": batch_size,
            "num_assistant_tokens": num_drafts,
            "vocab_size": vocab_size,
            "median_ms": statistics.median(milliseconds),
            "ms": milliseconds,
            "bytes_per_request_in_V": moved,
        }
        for (batch_size, num_drafts, vocab_size), ways in found.items()
        for way, milliseconds, moved in ways
    ]
