"""Linear layers whose cost on a CPU hardly grows from one token to ten.

torch hands float32 layers to a general matrix product, which for 2 to 11 rows takes up to three times as long as for
one. oneDNN reads each weight once for all rows, faster still where the weights lie in the order of its kernels. Both
compute in the layer's precision; sums are in another order. docs/cpu.md has figures.

The operators are those that torch's own compiler calls where it freezes a model's weights (`torch._inductor`), here
without a compiler and for any number of rows. Checked with torch 2.9 and 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn


Model = TypeVar("Model", bound=nn.Module)

# oneDNN's AVX-512 kernels take longer for 1 or 2 rows of float32 than for 3 to 6; a pad costs some microseconds
FULL_ROWS = 4
PADDED_SIZE = 2**20  # elements of a weight from which on it is worth it


class PackedLinear(nn.Linear):
    """An `nn.Linear` that oneDNN computes.

    `weight` is in oneDNN's own layout, with shape, dtype and values as they were: `weight.to_dense()` gives them back
    bit by bit. A weight that other modules read too is left as it is, and multiplied where it lies.
    """

    least_rows: int = 1  # inputs of fewer rows are padded with zeros

    @torch.compiler.disable  # it knows nothing of tensors in that layout
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if (
            input.dtype is weight.dtype
            and weight.dtype in (torch.float32, torch.bfloat16)  # a layer that shares a tied weight may be cast by it
            and input.is_cpu
            and input.shape[-1] == weight.shape[1]
            and not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
            and not torch.is_autocast_enabled("cpu")
        ):
            num_rows = input.numel() // weight.shape[1]
            if 0 < num_rows < self.least_rows:
                rows = nn.functional.pad(input.reshape(num_rows, -1), (0, 0, 0, self.least_rows - num_rows))
                return inner_product(rows, weight, bias)[:num_rows].view(*input.shape[:-1], -1)
            return inner_product(input, weight, bias)
        return nn.functional.linear(input, dense(weight), bias)

    def pack(self) -> None:
        """Put the weight in oneDNN's layout, if that is not yet so."""
        if not self.weight.is_mkldnn:
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
            self.weight = nn.Parameter(packed, self.weight.requires_grad)
        is_slow_alone = self.weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512"
        self.least_rows = FULL_ROWS if is_slow_alone and self.weight.numel() >= PADDED_SIZE else 1

    def unpack(self) -> None:
        """Become an `nn.Linear` again."""
        self.weight = dense_parameter(self.weight)
        vars(self).pop("least_rows", None)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # oneDNN's layout is for this device and precision
        before = torch.empty(0, dtype=self.weight.dtype)
        after = fn(before)
        if (after.device, after.dtype) != (before.device, before.dtype):
            self.unpack()
            return self._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = dense(destination[prefix + "weight"])

    def __getstate__(self) -> dict[str, Any]:
        # For `copy.deepcopy` and pickles, as tensors in oneDNN's layout know of neither
        parameters = self._parameters | {"weight": dense_parameter(self.weight)}
        return vars(self) | {"_parameters": parameters, "was_packed": self.weight.is_mkldnn}

    def __setstate__(self, state: dict[str, Any]) -> None:
        was_packed = state.pop("was_packed")
        super().__setstate__(state)
        if was_packed and takes(self.weight):
            self.pack()


def pack_linears(model: Model) -> Model:
    """
    Lets oneDNN compute the linear layers of a model on the CPU, at nearly the same cost for 1 and for 10 tokens.

    For plain decoding as for targets and drafts. Results differ from the ordinary layers' by rounding alone. Weights
    are rearranged, not copied; those that a layer shares with others (as a head does with the embedding) stay where
    they are. Gradients and autocast find the ordinary product; `torch.compile` leaves these layers out.
    [`unpack_linears`] undoes it.

    Args:
        model (`torch.nn.Module`):
            Changed in place: its float32 layers of class `nn.Linear`, and its bfloat16 ones where the CPU has
            instructions for them. Other precisions and classes (GPT-2's `Conv1D`, experts kept in one tensor,
            quantised layers) stay as they are. A wrapper may be around it.

    Returns:
        The model given.

    Raises:
        ValueError: if there is no layer that could be packed.
        TypeError: if `model` is no module.
    """
    layers = [each for each in _modules(model, "pack_linears") if type(each) is nn.Linear]
    fitting = [layer for layer in layers if _fits(layer)]
    if not fitting and not any(isinstance(each, PackedLinear) for each in model.modules()):
        raise ValueError(
            f"`pack_linears` found nothing to pack in this {type(model).__name__}: {_reason(layers)}. It is for "
            "float32 layers on the CPU, and bfloat16 ones on a CPU that computes in it."
        )
    num_readers = Counter(id(p) for each in model.modules() for p in each._parameters.values() if p is not None)
    for layer in fitting:
        is_shared = num_readers[id(layer.weight)] > 1
        layer.__class__ = PackedLinear
        if not is_shared:
            cast(PackedLinear, layer).pack()
    return model


def unpack_linears(model: Model) -> Model:
    """Undoes [`pack_linears`]: the layers of the model given, which it returns, are ordinary ones with the weights of
    before, bit by bit.

    Raises:
        TypeError: if `model` is no module.
    """
    for module in _modules(model, "unpack_linears"):
        if isinstance(module, PackedLinear):
            module.unpack()
    return model


def takes(weight: Tensor) -> bool:
    """Whether oneDNN computes with this weight here."""
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def inner_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def dense_parameter(weight: Tensor) -> Tensor:
    return nn.Parameter(weight.detach().to_dense(), weight.requires_grad) if weight.is_mkldnn else weight


def dense(weight: Tensor) -> Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


def _fits(layer: nn.Linear) -> bool:
    weight, bias = layer.weight, layer.bias
    if "forward" in vars(layer):  # offloading by accelerate replaces it, and moves weights around
        return False
    # oneDNN would take a bias for contiguous that is not
    return takes(weight) and (bias is None or (bias.dtype is weight.dtype and bias.is_contiguous()))


def _modules(model: Any, caller: str) -> list[nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`{caller}` needs a model (a `torch.nn.Module`), got {type(model).__name__}.")
    return list(model.modules())


def _reason(layers: list[nn.Linear]) -> str:
    if not torch.backends.mkldnn.is_available():
        return f"torch {torch.__version__} was built without oneDNN"
    if any("forward" in vars(layer) for layer in layers):
        return "the `forward` of its linear layers was replaced, as accelerate does to offload weights"
    kinds = Counter(f"{layer.weight.dtype} on {layer.weight.device}" for layer in layers)
    counts = ", ".join(f"{count} with {kind}" for kind, count in kinds.items())
    return f"of its layers of class nn.Linear there are {counts or 'none'}"
