"""What drafts in a call, made from its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import generation as hf
from transformers.utils import ModelOutput

from .cached_model import CachedModel, CroppedModel
from .candidate_generators import GeneratorSource, num_fixed_drafts
from .config import LENGTH_KEYWORDS, SpeculationOptions, given
from .draft_length import DraftLength
from .drafting import DraftModel, DraftSource, known
from .logits import BlockProcessor
from .prefill import TEXT_INPUTS, Prompts, prefilled
from .prompt_lookup import PromptLookup


if TYPE_CHECKING:
    from .generation import Host


class Sources:
    """Makes the source of drafts of one call: a draft model, the text itself, or a generator of transformers.

    Args:
        target, draft (`Host`): the models; no draft for prompt lookup and multi-token prediction.
        options (`SpeculationOptions`): of the call.
        config (`GenerationConfig`): of the call.
    """

    def __init__(self, target: Host, draft: Host | None, options: SpeculationOptions, config: hf.GenerationConfig):
        self.target, self.draft, self.config = target, draft, config
        self.reads_states = target.serves_states_to(draft, config)
        self.length = self._draft_length(options)
        self.generator: Any = None

    @property
    def hosts(self) -> dict[str, Host]:
        """The models whose rows have a cache of their own, by role."""
        has_own_cache = self.draft is not None and not self.reads_states
        return {"target": self.target} | ({"draft": self.draft} if self.draft is not None and has_own_cache else {})

    @property
    def are_ragged(self) -> bool:
        """Whether all models can hold rows that grow at different speeds."""
        return not self.reads_states and all(host.is_ragged for host in self.hosts.values())

    def _draft_length(self, options: SpeculationOptions) -> DraftLength:
        if self.reads_states:
            return _generators_length(num_fixed_drafts(self.target, self.draft), self.draft, options)
        if self.draft is None:
            return DraftLength(self.config.prompt_lookup_num_tokens)
        return options.draft_length(given(self.draft.inner.generation_config, list(LENGTH_KEYWORDS)))

    def prepare(self, prompts: Prompts, processors: hf.LogitsProcessorList) -> None:
        """To be called before the target reads the prompts."""
        if self.reads_states:
            self.generator = self.target.candidate_generator(
                self.draft, prompts.input_ids, processors, self.config, prompts.inputs
            )

    @property
    def watched(self) -> dict[str, Any] | None:
        """Options of the target's forward pass that make it return what the generator reads."""
        return None if self.generator is None else dict(self.generator.model_kwargs_overrides)

    def make(
        self, prompts: Prompts, target_model: CachedModel, processors: BlockProcessor, vocab_size: int
    ) -> DraftSource:
        """The source; `target_model` holds the prompts, and `vocab_size` is the target's."""
        if self.generator is not None:
            assert isinstance(target_model, CroppedModel)
            # Gemma 4 assistants take the most likely token, and return logits that it was not drawn from
            draws = bool(getattr(self.config, "use_mtp", None) or getattr(self.config, "speculation_type", None))
            return GeneratorSource(self.generator, target_model, bool(self.config.do_sample) and draws)
        draft = self.draft
        if draft is None:
            return PromptLookup(self.config.max_matching_ngram_size or 2, vocab_size)
        own = Prompts(
            known(prompts.input_ids, draft.vocab_size), prompts.padding, draft_inputs(draft, prompts, self.config)
        )
        _, model = prefilled(draft, own, self.config)
        return DraftModel(
            model,
            processors.for_draft(),
            (vocab_size, draft.vocab_size),
            bool(self.config.do_sample),
            self.length.confidence_threshold,
        )


def _generators_length(num_fixed: int | None, draft: Host | None, options: SpeculationOptions) -> DraftLength:
    if options.lengths.get("assistant_confidence_threshold"):
        raise ValueError(
            "`assistant_confidence_threshold` is not for drafts that read the target's states: leave it out."
        )
    if num_fixed is None:
        defaults = {} if draft is None else given(draft.inner.generation_config, ["num_assistant_tokens"])
        return options.draft_length(defaults)
    return options.draft_length({"num_assistant_tokens": num_fixed})


def draft_inputs(draft: Host, prompts: Prompts, config: hf.GenerationConfig) -> dict[str, Any]:
    """What the draft's forward pass takes besides the prompts' ids, of what the target's takes."""
    inputs = {name: _cast(value, draft.dtype) for name, value in prompts.inputs.items() if value is not None}
    if draft.is_encoder_decoder:
        return _encoder_inputs(draft, prompts, config)
    if "encoder_outputs" in inputs:
        own = {"attention_mask": inputs.get("decoder_attention_mask")}
        return own | ({"encoder_outputs": inputs["encoder_outputs"]} if draft.takes("encoder_outputs") else {})
    own = {"attention_mask": inputs.get("attention_mask")}
    media = {name: value for name, value in inputs.items() if name not in TEXT_INPUTS and value != {}}
    if media and all(draft.takes(name) for name in media):
        return own | media | {"position_ids": inputs.get("position_ids")}
    if draft.takes("position_ids") and prompts.padding.any():
        columns = torch.arange(prompts.input_ids.shape[1]) - prompts.padding[:, None]
        own["position_ids"] = columns.clamp_min(0).to(prompts.input_ids.device)
    return own


def _encoder_inputs(draft: Host, prompts: Prompts, config: hf.GenerationConfig) -> dict[str, Any]:
    source = prompts.encoder_input
    if source is None or (source == -100).all():  # what `generate()` puts where `encoder_outputs` are given
        raise ValueError(
            f"The draft, {draft.name}, has an encoder of its own, which cannot read the target's `encoder_outputs`: "
            "pass what they were made from instead."
        )
    names = ("attention_mask", "decoder_attention_mask")
    own = {name: prompts.inputs[name] for name in names if prompts.inputs.get(name) is not None}
    return draft.encoded(_cast(source, draft.dtype), own, config)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of real numbers, and outputs made of such, in the draft's precision."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _cast(each, dtype) for name, each in value.items()})
    return value
