"""How often the target would keep the draft's tokens: sum_x min(target_x, draft_x), over the target's own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.inference_mode()
def sample_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    temperature: float = 0.7,
    max_new_tokens: int = 128,
    seed: int = 0,
    batch: int = 16,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[tuple[list[int], list[int]]]:
    """Draws one answer of the target to each prompt, without truncation of its law.

    Returns:
        `list` of (prompt ids, answer ids), the answer with its end-of-sequence token where it has one.
    """
    pairs = []
    torch.manual_seed(seed)
    for first in progress(range(0, len(prompts), batch)):
        rows = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
            for p in prompts[first : first + batch]
        ]
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rows]
        width = max(map(len, rows))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        output = target.generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )[:, width:].tolist()
        for prompt, answer in zip(rows, output, strict=True):
            end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
            pairs.append((prompt, answer[:end]))
    return pairs


class Acceptance(NamedTuple):
    """Position by position, float32 [tokens] each."""

    kept: Tensor  # probability that a drafted token is kept
    ceiling: Tensor  # the target's mass on tokens that the draft can draw at all


@torch.inference_mode()
def acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int], answer: list[int], *, temperature: float
) -> Acceptance:
    """Acceptance of the draft at each position of `answer`, both laws at `temperature` and not truncated."""
    ids = torch.tensor([prompt + answer], device=target.device)
    span = slice(len(prompt) - 1, -1)
    target_law, draft_law = (
        (model(ids, use_cache=False).logits[0, span].float() / temperature).softmax(-1) for model in (target, draft)
    )
    kept = torch.minimum(target_law, draft_law).sum(-1)
    return Acceptance(kept.cpu(), (target_law * (draft_law > 0)).sum(-1).cpu())
