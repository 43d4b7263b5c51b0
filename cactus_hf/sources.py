"""What drafts in a call, made from its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import generation as hf
from transformers.utils import ModelOutput

from . import support
from .cached_model import CachedModel, CroppedModel
from .candidate_generators import GeneratorSource, num_fixed_drafts
from .config import LENGTH_KEYWORDS, SpeculationOptions, given
from .draft_length import DraftLength
from .drafting import DraftModel, DraftSource
from .logits import BlockProcessor
from .prefill import TEXT_INPUTS, Prompts, prefilled
from .prompt_lookup import PromptLookup
from .ranks import Ranks
from .reading import DraftText, Reader, SharedText
from .sequences import Sequences
from .translation import TranslatedText, Translation


if TYPE_CHECKING:
    from .host import Host


class Sources:
    """Makes the source of drafts of one call: a draft model, the text itself, or a generator of transformers.

    Args:
        target, draft (`Host`): the models; no draft for prompt lookup and multi-token prediction.
        options (`SpeculationOptions`): of the call.
        config (`GenerationConfig`): of the call.
        tokenizers (`tuple` of two `PreTrainedTokenizerBase`, *optional*): the target's, and the draft's.
    """

    def __init__(
        self,
        target: Host,
        draft: Host | None,
        options: SpeculationOptions,
        config: hf.GenerationConfig,
        tokenizers: tuple[Any, Any] = (None, None),
    ):
        self.target, self.draft, self.config = target, draft, config
        kind = getattr(config, "speculation_type", None)
        if kind is not None and draft is not None and not hasattr(draft.inner.config, "target_layer_ids"):
            raise ValueError(
                f"`speculation_type={kind!r}` is for drafters that were trained for it, which the draft, {draft.name},"
                " is not: leave it out."
            )
        self.reads_states = target.serves_states_to(draft, config)
        self.length = options.with_costs(self._draft_length(options))
        self.generator: Any = None
        self.tokenizers = tokenizers
        self.translation = None if draft is None or self.reads_states else _translation(draft, tokenizers)
        self.is_retokenised = self.translation is not None and not self.translation.has_common_tokens

    @property
    def needs_generator(self) -> bool:
        """Whether transformers drafts, for one row at a time."""
        return self.reads_states or self.is_retokenised

    @property
    def hosts(self) -> dict[str, Host]:
        """The models whose rows have a cache of their own, by role."""
        has_own_cache = self.draft is not None and not self.needs_generator
        return {"target": self.target} | ({"draft": self.draft} if self.draft is not None and has_own_cache else {})

    @property
    def are_ragged(self) -> bool:
        """Whether all models can hold rows that grow at different speeds."""
        return not self.needs_generator and all(host.is_ragged for host in self.hosts.values())

    def _draft_length(self, options: SpeculationOptions) -> DraftLength:
        if self.reads_states:
            return _generators_length(num_fixed_drafts(self.target, self.draft), self.draft, options)
        if self.draft is None:
            is_auto = options.lengths.get("num_assistant_tokens_schedule") == "auto"  # no other schedule is for lookup
            return DraftLength(self.config.prompt_lookup_num_tokens, "auto" if is_auto else "constant")
        return options.draft_length(given(self.draft.inner.generation_config, list(LENGTH_KEYWORDS)))

    def prepare(self, prompts: Prompts, processors: BlockProcessor) -> None:
        """To be called before the target reads the prompts."""
        if self.reads_states:
            self.generator = self.target.candidate_generator(
                self.draft, prompts.input_ids, processors.for_generators(), self.config, prompts.inputs
            )
        elif self.is_retokenised:
            assert self.draft is not None
            self.generator = self.draft.retokenising_generator(prompts.input_ids, self.config, self.tokenizers)
            self.generator.generation_config.assistant_confidence_threshold = self.length.confidence_threshold

    @property
    def watched(self) -> dict[str, Any] | None:
        """Options of the target's forward pass that make it return what the generator reads."""
        return None if self.generator is None else dict(getattr(self.generator, "model_kwargs_overrides", {}))

    def make(
        self,
        prompts: Prompts,
        sequences: Sequences,
        target_model: CachedModel,
        processors: BlockProcessor,
        vocab_size: int,
        ranks: Ranks,
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
        device = draft_device(draft, prompts)
        text: DraftText = SharedText((vocab_size, draft.vocab_size), device)
        inputs: dict[str, Any] = {}
        has_media = False
        if self.translation is None:
            inputs, has_media = draft_inputs(draft, prompts)
        else:
            text = TranslatedText(self.translation, sequences, vocab_size, device)
        # Placeholders of images cannot be cut off
        context = None if has_media else support.draft_context(draft.config)
        longest = context
        if context is not None and self.translation is None:  # the target's own ids are no more than it may write
            longest = min(context, self.config.max_length)

        last: CachedModel | None = None

        def prefill(input_ids: Tensor, padding: Tensor) -> tuple[Tensor, CachedModel]:
            nonlocal last
            own = inputs if has_media else inputs | text_inputs(draft, padding, input_ids)
            own_prompts = Prompts(input_ids, padding, own)
            logits, last = prefilled(draft, own_prompts, self.config, context=longest, ranks=ranks, before=last)
            return logits, last

        # A model whose rows may turn out not to share a cache is tried before anything is decoded; inputs beside the
        # text are those of the prompts; and the rounds of a schedule that times them are not to have it in one of them
        is_timed = self.length.schedule == "auto" and self.length.costs is None
        reader = Reader(prefill, text, sequences, context, waits=draft.is_tested and not inputs and not is_timed)
        return DraftModel(
            reader, processors.for_draft(), bool(self.config.do_sample), self.length.confidence_threshold, ranks
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


def _translation(draft: Host, tokenizers: tuple[Any, Any]) -> Translation | None:
    """What stands between the tokenizers, if they are not the same."""
    tokenizer, draft_tokenizer = tokenizers
    if tokenizer is None or draft_tokenizer is None or tokenizer is draft_tokenizer:
        return None
    translation = Translation(tokenizer, draft_tokenizer, draft.vocab_size)
    return translation if translation.is_needed else None


def draft_device(draft: Host, prompts: Prompts) -> torch.device:
    """Where the draft takes its inputs; the parameters of an offloaded model say "meta"."""
    return prompts.input_ids.device if draft.device.type == "meta" else draft.device


def draft_inputs(draft: Host, prompts: Prompts) -> tuple[dict[str, Any], bool]:
    """What the draft's forward pass takes besides the text, of what the target's takes; whether it includes media."""
    device = draft_device(draft, prompts)
    inputs = {name: _cast(value, draft.dtype, device) for name, value in prompts.inputs.items() if value is not None}
    if draft.is_encoder_decoder:
        return _encoder_inputs(draft, prompts), False
    if "encoder_outputs" in inputs:
        return ({"encoder_outputs": inputs["encoder_outputs"]} if draft.takes("encoder_outputs") else {}), False
    media = {name: value for name, value in inputs.items() if name not in TEXT_INPUTS and value != {}}
    if media and all(draft.takes(name) for name in media):
        text = {name: inputs.get(name) for name in ("attention_mask", "position_ids")}
        return media | text, True
    return {}, False


def text_inputs(draft: Host, padding: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
    """The inputs that tell a draft of the padding of its rows `input_ids` [B, columns]."""
    positions = torch.arange(input_ids.shape[1]) - padding[:, None]
    name = "decoder_attention_mask" if draft.is_encoder_decoder else "attention_mask"
    inputs = {name: (positions >= 0).long().to(input_ids.device)}
    if draft.takes("position_ids") and padding.any():
        inputs["position_ids"] = positions.clamp_min(0).to(input_ids.device)
    return inputs


def _encoder_inputs(draft: Host, prompts: Prompts) -> dict[str, Any]:
    source = prompts.encoder_input
    if source is None or (source == -100).all():  # what `generate()` puts where `encoder_outputs` are given
        raise ValueError(
            f"The draft, {draft.name}, has an encoder of its own, which cannot read the target's `encoder_outputs`: "
            "pass what they were made from instead."
        )
    device = draft_device(draft, prompts)
    mask = prompts.inputs.get("attention_mask")
    mask = None if mask is None else mask.to(device)
    return {"attention_mask": mask, "encoder_outputs": draft.encoded(_cast(source, draft.dtype, device), mask)}


def _cast(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Tensors, and outputs made of such, on the draft's device, and in its precision if they are real numbers."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _cast(each, dtype, device) for name, each in value.items()})
    return value
