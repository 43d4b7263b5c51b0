"""How often the target would keep the draft's tokens: the mean of sum_x min(target_x, draft_x) over the target's own answers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.inference_mode()
def sample_answers(
    target: PreTrainedModel,
    tokenizer,
    prompts: list[str],
    *,
    temperature: float = 0.7,
    max_new_tokens: int = 128,
    seed: int = 0,
    batch: int = 16,
    progress=lambda x: x,
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
        for prompt, answer in zip(rows, output):
            end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
            pairs.append((prompt, answer[:end]))
    return pairs


@torch.inference_mode()
def acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int], answer: list[int], temperature: float
) -> Tensor:
    """Acceptance probability of a drafted token at each position of `answer` (float32 [tokens])."""
    ids = torch.tensor([prompt + answer], device=target.device)
    span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    laws = [(model(ids, use_cache=False).logits[0, span].float() / temperature).softmax(-1) for model in (target, draft)]
    return torch.minimum(*laws).sum(-1).cpu()


@torch.inference_mode()
def coverage(target: PreTrainedModel, draft: PreTrainedModel, answers: list[tuple[list[int], list[int]]], temperature: float) -> float:
    """Mean target mass on the ids the draft can draw at all, which bounds its acceptance."""
    kept, total, count = draft.lm_head.kept_ids, 0.0, 0
    for prompt, answer in answers:
        ids = torch.tensor([prompt + answer], device=target.device)
        logits = target(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
        total += float(logits.softmax(-1)[:, kept].sum())
        count += len(answer)
    return total / count
