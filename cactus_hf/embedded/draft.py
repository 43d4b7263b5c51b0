"""The draft that ships with the package: a few decoder layers that borrow the target's embedding.

Only what was trained is stored: the layers and the final norm, the matrices in int8 with one scale for each output
channel. Embedding and head rows are the target's own, taken at load time. The head is cut to the token ids that carry
nearly all of the target's mass, which is most of a small draft's cost; every other id has probability 0 under the
draft, which speculative sampling allows.

Letters: K kept ids, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from ..trimming import cut_head


SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
)
SHIPPED_DRAFT = Path(__file__).with_name("draft.safetensors")


def build_draft(target: PreTrainedModel, num_layers: int, kept_ids: Tensor) -> LlamaForCausalLM:
    """A draft of `num_layers` uninitialised layers of the target's shape, with its embedding and a cut head."""
    config = LlamaConfig.from_dict(target.config.to_dict())
    config.num_hidden_layers = num_layers
    config.tie_word_embeddings = False
    config.architectures = ["LlamaForCausalLM"]
    embedding = target.get_input_embeddings().weight
    with torch.device("meta"):
        draft = LlamaForCausalLM(config)
    draft.model.embed_tokens = target.get_input_embeddings()
    cut_head(draft, target.get_output_embeddings().weight, None, kept_ids)
    draft.model.layers.to_empty(device=embedding.device)
    draft.model.norm.to_empty(device=embedding.device)
    # Not a parameter and so not restored by to_empty: rotary frequencies are computed at construction.
    draft.model.rotary_emb = type(draft.model.rotary_emb)(config).to(embedding.device)
    draft.model.layers.to(embedding.dtype)
    draft.model.norm.to(embedding.dtype)
    draft.generation_config = type(target.generation_config).from_dict(target.generation_config.to_dict())
    return draft.eval()


def trained_parts(draft: LlamaForCausalLM) -> dict[str, nn.Parameter]:
    """The parameters that are the draft's own, by name."""
    return {name: p for name, p in draft.model.named_parameters() if not name.startswith("embed_tokens")}


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and one float32 scale for each output channel; the error is at most half a scale."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def save_draft(draft: LlamaForCausalLM, path: str | Path, *, metadata: dict | None = None) -> None:
    """Writes the trained parts, matrices in int8, with what is needed to check that a target fits."""
    tensors: dict[str, Tensor] = {"kept_ids": draft.kept_ids.to(torch.int32)}
    for name, parameter in trained_parts(draft).items():
        if parameter.dim() == 2:
            tensors[name], tensors[name + ".scale"] = quantise(parameter)
        else:
            tensors[name] = parameter.detach().float()
    described = {
        "num_layers": draft.config.num_hidden_layers,
        "target_shape": shape_of(draft.config),
        **(metadata or {}),
    }
    temporary = Path(path).with_suffix(".tmp")
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, temporary, metadata={"cactus_hf": json.dumps(described)}
    )
    temporary.replace(path)


def load_draft(target: PreTrainedModel, path: str | Path = SHIPPED_DRAFT) -> LlamaForCausalLM:
    """Loads a distilled draft for `target`, on its device and in its dtype, sharing its embedding.

    Args:
        target (`PreTrainedModel`): the model the draft was distilled from (the shipped one: SmolLM2-135M-Instruct).
        path (`str` or `Path`, defaults to the shipped file): a file written by `cactus-hf distill train`.
    Returns:
        `LlamaForCausalLM`: to be passed as `assistant_model`; its logits cover the target's vocabulary.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "cactus_hf" not in metadata:
            raise ValueError(
                f"{path} is not a draft written by `cactus-hf distill train`; its metadata lacks cactus_hf."
            )
        described = json.loads(metadata["cactus_hf"])
        stored = {name: file.get_tensor(name) for name in file.keys()}
    found = shape_of(target.config)
    wrong = [
        f"{key} {found.get(key)} (needed: {want})"
        for key, want in described["target_shape"].items()
        if found.get(key) != want
    ]
    if wrong:
        raise ValueError(
            f"The draft in {path} borrows its target's embedding and fits only that target; "
            f"this one has {', '.join(wrong)}. "
            "Pass the target it was distilled from, or distil a draft for yours with `cactus-hf distill`."
        )
    draft = build_draft(target, described["num_layers"], stored["kept_ids"].long())
    with torch.no_grad():
        for name, parameter in trained_parts(draft).items():
            weight = stored[name].float()
            if name + ".scale" in stored:
                weight = weight * stored[name + ".scale"][:, None]
            parameter.copy_(weight)
            parameter.requires_grad_(False)
    return draft


def set_trained(draft: LlamaForCausalLM, values: Mapping[str, Tensor]) -> None:
    """Overwrites the trained parts by `values`, by name."""
    with torch.no_grad():
        for name, parameter in trained_parts(draft).items():
            parameter.copy_(values[name])


def average_drafts(target: PreTrainedModel, paths: list[Path], out: Path) -> None:
    """Writes the mean of drafts that come from one run, each trained on alone from some point on."""
    drafts = [load_draft(target, path) for path in paths]
    parts = [trained_parts(draft) for draft in drafts]
    set_trained(drafts[0], {name: torch.stack([own[name] for own in parts]).mean(0) for name in parts[0]})
    save_draft(drafts[0], out, metadata={"averaged": len(drafts)})


def shape_of(config: PreTrainedConfig) -> dict:
    """What a target must share with the draft."""
    shape = {name: getattr(config, name, None) for name in SHAPE}
    rope = getattr(config, "rope_parameters", None) or {}
    return shape | {name: rope.get(name) for name in ("rope_type", "rope_theta")}
