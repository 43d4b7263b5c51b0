"""Answers of vLLM to the questions that `running.Evaluation` asks of transformers: equal ids, settings and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..measuring import Counts
from ..vllm_backend import DELTAS, Completion, Engine, Vllm, until_end
from .methods import Method
from .records import Answer
from .running import scored, seed_of, up_to_stop
from .tasks import Question


@dataclass
class VllmEvaluation:
    """
    A pair in vLLM, and how it decodes.

    Args:
        vllm (`Vllm`): The pair.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        sampling (`dict`): Arguments of `vllm.SamplingParams` for every method, `max_tokens` among them.
        seed (`int`): With the question's place it makes the seed of each answer.
        think_end (`str`): What ends a model's thinking; what stands before it is not scored.
    """

    vllm: Vllm
    tokenizer: Any
    sampling: dict[str, Any]
    seed: int
    think_end: str

    def groups(self, methods: Sequence[Method]) -> list[list[Method]]:
        """Methods that share an engine, of which there is one at a time."""
        engines = dict.fromkeys(engine_of(method) for method in methods)
        return [[method for method in methods if engine_of(method) == engine] for engine in engines]

    def answer(self, task: str, questions: Sequence[Question], method: Method) -> list[Answer]:
        """The answers to a batch of questions."""
        self.vllm.start(engine_of(method))
        prompts = [self.tokenizer(each.prompt, add_special_tokens=False)["input_ids"] for each in questions]
        sampling = [
            {**self.sampling, **_delta(method), "seed": seed_of(self.seed, each), "stop": list(each.stops)}
            for each in questions
        ]
        completions, seconds, ball_kl = self.vllm.decode(prompts, sampling)
        answers = []
        for question, prompt, completion in zip(questions, prompts, completions, strict=True):
            # vLLM looks for stops when a round is done
            ids = up_to_stop(self.tokenizer, completion.ids, question.stops)
            answers.append(
                Answer(
                    task=task,
                    question=question.index,
                    method=method.name,
                    num_assistant_tokens=method.num_drafts,
                    text=scored(self.tokenizer, ids, question.stops, self.think_end),
                    prompt_tokens=len(prompt),
                    new_tokens=len(ids),
                    is_cut=len(ids) == self.sampling["max_tokens"],
                    seconds=round(seconds / len(questions), 4),
                    batch_rows=len(questions),
                    speculation=None if method.is_plain else _row(completion, len(ids), method.num_drafts, ball_kl),
                    backend=method.backend,
                    prompt_sha256=question.sha256,
                )
            )
        return answers


def engine_of(method: Method) -> Engine:
    """Lossless sampling and Cactus with any delta share one, in which each request says its delta."""
    if method.is_plain:
        return Engine()
    return Engine(method.num_drafts, DELTAS if _delta(method) else method.name)


def _delta(method: Method) -> dict[str, Any]:
    """The request's own argument."""
    name, _, value = method.name.partition(":")
    if name not in ("sps", "cactus"):
        return {}
    return {"extra_args": {"cactus_delta": float(value or 0)}}


def _row(completion: Completion, num_tokens: int, num_drafts: int | None, ball_kl: float) -> dict[str, Any]:
    """Its counts; the plugin tells the mean ball KL of the batch, and each row gets its share."""
    rounds = until_end(completion.rounds, num_tokens)
    counts = Counts.of_rounds(rounds, num_tokens)
    by_position = [sum(kept > place for _, kept in rounds) for place in range(num_drafts or 0)]
    numbers = {name: getattr(counts, name) for name in ("rounds", "drafted", "verified", "accepted", "emitted")}
    return {**numbers, "accepted_by_position": by_position, "ball_kl_sum": ball_kl * counts.verified}
