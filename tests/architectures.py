"""How to make a tiny model of each family. The table of families is in `families.py`.

transformers' own initialisation (weights of standard deviation 0.02) makes attention almost uniform and logits almost
flat, so a wrong mask or a wrong position hardly moves the output and greedy choices are near-ties. `spread` therefore
draws every weight anew: attention is sharp enough that one wrong slot changes the text, logits have the spread
`LOGIT_SCALE`, and the best token leads the second by about a third of that.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel


VOCAB = 97  # prime, so that no kernel's block size divides it
PAD, EOS, BOS, UNK = 0, 1, 2, 3
LOGIT_SCALE = 4.0  # standard deviation of the logits over the vocabulary
MAX_POSITIONS = 256
WINDOW = 8

# Flags, and what the support table of the docs says of them
FLAGS = {
    "alibi": "ALiBi",  # positions enter as a bias built from the 2-D attention mask, not from position ids
    "recurrent": "recurrent",  # all layers keep a running state
    "hybrid": "recurrent and attention layers",
    "conv": "convolution and attention layers",
    "sliding": "sliding window",  # all layers, or those of `config.layer_types`, see a window of the last `WINDOW`
    "chunked": "chunked attention",  # some layers see only their own chunk of `WINDOW` positions
    "sparse": "sparse attention",  # an indexer picks the tokens that are attended to
    "moe": "mixture of experts",
    "latent": "latent attention",  # keys and values have different widths
    "shared": "layers share keys and values",
    "learned": "learned positions",  # none beyond `MAX_POSITIONS`
    "no_position_ids": "",  # forward takes no position ids
    "dynamic_rope": "",  # frequencies depend on the longest row of the batch, so rows influence each other
}


@dataclass(frozen=True)
class Architecture:
    """
    How to make one family of decoder-only models in miniature, and what the package does with it.

    Args:
        name (`str`): Name in `families.ARCHITECTURES`.
        options (`dict`): Arguments of the configuration.
        model_type (`str`, *optional*, defaults to `name`): transformers' name of the family.
        flags (`frozenset[str]`): What is special: see `FLAGS`.
        seed (`int`): Default seed of the weights: one whose greedy texts are varied and keep clear of near-ties.
        batch (`str`): "ragged" if rows of different lengths go together, "one row" if rows run one at a time, else
            "refused".
        sizes (`dict`): Further arguments, for those of these names that the configuration has.
        since (`str`): First release of transformers, among those tested, with which it does that.
        remark (`str`): Said of it in the docs, besides the flags.
        kind (`str`): The part of the docs' table it belongs to.
    """

    name: str
    options: dict[str, Any] = field(hash=False)
    model_type: str
    flags: frozenset[str] = frozenset()
    seed: int = 0
    batch: str = "ragged"
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    since: str = "5.17"
    remark: str = ""
    kind: str = "decoder"

    @property
    def exists(self) -> bool:
        """Whether the installed transformers has it, as described."""
        return self.model_type in CONFIG_MAPPING and Version(transformers.__version__) >= Version(self.since)

    @property
    def config_class(self) -> type:
        return CONFIG_MAPPING[self.model_type]

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class]

    @property
    def attention(self) -> tuple[str, ...]:
        """Attention implementations among eager and sdpa that the class takes (this varies between releases)."""
        return ("eager", "sdpa") if self.model_class._supports_sdpa else ("eager",)

    def build(
        self,
        *,
        attn_implementation: str | None = None,
        seed: int | None = None,
        vocab: int = VOCAB,
        dtype: torch.dtype = torch.float32,
        logit_scale: float = LOGIT_SCALE,
        **options: Any,
    ) -> PreTrainedModel:
        """A new model in eval mode. The same arguments give the same weights whatever the attention implementation."""
        common = {
            "vocab_size": vocab,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "bos_token_id": BOS,
            "tie_word_embeddings": False,
        }
        config = self.config_class(**{**common, **self._fitting_sizes(), **self.options, **options})
        config._attn_implementation = attn_implementation or self.attention[-1]
        seed = self.seed if seed is None else seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model_class(config).eval()
        # A state must decay, so what rules that stays as transformers draws it
        spread(model, seed=seed, plain_modules_only=bool(self.flags & {"recurrent", "hybrid"}))
        sharpen(model, logit_scale)
        return model.to(dtype)

    def _fitting_sizes(self) -> dict[str, Any]:
        annotated = {name for cls in self.config_class.__mro__ for name in inspect.get_annotations(cls)}
        known = annotated | set(inspect.signature(self.config_class.__init__).parameters)
        return {name: value for name, value in self.sizes.items() if name in known}


def spread(model: PreTrainedModel, *, seed: int, gain: float = 1.5, plain_modules_only: bool = False) -> None:
    """
    Draws the weights of `model` anew, in place: unit embeddings, matrices that multiply the spread of their input by
    `gain`, biases and norms a little off their start. With `plain_modules_only`, those of linear maps, embeddings and
    convolutions.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    plain = (nn.Linear, nn.Embedding, nn.Conv1d)
    owners = (module for module in model.modules() if isinstance(module, plain) or not plain_modules_only)
    changed = {parameter for module in owners for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if parameter not in changed:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.data += 0.1 * noise
        elif parameter in embeddings:
            parameter.data = noise
        else:
            parameter.data = noise * gain / min(parameter.shape[-2:]) ** 0.5


@torch.no_grad()
def sharpen(model: PreTrainedModel, logit_scale: float = LOGIT_SCALE) -> None:
    """Scales the head of `model`, in place, until its logits have standard deviation `logit_scale`."""
    tokens = torch.arange(min(model.config.vocab_size, 40))[None]
    model.get_output_embeddings().weight *= logit_scale / model(input_ids=tokens).logits.std(-1).mean()
