"""One `generate()` call: prefills target and draft, decodes, and returns transformers' output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import generation as hf

from . import counters
from .cached_model import CachedModel, CroppedModel, RaggedModel
from .config import LENGTH_KEYWORDS, SpeculationOptions, given, rule_for_rows
from .decoding import Decoder
from .draft_length import DraftLength, LengthSchedule
from .drafting import DraftModel, DraftSource, known
from .logits import BlockProcessor
from .outputs import SpeculativeOutput, TokenRows
from .prompt_lookup import PromptLookup
from .randomness import NoUniforms, make_uniforms
from .sequences import Sequences
from .stopping import Stopping
from .validation import (
    check_batch,
    check_cache,
    check_inputs,
    check_measurable,
    check_positions,
    check_processors,
    left_padding,
)


if TYPE_CHECKING:
    from .generation import Host


MOST_COLUMNS = 2**31  # a `max_length` beyond it means "no limit", and need not fit an int64


def speculate(
    target: Host,
    draft: Host | None,
    options: SpeculationOptions,
    input_ids: Tensor,
    processors: hf.LogitsProcessorList,
    criteria: hf.StoppingCriteriaList,
    config: hf.GenerationConfig,
    *,
    streamer: Any = None,
    synced_gpus: bool = False,
    **inputs: Any,
) -> SpeculativeOutput | Tensor:
    """Decode the prompts `input_ids` [R, P].

    The arguments are those of transformers' decoding methods, as `generate()` prepared them.
    """
    input_ids = input_ids.long()
    num_rows, prompt_length = input_ids.shape
    num_sequences = config.num_return_sequences or 1
    do_sample = bool(config.do_sample)

    hosts = {"target": target} | ({} if draft is None else {"draft": draft})
    check_inputs(inputs, input_ids, streamer, synced_gpus)
    check_cache(inputs.get(target.cache_name), config)
    check_processors(processors)
    if options.speculation_kl:
        check_measurable(options.rule)
    padding = left_padding(inputs.get("attention_mask"), num_rows)
    check_positions(inputs.get("position_ids"), padding, prompt_length)
    stopping = Stopping(criteria, input_ids.device)
    max_length = min(config.max_length, stopping.max_length or config.max_length, MOST_COLUMNS)
    check_batch(hosts, prompt_length - padding, max_length - int(padding.min()))
    rule = rule_for_rows(options.rule, num_rows, num_sequences, input_ids.device)
    uniforms = make_uniforms(options.generator, num_rows, num_sequences, input_ids.device)
    length = _draft_length(draft, options, config)

    sequences = Sequences(input_ids, padding, max_length, pad_token_id(config))
    block_processor = BlockProcessor(processors)
    is_returned = bool(config.return_dict_in_generate)
    is_cache_returned = is_returned or target.is_users(inputs.get(target.cache_name))
    recorder = counters.Recorder(num_rows, options.speculation_kl)

    first_logits, target_model = _prefilled(target, input_ids, padding, config, inputs, is_cache_returned)
    source = _source(draft, first_logits.shape[-1], length, block_processor, input_ids, padding, config, inputs)
    decoder = Decoder(
        target_model,
        source,
        sequences,
        rule if do_sample else None,
        block_processor,
        LengthSchedule(length, num_rows),
        stopping,
        uniforms if do_sample else NoUniforms(),
        recorder,
        streamer,
        TokenRows(num_rows) if is_returned and config.output_scores else None,
        TokenRows(num_rows) if is_returned and config.output_logits else None,
    )
    decoder.run(first_logits)
    if streamer is not None:
        streamer.end()

    stats = recorder.stats()
    counters.publish(stats)
    cache = target_model.returned_cache(int(sequences.length.max()) - 1) if is_cache_returned else None
    if not is_returned:
        return sequences.output()
    return SpeculativeOutput(
        sequences=sequences.output(),
        scores=decoder.scores and decoder.scores.by_token(),
        logits=decoder.raw_logits and decoder.raw_logits.by_token(),
        speculation=stats,
        **{target.cache_name: cache},
    )


def pad_token_id(config: hf.GenerationConfig) -> int:
    """What fills a row behind its end. `generate()` has set it wherever rows can end early."""
    return 0 if config.pad_token_id is None else int(config.pad_token_id)


def _draft_length(draft: Host | None, options: SpeculationOptions, config: hf.GenerationConfig) -> DraftLength:
    if draft is None:
        return DraftLength(config.prompt_lookup_num_tokens)
    return options.draft_length(given(draft.inner.generation_config, list(LENGTH_KEYWORDS)))


def _source(
    draft: Host | None,
    vocab_size: int,
    length: DraftLength,
    processors: BlockProcessor,
    input_ids: Tensor,
    padding: Tensor,
    config: hf.GenerationConfig,
    inputs: dict[str, Any],
) -> DraftSource:
    """What drafts: the draft model, holding the prompts, or the text itself."""
    if draft is None:
        return PromptLookup(config.max_matching_ngram_size or 2, vocab_size)
    names = ("attention_mask", "position_ids") if draft.takes("position_ids") else ("attention_mask",)
    own_inputs = {name: inputs[name] for name in names if inputs.get(name) is not None}
    _, model = _prefilled(draft, known(input_ids, draft.vocab_size), padding, config, own_inputs)
    return DraftModel(
        model,
        processors.for_draft(),
        (vocab_size, draft.vocab_size),
        bool(config.do_sample),
        length.confidence_threshold,
    )


def _prefilled(
    host: Host,
    input_ids: Tensor,
    padding: Tensor,
    config: hf.GenerationConfig,
    inputs: dict[str, Any],
    is_returned: bool = False,
) -> tuple[Tensor, CachedModel]:
    """Logits [R, V] behind the prompts, and the model holding them."""
    num_rows, num_columns = input_ids.shape
    cache = inputs.get(host.cache_name)
    is_ragged = host.is_ragged and (host.is_tested or num_rows > 1)
    if cache is None or not (is_ragged or host.is_users(cache)):
        cache = host.fresh_cache() if is_ragged else host.whole_cache()
    if not (is_ragged and host.is_tested):
        cache.activate_past_recording()  # sliding layers keep all: to be cropped, or for `is_faithful` to look back
    logits, cache = host.prefill(input_ids, config, inputs | {host.cache_name: cache, "use_cache": True})
    if not is_ragged:
        return logits, CroppedModel(host, cache, inputs.get("attention_mask"), int(padding[0]), num_columns)
    model = RaggedModel(host, cache, padding, num_columns, min(config.max_length, MOST_COLUMNS), is_returned)
    if not host.is_tested and not model.is_faithful(input_ids[:, -1:], logits):
        raise ValueError(
            f"{host.name} does not give rows of different lengths the logits they have alone, so it can be verified "
            "one row at a time only: call `generate()` row by row."
        )
    return logits, model
