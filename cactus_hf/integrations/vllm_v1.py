"""vLLM's Model Runner V1: the rule of each row, and the function that accepts drafts.

`vllm.v1.sample.rejection_sampler.rejection_sample` gets the target's logits behind temperature, top-k and top-p, and
the draft's laws. Cactus is that function on other logits (`flat_rows.py`), so vLLM's kernels and seeds stay, and a row
of delta 0 has the text that it has without the plugin. Rows under a rule with another test are verified anew by
`verification.py`, and their tokens written over.

Where vLLM has lost the laws that drafts were drawn from, as it does around a preemption, it takes them for certain,
and the law of what comes out is wrong. Such drafts are taken back here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from ..acceptance import AcceptanceRule
from ..parameters import to_device
from ..verification import num_leading, verify_block
from .flat_rows import cactus_rows, other_rules, raised
from .vllm import Statistics, own_rule


TAKEN_BACK = -1  # vLLM's token id for a draft that is to be rejected


def install(model_runner: Any, rule: AcceptanceRule, statistics: Statistics) -> None:
    """Makes a model runner follow `rule`."""
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.rejection_sample
    if original.__module__ != __name__:
        rejection_sampler.rejection_sample = _following_rules(original)
    # The last of several pipeline stages drafts
    has_laws = hasattr(getattr(model_runner, "drafter", None), "take_last_draft_probs")
    are_drawn = has_laws and model_runner.speculative_config.draft_sample_method == "probabilistic"
    row_rules = RowRules(rule, statistics, are_drawn)
    model_runner.input_batch.logitsprocs.argmax_invariant.append(row_rules)


class RowRules(LogitsProcessor):
    """
    The rule of each row that vLLM's own code does not decide, by its place in the batch.

    A logits processor that changes no logits: as such it hears of every row that comes, goes or moves.
    """

    def __init__(self, default: AcceptanceRule, statistics: Statistics, are_drawn: bool):
        self.are_drawn = are_drawn  # drafts, from laws that should be known
        self.default = default
        self.statistics = statistics
        self.rules: dict[int, AcceptanceRule] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rules, batch_update, self._new_rule)

    def _new_rule(self, params: SamplingParams, *_: Any) -> AcceptanceRule | None:
        return own_rule(params, self.default)


class Block(NamedTuple):
    """What vLLM's function is called with: B rows, their N drafted tokens in succession."""

    draft_token_ids: Tensor  # [N] int32, or `TAKEN_BACK`
    num_draft_tokens: list[int]  # B numbers
    max_spec_len: int
    cu_num_draft_tokens: Tensor  # [B]
    draft_probs: Tensor | None  # [N, V] float32
    target_logits: Tensor  # [N, V] float32, behind temperature, top-k and top-p
    bonus_token_ids: Tensor  # [B, 1]
    sampling_metadata: Any

    def tokens_at(self, index: Tensor) -> Tensor:
        """The drafts at some rows, of the shape of `index`."""
        return self.draft_token_ids[index].long()

    def draft_logits_at(self, index: Tensor) -> Tensor | None:
        """Logits of the laws that they were drawn from, of the shape of `index` and V."""
        return None if self.draft_probs is None else self.draft_probs[index].log()

    @property
    def starts(self) -> list[int]:
        """Where each row's drafts begin."""
        lengths = torch.tensor(self.num_draft_tokens)
        return (lengths.cumsum(0) - lengths).tolist()

    def without_drawn_drafts(self) -> Block:
        """With the drafts of greedy rows only."""
        metadata = self.sampling_metadata
        if metadata.all_greedy:
            return self
        lengths = self.cu_num_draft_tokens.diff(prepend=self.cu_num_draft_tokens.new_zeros(1))
        is_greedy = (metadata.temperature == 0).repeat_interleave(lengths, output_size=len(self.draft_token_ids))
        return self._replace(draft_token_ids=self.draft_token_ids.where(is_greedy, TAKEN_BACK))


def _following_rules(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rejection_sample(*args: Any, **options: Any) -> Tensor:
        block = Block(*args)
        processors = block.sampling_metadata.logitsprocs.argmax_invariant
        row_rules = next((each for each in processors if isinstance(each, RowRules)), None)
        if row_rules is None or len(block.draft_token_ids) == 0:
            return original(*args, **options)
        if row_rules.are_drawn and block.draft_probs is None:
            block = block.without_drawn_drafts()
        logits, rules = block.target_logits, row_rules.rules
        rows = cactus_rows(rules, block.starts, block.num_draft_tokens, logits.device)
        with raised(logits, rows, block.tokens_at, block.draft_logits_at) as ball_kl:
            tokens = original(*block, **options)
        for rule, places in other_rules(rules, block.num_draft_tokens).items():
            _write_verified(rule, places, block, tokens)
        row_rules.statistics.add(block.num_draft_tokens, (tokens >= 0).sum(1) - 1, ball_kl)
        return tokens

    return rejection_sample


def _write_verified(rule: AcceptanceRule, rows: list[int], block: Block, tokens: Tensor) -> None:
    """Writes what `verify_block` makes of some rows into `tokens` [B, m + 1]."""
    from vllm.v1.sample.rejection_sampler import generate_uniform_probs

    device, width = tokens.device, tokens.shape[1]
    starts, lengths = block.starts, block.num_draft_tokens
    described = torch.tensor([(i, starts[i], lengths[i]) for i in rows])
    row, start, length = to_device(described, device).unbind(1)
    position = torch.arange(width, device=device)
    index = start[:, None] + position.clamp(max=width - 2)
    index.clamp_(max=len(block.draft_token_ids) - 1)  # what is beyond a row's drafts is not used
    drafted = block.tokens_at(index[:, :-1])
    num_real = num_leading((position[:-1] < length[:, None]) & (drafted >= 0))
    generators = block.sampling_metadata.generators
    uniforms = generate_uniform_probs(
        len(rows) * width,
        [width] * len(rows),
        {place: generators[i] for place, i in enumerate(rows) if i in generators},
        device,
    ).view(len(rows), width)
    draft_logits = block.draft_logits_at(index[:, :-1])
    result = verify_block(block.target_logits[index], drafted, draft_logits, rule, num_real, uniforms)
    bonus = block.bonus_token_ids[row, 0].long()
    last = torch.where(result.num_accepted == length, bonus, result.next_token)
    kept = torch.nn.functional.pad(drafted, (0, 1))
    at = result.num_accepted[:, None]
    written = torch.where(position < at, kept, torch.where(position == at, last[:, None], -1))
    tokens[row] = written.to(tokens.dtype)
