"""vLLM's Model Runner V1: the rule of each row, and the function that accepts drafts.

`vllm.v1.sample.rejection_sampler.rejection_sample` gets the target's logits after temperature, top-k and top-p, and
the draft's laws. Cactus is that function on other logits: the drafted token's is raised until its probability is
gamma, which leaves the others in proportion, and that is the law it aims at. So vLLM's kernels and seeds stay, and a
row of delta 0 gets the text it has without the plugin. Rows under a rule with another test are verified anew by
`verification.py`, and their tokens written over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import SamplingType
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from ..acceptance import AcceptanceRule, Cactus, Drafted
from ..kl_budget import binary_kl, find_deltas_of_block, has_budget
from ..parameters import move_rule
from ..probabilities import Normaliser, normalise
from ..verification import num_leading, verify_block
from .vllm import Statistics, is_lossless, request_rule


# Above the largest logit of a row, where gamma is 1: exp(-150) is 0 in float32
CERTAIN = 150.0


def check(rule: AcceptanceRule, params: SamplingParams | None = None) -> None:
    """Raises `ValueError` where a rule, or a rule for a request of these parameters, is not exact."""
    if params is not None and params.structured_outputs is not None and not isinstance(rule, Cactus):
        # vLLM takes back drafts that a grammar forbids, and with them the law that they were drawn from
        if not is_lossless(rule):
            raise ValueError(f"structured outputs are not supported with {rule!r}: ask for a `cactus_delta` instead.")


def install(model_runner: Any, rule: AcceptanceRule, statistics: Statistics) -> None:
    """Makes a model runner follow `rule`."""
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.rejection_sample
    if original.__module__ != __name__:
        rejection_sampler.rejection_sample = _following_rules(original)
    model_runner.input_batch.logitsprocs.argmax_invariant.append(RowRules(rule, statistics))


class RowRules(LogitsProcessor):
    """
    The rule of each row that vLLM's own code does not decide, by its place in the batch.

    A logits processor that changes no logits: as such it hears of every row that comes, goes or moves.
    """

    def __init__(self, default: AcceptanceRule, statistics: Statistics):
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

    draft_token_ids: Tensor  # [N] int32; -1 for drafts taken back
    num_draft_tokens: list[int]  # B numbers
    max_spec_len: int
    cu_num_draft_tokens: Tensor  # [B]
    draft_probs: Tensor | None  # [N, V] float32
    target_logits: Tensor  # [N, V] float32, after temperature, top-k and top-p
    bonus_token_ids: Tensor  # [B, 1]
    sampling_metadata: Any

    @property
    def starts(self) -> list[int]:
        """Where each row's drafts begin."""
        lengths = torch.tensor(self.num_draft_tokens)
        return (lengths.cumsum(0) - lengths).tolist()


def _following_rules(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rejection_sample(*args: Any, **options: Any) -> Tensor:
        block = Block(*args)
        processors = block.sampling_metadata.logitsprocs.argmax_invariant
        row_rules = next((each for each in processors if isinstance(each, RowRules)), None)
        if row_rules is None or len(block.draft_token_ids) == 0:
            return original(*args, **options)
        ball_kl = torch.zeros(len(block.draft_token_ids), dtype=torch.float64, device=block.target_logits.device)
        # vLLM may report log-probabilities from these logits, and they are the target's
        before = []
        for cactus, indices in _cactus_rules(row_rules.rules, block):
            at, logits, ball_kl[indices] = _raised_logits(cactus, indices, block)
            before.append((at, block.target_logits[at]))
            block.target_logits[at] = logits
        tokens = original(*args, **options)
        for at, logits in before:
            block.target_logits[at] = logits
        for rule, rows in _other_rules(row_rules.rules, block).items():
            _write_verified(rule, rows, block, tokens)
        row_rules.statistics.add(block.num_draft_tokens, (tokens >= 0).sum(1) - 1, ball_kl)
        return tokens

    return rejection_sample


def _cactus_rules(rules: dict[int, AcceptanceRule], block: Block) -> list[tuple[Cactus, Tensor]]:
    """Cactus with a parameter for each of some drafts, and their indices: those with a delta, those with a budget."""
    device, starts = block.target_logits.device, block.starts
    found = []
    for is_budget in (False, True):
        indices: list[int] = []
        values: list[Any] = []
        for row, rule in rules.items():
            if isinstance(rule, Cactus) and has_budget(rule) == is_budget:
                indices += range(starts[row], starts[row] + block.num_draft_tokens[row])
                values += [rule.kl_budget if is_budget else rule.delta] * block.num_draft_tokens[row]
        if indices:
            parameters = torch.tensor(values, dtype=torch.float64)
            rule_of_all = Cactus(kl_budget=parameters) if is_budget else Cactus(parameters)
            found.append((move_rule(rule_of_all, device), async_tensor_h2d(indices, device, torch.int64)))
    return found


def _raised_logits(rule: Cactus, indices: Tensor, block: Block) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Where the logits are to be changed, what to, and the KL in nats of the law that they then give."""
    drafted = block.draft_token_ids[indices].long()
    tokens = drafted.clamp(min=0)
    law = Normaliser(*(field[indices] for field in normalise(block.target_logits)))
    logits = block.target_logits[indices, tokens]
    prob = law.probability(logits)
    delta = None
    if has_budget(rule):
        draft_logits = None if block.draft_probs is None else block.draft_probs[indices].log().unsqueeze(1)
        target_logits = block.target_logits[indices].unsqueeze(1)
        delta = find_deltas_of_block(target_logits, draft_logits, rule, prob.unsqueeze(1)).delta.squeeze(1)
    gamma = rule.raised_prob(Drafted(prob, prob, delta=delta))
    gamma = torch.where(drafted >= 0, gamma, prob)
    raised = torch.where(gamma < 1, logits + (gamma.logit() - prob.logit()), law.peak + CERTAIN)
    return (indices, tokens), torch.where(gamma > prob, raised, logits).float(), binary_kl(prob, gamma)


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
    starts = block.starts
    row = async_tensor_h2d(rows, device, torch.int64)
    start, length = (
        async_tensor_h2d([each[i] for i in rows], device, torch.int64) for each in (starts, block.num_draft_tokens)
    )
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
