"""Attentions and hidden states of a finished text, in the form in which plain decoding returns them.

The loop sees positions in blocks, drafts that were rejected among them. So the states are taken from one more forward
pass over the text, which only calls that ask for them pay for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


if TYPE_CHECKING:
    from .host import Host

States = tuple[tuple[Tensor, ...], ...]  # one entry a generated token, holding one tensor a layer


def collect(host: Host, text: Tensor, prompt_length: int, config: Any, inputs: dict[str, Any]) -> dict[str, States]:
    """What `output_attentions` and `output_hidden_states` ask for, by the name of the output's field.

    Args:
        text (`torch.Tensor` of shape [R, columns]): prompts and what was generated.
        inputs (`dict`): what else the model took with the prompts.
    """
    wanted = {name: bool(getattr(config, name)) for name in ("output_attentions", "output_hidden_states")}
    if not any(wanted.values()):
        return {}
    with torch.no_grad():
        outputs = host.replay(text[:, :-1], inputs | wanted)  # what the last token leads to was never asked
    cuts = [(0, prompt_length), *((end - 1, end) for end in range(prompt_length + 1, text.shape[1]))]
    windows = [getattr(layer, "sliding_window", None) for layer in host.own_cache().layers]
    prefix = "decoder_" if host.is_encoder_decoder else ""
    encoder = inputs.get("encoder_outputs") if host.is_encoder_decoder else None
    states: dict[str, Any] = {}
    if wanted["output_hidden_states"]:
        layers = outputs[f"{prefix}hidden_states"]
        states[f"{prefix}hidden_states"] = tuple(tuple(x[:, begin:end] for x in layers) for begin, end in cuts)
        states["encoder_hidden_states"] = encoder and encoder.get("hidden_states")
    if wanted["output_attentions"]:
        layers = list(zip(outputs[f"{prefix}attentions"], windows, strict=True))
        states[f"{prefix}attentions"] = tuple(
            tuple(x[:, :, begin:end, _first(begin, end, window) : end] for x, window in layers) for begin, end in cuts
        )
        if encoder is not None:
            crossed = outputs["cross_attentions"]
            states["cross_attentions"] = tuple(tuple(x[:, :, begin:end] for x in crossed) for begin, end in cuts)
            states["encoder_attentions"] = encoder.get("attentions")
    return {name: value for name, value in states.items() if value is not None}


def _first(begin: int, end: int, window: int | None) -> int:
    """The first column of plain decoding's attention: behind the prompt a sliding layer holds its window only."""
    return 0 if begin == 0 or window is None else max(0, end - window)
