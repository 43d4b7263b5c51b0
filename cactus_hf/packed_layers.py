"""Linear layers whose cost on a CPU hardly grows from one token to ten.

torch hands float32 layers to a general matrix product, which for 2 to 11 rows takes up to three times as long as for
one. oneDNN reads each weight once for all rows, faster still where the weights lie in the order of its kernels. Both
compute in the layer's precision; sums are in another order. FBGEMM reads weights rounded to float16, half the bytes,
and multiplies and adds in float32. docs/cpu.md has figures.

oneDNN's operators are those that torch's own compiler calls where it freezes a model's weights (`torch._inductor`),
here without a compiler and for any number of rows; FBGEMM's are those of torch's dynamic quantisation to float16.
Checked with torch 2.9 and 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


# oneDNN's AVX-512 kernels take longer for 1 or 2 rows of float32 than for 3 to 6; a pad costs some microseconds
FULL_ROWS = 4
PADDED_SIZE = 2**20  # elements of a weight from which on it is worth it


class PackedLinear(nn.Linear):
    """An `nn.Linear` that oneDNN computes.

    `weight` is in oneDNN's own layout, with shape, dtype and values as they were: `weight.to_dense()` gives them back
    bit by bit. A weight that other modules read too is left as it is, and multiplied where it lies.
    """

    precisions: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    extras: tuple[str, ...] = ("least_rows",)  # attributes that an `nn.Linear` does not have
    least_rows: int = 1  # inputs of fewer rows are padded with zeros

    @torch.compiler.disable  # it knows nothing of weights in that layout
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if (
            input.dtype is weight.dtype
            and weight.dtype in self.precisions  # a layer that shares a tied weight may be cast by it
            and input.is_cpu
            and input.shape[-1] == weight.shape[1]
            and not (
                torch.is_grad_enabled()
                and (input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
            )
            and not torch.is_autocast_enabled("cpu")
        ):
            return self.product(input)
        return nn.functional.linear(input, self.values(), bias)

    def product(self, input: Tensor) -> Tensor:
        """The layer's result, without gradients, for an input of its width, precision and device."""
        weight, bias = self.weight, self.bias
        num_rows = input.numel() // weight.shape[1]
        if 0 < num_rows < self.least_rows:
            rows = nn.functional.pad(input.reshape(num_rows, -1), (0, 0, 0, self.least_rows - num_rows))
            return inner_product(rows, weight, bias)[:num_rows].view(*input.shape[:-1], -1)
        return inner_product(input, weight, bias)

    def pack(self, is_shared: bool) -> None:
        """Put the weight in the layout to multiply from, unless it `is_shared` with others."""
        if is_shared:
            return
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        self.weight = nn.Parameter(packed, self.weight.requires_grad)
        is_slow_alone = self.weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512"
        self.least_rows = FULL_ROWS if is_slow_alone and self.weight.numel() >= PADDED_SIZE else 1

    def unpack(self) -> None:
        """Become an `nn.Linear` again."""
        self.weight = self.ordinary_weight()
        for name in self.extras:
            vars(self).pop(name, None)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def is_rearranged(self) -> bool:
        """Whether `weight` itself is not as torch has it."""
        return self.weight.is_mkldnn

    def values(self) -> Tensor:
        """The weight as torch has it."""
        return self.weight.to_dense() if self.is_rearranged() else self.weight

    def ordinary_weight(self) -> Tensor:
        """The parameter of an `nn.Linear` in this layer's place."""
        return nn.Parameter(self.values().detach(), self.weight.requires_grad) if self.is_rearranged() else self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # Packed weights are for this device and precision
        before = torch.empty(0, dtype=self.weight.dtype)
        after = fn(before)
        if before.dtype not in self.precisions or (after.device, after.dtype) != (before.device, before.dtype):
            self.unpack()
            return self._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.values() if keep_vars else self.values().detach()

    def __getstate__(self) -> dict[str, Any]:
        # For `copy.deepcopy` and pickles, as packed weights know of neither
        state = {name: value for name, value in vars(self).items() if name not in self.extras}
        state["_parameters"] = self._parameters | {"weight": self.ordinary_weight()}
        return state | {"is_shared": not self.is_rearranged()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_shared = state.pop("is_shared")
        super().__setstate__(state)
        if self.takes(self.weight):
            self.pack(is_shared)
        else:
            self.__class__ = nn.Linear  # type: ignore[assignment]

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether a weight can be packed here."""
        if not is_ordinary(weight) or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return weight.dtype == torch.float32


class HalfLinear(PackedLinear):
    """A float32 `nn.Linear` that FBGEMM computes from a copy of its weight in float16, and in its own layout.

    `weight` has shape, dtype and device as before, but holds no values: all of it is one NaN, so that nothing else
    computes with it unnoticed. `values()` gives the rounded values. A weight that other modules read too stays as it
    is, beside the copy.
    """

    precisions = (torch.float32,)
    extras = ("packed", "packed_from", "was_trained")
    packed: Any
    packed_from: tuple[Tensor, int]
    was_trained: bool

    def product(self, input: Tensor) -> Tensor:
        weight, num_changes = self.packed_from
        if self.weight is not weight or changes(weight) != num_changes:  # a shared one was trained, or loaded
            return nn.functional.linear(input, self.values(), self.bias)
        output = torch.ops.quantized.linear_dynamic_fp16(input if input.dim() > 1 else input[None], self.packed)
        if self.bias is not None:
            output += self.bias
        return output if input.dim() > 1 else output[0]

    def pack(self, is_shared: bool) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(self.weight.detach(), None)
        self.was_trained = self.weight.requires_grad
        if not is_shared:
            # Without gradients, as torch's fused optimisers write to expanded tensors beyond their memory
            self.weight = nn.Parameter(torch.tensor(math.nan).expand(self.weight.shape), requires_grad=False)
        self.packed_from = self.weight, changes(self.weight)

    def is_rearranged(self) -> bool:
        return self.weight.stride() == (0, 0)

    def values(self) -> Tensor:
        return self.packed.unpack()[0] if self.is_rearranged() else self.weight

    def ordinary_weight(self) -> Tensor:
        return nn.Parameter(self.values(), self.was_trained) if self.is_rearranged() else self.weight

    @staticmethod
    def takes(weight: Tensor) -> bool:
        return is_ordinary(weight) and weight.dtype == torch.float32 and weight.numel() > 0 and not missing_fbgemm()


def inner_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def missing_fbgemm() -> str | None:
    """What keeps FBGEMM from computing here, and what to do, if anything does."""
    quantized = torch.backends.quantized
    if "fbgemm" not in quantized.supported_engines or not hasattr(torch.ops.quantized, "linear_prepack_fp16"):
        return f"torch {torch.__version__} has no FBGEMM here, which is for x86 with AVX2: leave `weight_dtype` out"
    if quantized.engine not in ("x86", "fbgemm"):
        return f"torch.backends.quantized.engine is {quantized.engine!r}: set it to 'fbgemm' before"
    return None


def is_ordinary(weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter) and weight.is_cpu


def changes(weight: Tensor) -> int:
    """How often a weight was written to; those of `torch.inference_mode` do not count it."""
    return 0 if weight.is_inference() else weight._version
