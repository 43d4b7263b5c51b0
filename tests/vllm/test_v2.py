"""Model Runner V2: vLLM's own `rejection_sample` and `RejectionSampler`, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import interpreted  # noqa: F401, I001  first, as it prepares the process
import pytest
import torch
from torch import Tensor
from v2_steps import LEVEL, Counts, Step, chance_of, mixed_step
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.states import RequestState

from cactus_hf import AcceptanceRule, Cactus, Lenience
from cactus_hf.integrations import vllm_v2
from cactus_hf.law import emission


STOCK = rejection_sampler.rejection_sample
TARGET = torch.tensor([0.40, 0.05, 0.25, 0.10, 0.20, 0.0])

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's numpy, of infinities


@pytest.mark.parametrize("has_draft_logits", [True, False], ids=["probabilistic", "one-hot"])
def test_it_is_vllms_sampler_with_other_rows(has_draft_logits: bool):
    """With the same seeds, the tokens are those that vLLM's function gives for whole rows of the laws aimed at."""
    num_apart = 0
    for dtype in (torch.float32, torch.bfloat16):
        step, rules = mixed_step(has_draft_logits, dtype)
        before = step.target.clone()
        tokens, _ = step.follow(rules, STOCK)
        assert tokens == step.run(STOCK, step.aimed_at(rules))
        assert torch.equal(step.target, before)
        for slot, one, stock in zip(step.slots.tolist(), tokens, step.run(STOCK), strict=True):
            if slot not in rules or step.temperature[slot] == 0:
                assert one == stock  # delta 0, and greedy
            num_apart += one != stock
    assert num_apart > 0


def test_drafts_taken_back():
    target = torch.full((4, 5), -torch.inf)
    target[:, 2] = 0.0  # so q is token 2
    for rule in (Cactus(torch.inf), Lenience(0.5)):
        step = Step([3], [0], target, None, torch.ones(1), torch.tensor([0, 2, -1, 4], dtype=torch.int32))
        tokens, _ = step.follow({0: rule}, STOCK)
        assert tokens == [[2, 2]]


def test_law_is_the_emitted_law():
    """Requests of three deltas in one batch: what they emit, and whether it is the draft, by chi-square."""
    draft = torch.tensor([0.10, 0.35, 0.05, 0.15, 0.25, 0.10])
    num, rules = 270, [Cactus(0.0), Cactus(0.1), Cactus(1.0)]
    slots = torch.randperm(num).tolist()
    step = Step(
        [1] * num, slots, TARGET.log().repeat(2 * num, 1), 0.7 * draft.log().repeat(num, 1, 1),
        torch.full((num,), 0.7),
    )  # fmt: skip
    tokens, _ = step.follow({slot: rules[slot % 3] for slot in slots if slot % 3}, STOCK)
    chances = []
    for number in range(3):
        counts = torch.zeros(2, 6).double()
        for slot, row in zip(slots, tokens, strict=True):
            if slot % 3 == number:
                counts[len(row) - 1, row[0]] += 1
        laws = [emission(TARGET.double(), draft.double(), rule) for rule in rules]
        chances.append([chance_of(counts.flatten(), torch.stack([law - kept, kept]).flatten()) for law, kept in laws])
    assert min(chances[number][number] for number in range(3)) > LEVEL
    assert max(chances[0][2], chances[2][0]) < LEVEL  # so many requests tell laws apart


def test_law_of_one_hot_drafts():
    num, rule = 100, Cactus(0.5)
    drafted = torch.tensor([0, 3], dtype=torch.int32).repeat(num)
    step = Step([1] * num, list(range(num)), TARGET.log().repeat(2 * num, 1), None, torch.ones(num), drafted)
    tokens, _ = step.follow(dict.fromkeys(range(num), rule), STOCK)
    counts = torch.bincount(torch.tensor([row[0] for row in tokens]), minlength=6).double()
    law, _ = emission(TARGET.double(), torch.eye(6).double()[3], rule)
    assert chance_of(counts, law) > LEVEL


class Runner:
    """As much of V2's `GPUModelRunner` as `install` and `RejectionSampler` see, with vLLM's own samplers."""

    is_last_pp_rank = True

    def __init__(self, num_slots: int = 6, num_drafts: int = 2, vocab_size: int = 7, **config: Any) -> None:
        self.config = SimpleNamespace(
            num_speculative_tokens=num_drafts, rejection_sample_method="standard", enable_adaptive_verification=False,
            fly_entropy_threshold=0.3, fly_entropy_top_k=3,
        )  # fmt: skip
        vars(self.config).update(config)
        cpu = torch.device("cpu")
        self.states = RequestState(num_slots, 64, 128, num_drafts, vocab_size, cpu)
        self.sampler = Sampler(VllmConfig(), num_slots, vocab_size, cpu, self.states, "processed_logprobs")
        self.rejection_sampler: Any = None

    def load_model(self) -> None:
        self.rejection_sampler = rejection_sampler.RejectionSampler(self.sampler, self.config, torch.device("cpu"))

    def add(self, slot: int, seed: int, **options: Any) -> None:
        self.sampler.add_request(slot, SamplingParams(seed=seed, **options))
        self.sampler.apply_staged_writes()

    def run(self, step: Step, **options: Any) -> tuple[list[list[int]], Any]:
        num = len(step.target)
        input_batch = SimpleNamespace(
            num_reqs=len(step.slots), idx_mapping=step.slots, idx_mapping_np=step.slots.numpy(),
            expanded_idx_mapping=step.row_slots, expanded_local_pos=step.local_pos, input_ids=step.drafted,
            positions=step.pos, logits_indices=torch.arange(num), cu_num_logits=step.starts,
            cu_num_logits_np=step.starts.numpy(), seq_lens=torch.full((len(step.slots),), 50, dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.full((len(step.slots),), 50, dtype=torch.int32),
        )  # fmt: skip
        output = self.rejection_sampler(step.target, input_batch, step.draft, **options)
        pairs = zip(output.sampled_token_ids, output.num_sampled.tolist(), strict=True)
        return [row[:number].tolist() for row, number in pairs], output.logprobs_tensors


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    call = rejection_sampler.RejectionSampler.__call__
    yield
    rejection_sampler.RejectionSampler.__call__ = call
    rejection_sampler.rejection_sample = STOCK


def installed(rule: AcceptanceRule) -> tuple[Runner, Counts]:
    runner, counts = Runner(), Counts()
    statistics: Any = counts
    vllm_v2.install(runner, rule, statistics)
    runner.load_model()
    return runner, counts


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "extra_args": {"cactus_delta": 0}},
    {"temperature": 1.3, "top_k": 3, "logprobs": 2, "extra_args": {"cactus_delta": 1.0}},
    {"temperature": 0.0, "extra_args": {"cactus_delta": 1.0}},
    {"temperature": 0.9, "min_p": 0.1, "extra_args": {"cactus_kl": 0.1}},
]


