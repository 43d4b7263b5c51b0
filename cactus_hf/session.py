"""One `generate()` call: prefills target and draft, decodes, and returns transformers' output."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import generation as hf

from . import counters, states
from .acceptance import AcceptanceRule
from .cached_model import CachedModel
from .compiled import MOST_COLUMNS, check_static
from .config import SpeculationOptions, rule_for_rows
from .decoding import Decoder
from .draft_length import SCHEDULES, Schedule, make_schedule
from .kl_budget import has_budget
from .logits import BlockProcessor
from .outputs import SpeculativeEncoderDecoderOutput, SpeculativeOutput, TokenRows
from .parameters import select_rows
from .prefill import Prompts, prefilled
from .ragged_cache import UnequalRowsError
from .randomness import NoUniforms, Uniforms, make_uniforms
from .ranks import Ranks, make_ranks
from .sequences import Sequences
from .sources import Sources
from .stopping import Stopping
from .validation import check_call, check_context, check_ranks


if TYPE_CHECKING:
    from .host import Host


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
    inputs_tensor: Tensor | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **inputs: Any,
) -> SpeculativeOutput | SpeculativeEncoderDecoderOutput | Tensor:
    """Decode the prompts `input_ids` [R, P].

    The arguments are those of transformers' decoding methods, as `generate()` prepared them.
    """
    input_ids = input_ids.long()
    num_rows, prompt_length = input_ids.shape
    num_sequences = config.num_return_sequences or 1
    padding = check_call(target, inputs, input_ids, processors, streamer, options)
    is_returned = bool(config.return_dict_in_generate)
    has_scores = is_returned and bool(config.output_scores)
    ranks = make_ranks(target, draft, synced_gpus, input_ids.device)
    stopping = Stopping(criteria, input_ids, target.vocab_size if has_scores else None, ranks)
    max_length = min(config.max_length, stopping.max_length or config.max_length, MOST_COLUMNS)
    sources = Sources(target, draft, options, config, (tokenizer, assistant_tokenizer))
    if config.cache_implementation == "static":
        check_static((host.name for host in sources.hosts.values()), sources.are_ragged, max_length)
    check_context(target, prompt_length - padding, max_length - int(padding.min()))
    check_ranks(ranks, sources.hosts.values(), sources.needs_generator, config)
    rule = rule_for_rows(options.rule, num_rows, num_sequences, input_ids.device)
    uniforms = make_uniforms(options.generator, num_rows, num_sequences, input_ids.device)
    length = sources.length
    length.check_timing(bool(ranks.groups), options.generator is not None)
    schedule = SCHEDULES.index(length.schedule), hash(length.costs) if length.costs is not None else 0
    drafting = (draft is None, length.num_tokens, *schedule, length.confidence_threshold > 0)
    others = (max_length, bool(stopping.others), bool(config.do_sample), options.speculation_kl or has_budget(rule))
    ranks.check_alike(input_ids, padding, drafting + others)
    is_users_cache = target.is_users(inputs.get(target.cache_name))
    session = Session(
        target,
        sources,
        config,
        Prompts(input_ids, padding, *_own_inputs(target, inputs, inputs_tensor, num_rows)),
        Sequences(input_ids, padding, max_length, target.pad_token_id(config)),
        rule if config.do_sample else None,
        BlockProcessor.of_call(processors, input_ids, target.vocab_size),
        make_schedule(length, num_rows, sources.needs_generator or config.cache_implementation == "static"),
        stopping,
        uniforms if config.do_sample else NoUniforms(),
        counters.Recorder(num_rows, with_emitted=options.speculation_kl or has_budget(rule)),
        ranks,
        streamer,
        is_cache_returned=is_returned or is_users_cache,
        scores=TokenRows(num_rows) if has_scores else None,
        raw_logits=TokenRows(num_rows) if is_returned and config.output_logits else None,
    )
    return session.output(session.decode())


def _own_inputs(
    target: Host, inputs: dict[str, Any], inputs_tensor: Tensor | None, num_rows: int
) -> tuple[dict[str, Any], Tensor | None]:
    """The inputs of the forward pass, and of the encoder, as the loop wants them."""
    # Attentions and hidden states are those of the finished text, see `states`
    left_out = {"output_attentions", "output_hidden_states"}
    if not target.is_users(inputs.get(target.cache_name)):  # the cache that `generate()` made may not fit
        left_out.add(target.cache_name)
    if inputs_tensor is not None and len(inputs_tensor) < num_rows:  # the one thing that `generate()` does not repeat
        inputs_tensor = inputs_tensor.repeat_interleave(num_rows // len(inputs_tensor), dim=0)
    return {name: value for name, value in inputs.items() if name not in left_out}, inputs_tensor


@dataclass
class Session:
    """What a call keeps from its first row to its last; see [`Decoder`] for what its parts are."""

    target: Host
    sources: Sources
    config: hf.GenerationConfig
    prompts: Prompts
    sequences: Sequences
    rule: AcceptanceRule | None
    processors: BlockProcessor
    schedule: Schedule
    stopping: Stopping
    uniforms: Uniforms
    recorder: counters.Recorder
    ranks: Ranks
    streamer: Any
    is_cache_returned: bool
    scores: TokenRows | None
    raw_logits: TokenRows | None

    def decode(self) -> CachedModel | None:
        """Decode all rows, together where the models can. Returns the target holding them, or `None` if it held one
        after another.
        """
        num_rows = len(self.prompts.input_ids)
        if self.sources.are_ragged:
            try:
                decoder = self._start(self.prompts, torch.arange(num_rows))
            except UnequalRowsError:
                pass  # it could not be told before the prompts were read
            else:
                return decoder.run()
        if num_rows > 1:
            self.prompts.check_separable()
            _warn_row_by_row(self.sources)
        num_missing = self.ranks.most(num_rows) - num_rows  # rows that another process has more
        for row in range(num_rows):
            is_whole = num_rows == 1 and not self.sources.needs_generator
            prompts = self.prompts if is_whole else self.prompts.row(row)
            target_model = self._start(prompts, torch.tensor([row])).run()
        for _ in range(num_missing):
            again = self.prompts.row(row)
            again.inputs.pop(self.target.cache_name, None)
            decoder = self._start(again, torch.tensor([row]))
            decoder.has_finished = True  # only its passes matter, to that process
            decoder.run()
        return target_model if num_rows == 1 else None

    def _start(self, prompts: Prompts, rows: Tensor) -> Decoder:
        """Read the prompts of `rows`, to be decoded together."""
        self.sequences.activate(rows)
        self.sources.prepare(prompts, self.processors)
        first_logits, target_model = prefilled(
            self.target, prompts, self.config, self.is_cache_returned, self.sources.watched, ranks=self.ranks
        )
        vocab_size = first_logits.shape[-1]
        source = self.sources.make(prompts, self.sequences, target_model, self.processors, vocab_size, self.ranks)
        return Decoder(
            first_logits,
            target_model,
            source,
            self.sequences,
            None if self.rule is None else select_rows(self.rule, rows),
            self.processors,
            self.schedule,
            self.stopping,
            self.uniforms,
            self.recorder,
            self.ranks,
            self.streamer,
            self.scores,
            self.raw_logits,
        )

    def output(self, target_model: CachedModel | None) -> SpeculativeOutput | SpeculativeEncoderDecoderOutput | Tensor:
        """What `generate()` returns, now that all rows have ended."""
        self.processors.finish(self.sequences)
        cache = None
        if self.is_cache_returned and target_model is not None:
            cache = target_model.returned_cache(*self.sequences.behind_ends())
        if self.streamer is not None:
            self.streamer.end()

        stats = self.recorder.stats()
        counters.publish(stats)
        text = self.sequences.output()
        if not self.config.return_dict_in_generate:
            return text
        kind = SpeculativeEncoderDecoderOutput if self.target.is_encoder_decoder else SpeculativeOutput
        prompt_length = self.prompts.input_ids.shape[1]
        output = kind(
            sequences=text,
            scores=self.scores and self.scores.by_token(stats.emitted),
            logits=self.raw_logits and self.raw_logits.by_token(stats.emitted),
            **states.collect(self.target, text, prompt_length, self.config, self.prompts.inputs),
            **{self.target.cache_name: cache},
        )
        output.speculation = stats
        return output


def _warn_row_by_row(sources: Sources) -> None:
    names = ", ".join(host.name for host in sources.hosts.values())
    warnings.warn(
        f"The rows of this batch are decoded one after another, as {names} with this attention implementation and "
        "source of drafts cannot hold rows that grow at different speeds. Such a batch is no faster than its rows.",
        stacklevel=2,
    )
