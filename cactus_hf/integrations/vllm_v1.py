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
from vllm.sampling_params import SamplingType
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from ..acceptance import AcceptanceRule, Cactus
from ..parameters import to_device
from ..verification import num_leading, verify_block
from .flat_rows import cactus_rows, raise_logits
from .vllm import Statistics, is_lossless, request_rule


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
        rule = request_rule(params, self.default)
        # Greedy rows match the target's most likely token, whatever the rule
        return None if is_lossless(rule) or params.sampling_type == SamplingType.GREEDY else rule


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
        logits, rules, starts = block.target_logits, row_rules.rules, block.starts
        ball_kl = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
        before = []
        for rows in cactus_rows(rules, starts, block.num_draft_tokens, logits.device):
            drafted = block.draft_token_ids[rows.at].long()
            draft_probs = block.draft_probs if rows.has_budget else None
            draft_logits = None if draft_probs is None else draft_probs[rows.at].log()
            raised = raise_logits(logits, rows, drafted, draft_logits)
            at = rows.at, drafted.clamp(min=0)
            before.append((at, logits[at]))
            logits[at], ball_kl[rows.at] = raised
        tokens = original(*block, **options)
        for at, values in before:  # vLLM takes log-probabilities of them, which are the target's
            logits[at] = values
        for rule, places in _other_rules(rules, block).items():
            _write_verified(rule, places, block, tokens)
        row_rules.statistics.add(block.num_draft_tokens, (tokens >= 0).sum(1) - 1, ball_kl)
        return tokens

    return rejection_sample


def _other_rules(rules: dict[int, AcceptanceRule], block: Block) -> dict[AcceptanceRule, list[int]]:
    """The rows with drafts under each rule that is no change of logits."""
    rows: dict[AcceptanceRule, list[int]] = {}
    for row, rule in rules.items():
        if not isinstance(rule, Cactus) and block.num_draft_tokens[row] > 0:
            rows.setdefault(rule, []).append(row)
    return rows


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
    drafted = block.draft_token_ids[index[:, :-1]].long()
    num_real = num_leading((position[:-1] < length[:, None]) & (drafted >= 0))
    generators = block.sampling_metadata.generators
    uniforms = generate_uniform_probs(
        len(rows) * width,
        [width] * len(rows),
        {place: generators[i] for place, i in enumerate(rows) if i in generators},
        device,
    ).view(len(rows), width)
    draft_logits = None if block.draft_probs is None else block.draft_probs[index[:, :-1]].log()
    result = verify_block(block.target_logits[index], drafted, draft_logits, rule, num_real, uniforms)
    bonus = block.bonus_token_ids[row, 0].long()
    last = torch.where(result.num_accepted == length, bonus, result.next_token)
    kept = torch.nn.functional.pad(drafted, (0, 1))
    at = result.num_accepted[:, None]
    written = torch.where(position < at, kept, torch.where(position == at, last[:, None], -1))
    tokens[row] = written.to(tokens.dtype)