@pytest.mark.parametrize("slots", [[0, 1, 2, 3, 4], [3, 0, 5, 2, 1]])
def test_requests_keep_their_rule_behind_all_that_makes_the_target(slots: list[int]):
    """vLLM's samplers, in slots that had other requests before: the law aimed at is made of the processed target."""
    received = []

    def spy(target: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        received.append(target.clone())
        return STOCK(target, *args, **options)

    rejection_sampler.rejection_sample = spy
    runner, counts = installed(Cactus(0.4))
    stock = Runner()
    stock.load_model()
    for slot in range(6):
        runner.add(slot, 1, extra_args={"cactus_delta": 5.0})
    for slot, request in zip(slots, REQUESTS, strict=True):
        for each in (runner, stock):
            each.add(slot, 100 + slot, **request)
    rules = {slots[0]: Cactus(0.4), slots[2]: Cactus(1.0), slots[4]: Cactus(kl_budget=0.1)}
    step = Step(
        [2, 2, 1, 2, 2], slots, torch.randn(14, 7) * 2, torch.randn(6, 2, 7) * 2,
        runner.sampler.sampling_states.temperature.gpu.clone(),
    )  # fmt: skip
    before = step.target.clone()
    expected, expected_logprobs = stock.run(step)
    processed = received.pop()
    tokens, logprobs = runner.run(step)
    assert torch.equal(step.target, before)

    step.target = processed
    aimed = step.aimed_at(rules)
    # Found deltas differ by up to .15 %, as the laws that they are found for differ by rounding
    torch.testing.assert_close(received[0].softmax(-1), aimed.softmax(-1), rtol=2e-3, atol=1e-5)
    for place in (1, 3):
        assert tokens[place] == expected[place]
    # The log-probabilities of a position are the target's, not those of the law aimed at
    same = [
        row for row in range(14) if logprobs.logprob_token_ids[row, 0] == expected_logprobs.logprob_token_ids[row, 0]
    ]
    assert len(same) > 4
    assert torch.equal(logprobs.logprobs[same], expected_logprobs.logprobs[same])
    assert counts.told[0][0] == [2, 2, 1, 2, 2]


def test_chunks_are_verified_as_the_whole(monkeypatch: Any):
    runner, _ = installed(Cactus(0.4))
    for slot, request in zip([3, 0, 5, 2, 1], REQUESTS, strict=True):
        runner.add(slot, 100 + slot, **request)
    step = Step(
        [2, 2, 1, 2, 2], [3, 0, 5, 2, 1], torch.randn(14, 7) * 2, torch.randn(6, 2, 7) * 2,
        runner.sampler.sampling_states.temperature.gpu.clone(),
    )  # fmt: skip
    whole, _ = runner.run(step)
    monkeypatch.setattr(rejection_sampler, "get_max_chunk_logits", lambda vocab_size: 6)
    assert runner.run(step)[0] == whole


def test_another_runner_of_the_process_stays_as_it_is():
    stock = Runner()
    stock.load_model()
    installed(Cactus(torch.inf))
    stock.add(0, 7, temperature=1.0)
    step = Step([2], [0], torch.randn(3, 7) * 3, None, torch.ones(6))
    assert stock.run(step)[0] == step_alone(step, 7)


def step_alone(step: Step, seed: int) -> list[list[int]]:
    step.seeds = torch.full((6,), seed)
    return step.run(STOCK)


def test_runners_that_do_not_verify_losslessly_are_refused():
    statistics: Any = Counts()
    for runner, message in (
        (Runner(enable_adaptive_verification=True), "enable_adaptive_verification"),
        (Runner(), "samples by SimpleNamespace"),
    ):
        if "SimpleNamespace" in message:
            runner.load_model = lambda runner=runner: setattr(runner, "rejection_sampler", SimpleNamespace())
        vllm_v2.install(runner, Cactus(0.5), statistics)
        with pytest.raises(ValueError, match=message):
            runner.load_model()


def test_seeded_requests_under_other_rules_repeat_themselves():
    runner, _ = installed(Lenience(0.3))
    step = Step([2, 2], [4, 1], torch.randn(6, 7) * 2, torch.randn(6, 2, 7) * 2, torch.ones(6))
    texts = []
    for order in ([4, 1], [4, 1]):
        for slot in order:
            runner.add(slot, 5, temperature=1.0)
        texts.append(runner.run(step)[0])
    assert texts[0] == texts[1]
