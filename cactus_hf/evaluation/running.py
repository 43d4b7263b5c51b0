"""Lets the methods answer the questions, each batch by all of them in turn: a run cut short is still paired."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..counters import SpeculationStats, track
from ..measuring import timed
from .methods import Method
from .records import Answer, Key, Records
from .tasks import Question


class Backend(Protocol):
    """What decodes: [`Evaluation`] by transformers, `vllm_answers.VllmEvaluation` by vLLM."""

    def groups(self, methods: Sequence[Method]) -> list[list[Method]]: ...

    def answer(self, task: str, questions: Sequence[Question], method: Method) -> list[Answer]: ...


@dataclass
class Evaluation:
    """
    A pair, and how it decodes.

    Args:
        target (`PreTrainedModel`): A model after `cactus_hf.enable`.
        draft (`PreTrainedModel`): Its draft.
        tokenizer (`PreTrainedTokenizerBase`): The target's, padding on the left.
        options (`dict`): Options of `generate()` for every method, `max_new_tokens` among them.
        seed (`int`): With the question's place it makes the seed of each answer.
        with_kl (`bool`): Whether the divergence of the emitted law is measured.
        think_end (`str`): What ends a model's thinking; what stands before it is not scored.
    """

    target: Any
    draft: Any
    tokenizer: Any
    options: dict[str, Any]
    seed: int
    with_kl: bool
    think_end: str

    def groups(self, methods: Sequence[Method]) -> list[list[Method]]:
        """Methods that take turns batch by batch."""
        return [list(methods)]

    def answer(self, task: str, questions: Sequence[Question], method: Method) -> list[Answer]:
        """The answers to a batch of questions."""
        inputs = self.tokenizer(
            [question.prompt for question in questions], return_tensors="pt", padding=True, add_special_tokens=False
        ).to(self.target.device)
        seeds = [seed_of(self.seed, question) for question in questions]
        options = {**inputs, **self.options, **method.options(self.draft)}
        if not method.is_plain:
            options |= {"generator": seeds, "speculation_kl": self.with_kl}
        if stops := list(questions[0].stops):
            options |= {"stop_strings": stops, "tokenizer": self.tokenizer}
        torch.manual_seed(seeds[0])
        with track() as calls:
            output, seconds = timed(lambda: self.target.generate(**options), self.target.device)
        new = output[:, inputs["input_ids"].shape[1] :]
        stats = None if method.is_plain else calls[0]
        lengths = self._lengths(new, stops) if stats is None else stats.emitted.tolist()
        answers = []
        for row, question in enumerate(questions):
            ids = new[row, : lengths[row]].tolist()
            answers.append(
                Answer(
                    task=task,
                    question=question.index,
                    method=method.name,
                    num_assistant_tokens=method.num_drafts,
                    text=scored(self.tokenizer, ids, question.stops, self.think_end),
                    prompt_tokens=int(inputs["attention_mask"][row].sum()),
                    new_tokens=len(ids),
                    is_cut=len(ids) == self.options["max_new_tokens"],
                    seconds=round(seconds / len(questions), 4),
                    batch_rows=len(questions),
                    speculation=None if stats is None else _row(stats, row),
                    prompt_sha256=question.sha256,
                )
            )
        return answers

    def _lengths(self, new: torch.Tensor, stops: Sequence[str]) -> list[int]:
        """Tokens of each row up to the padding behind its end, which may be the pad token itself."""
        pad, ends = self.options["pad_token_id"], self._ends()
        lengths = []
        for ids in new.tolist():
            while len(ids) > 1 and ids[-1] == pad and (pad not in ends or ids[-2] in ends):
                ids.pop()
            lengths.append(len(up_to_stop(self.tokenizer, ids, stops)))
        return lengths

    def _ends(self) -> list[int]:
        ends = self.target.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]


def seed_of(seed: int, question: Question) -> int:
    """The seed of an answer, so that it does not depend on the batch."""
    return seed * 1_000_003 + question.index


def up_to_stop(tokenizer: Any, ids: list[int], stops: Sequence[str]) -> list[int]:
    """Without the tokens behind the one that completes a stop."""

    def has_stop(ids: list[int]) -> bool:
        text = tokenizer.decode(ids)  # a stop may be a special token
        return any(stop in text for stop in stops)

    while stops and len(ids) > 1 and has_stop(ids[:-1]):
        ids = ids[:-1]
    return ids


def scored(tokenizer: Any, ids: Sequence[int], stops: Sequence[str], think_end: str) -> str:
    """The part of an answer that counts: up to a stop, without what the model thinks before it."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    for stop in stops:
        text = text.partition(stop)[0]
    return text.rpartition(think_end)[2].strip() if think_end else text


def _row(stats: SpeculationStats, row: int) -> dict[str, Any]:
    counts = {
        name: int(getattr(stats, name)[row]) for name in ("rounds", "drafted", "verified", "accepted", "emitted")
    }
    sums = {
        name: float(getattr(stats, name)[row])
        for name in ("ball_kl_sum", "emitted_kl_sum", "emitted_tv_sum")
        if getattr(stats, name) is not None
    }
    return {**counts, "accepted_by_position": stats.accepted_by_position[row].tolist(), **sums}


def batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Batches of questions with equal stops, in order."""
    found: list[list[Question]] = []
    for question in questions:
        if not found or len(found[-1]) == size or found[-1][0].stops != question.stops:
            found.append([])
        found[-1].append(question)
    return found


def run(
    evaluation: Backend,
    task: str,
    work: Sequence[Sequence[Question]],
    methods: Sequence[Method],
    records: Records,
    progress: Callable[[str, int], Any],
) -> None:
    """Has every method answer the questions in `work`, batch by batch, but for answers that are there already."""
    for group in evaluation.groups(methods):
        for batch in work:
            for method in group:
                open_questions = [each for each in batch if Key(task, each.index, method) not in records.answers]
                if open_questions:
                    records.add(evaluation.answer(task, open_questions, method))
                progress(method.title, len(batch))


def share(work: Sequence[list[Question]], rank: int, world_size: int) -> Iterator[list[Question]]:
    """The batches of process `rank`."""
    yield from work[rank::world_size]
