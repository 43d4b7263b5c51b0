"""The prompts that all methods answer: a file's, or those here, of unequal lengths; and batches of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Prompt
from ..json_lines import read_lines


BUILT_IN: tuple[Prompt, ...] = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and say what it costs in time and in memory.",
    "List three uses of a paper clip.",
    "A train leaves at ten past nine and travels 84 kilometres at 56 kilometres an hour. It waits six minutes at a "
    "signal on the way, and passengers then need four minutes to leave the station. When does the last of them stand "
    "in the street? Show each step of the calculation, and check the result in a second way.",
    "Translate into French: the desert is quiet at night.",
    "Summarise this in one sentence. The saguaro grows in the Sonoran Desert. It stores water in its ribbed stem, "
    "which swells after rain and shrinks in a drought. A young plant grows a few millimetres a year in the shade of a "
    "nurse tree, and it may take seventy years before the first arm appears. Its flowers open at night and close in "
    "the afternoon; bats, doves and bees carry the pollen. Woodpeckers dig their nests into the stem, and owls move "
    "in when they leave. The fruit ripens shortly before the summer rains, so that the seeds fall on wet soil.",
    "Name the planets in order of size, smallest first.",
    "Write a short letter to a neighbour whose dog barks at night. Be kind, and propose something that both sides can "
    "do about it.",
)


class Batch(NamedTuple):
    """Left-padded prompts of B rows."""

    input_ids: Tensor  # [B, P] int64
    attention_mask: Tensor  # [B, P] int64, 0 at pads

    def rows(self) -> list[Batch]:
        """Each row alone and without its padding."""
        kept = zip(self.input_ids, self.attention_mask.bool(), strict=True)
        return [Batch(ids[mask][None], mask[mask][None].long()) for ids, mask in kept]


def read_prompts(path: str) -> list[Prompt]:
    """
    The prompts of a file of JSON lines, each an object with `"prompt"`: a text, or a list of messages with `"role"`
    and `"content"`. Other entries, and empty lines, are left aside.

    Raises:
        ValueError: for a line that is not so, with its number, and for a file without prompts or no text.
        OSError: if it cannot be read.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            prompts.append(_parse(line, f"{path}, line {number}"))
    if not prompts:
        raise ValueError(f'{path} holds no prompts: give one JSON object a line, with "prompt".')
    return prompts


def _parse(line: str, place: str) -> Prompt:
    need = 'one JSON object a line, with "prompt": a text, or messages with "role" and "content"'
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place} is no prompt ({type(error).__name__}: {error}). Needed: {need}.") from error
    is_chat = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn for turn in prompt)
    )
    if not (is_chat or (isinstance(prompt, str) and prompt)):
        raise ValueError(f"{place} has the prompt {prompt!r}. Needed: {need}.")
    return prompt


def stretch(prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """Each prompt followed by the others, again and again, and cut to `length` ids."""
    rows = []
    for index in range(len(prompts)):
        ids: list[int] = []
        while len(ids) < length:
            for prompt in (*prompts[index:], *prompts[:index]):
                ids += prompt
        rows.append(ids[:length])
    return rows


def random_prompts(vocab_size: int, seed: int) -> list[list[int]]:
    """Ids without a meaning, as many and as long as the built-in prompts in words, for models without a tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(str(prompt).split()) for prompt in BUILT_IN]
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def batches(prompts: Sequence[list[int]], batch_size: int, pad_token_id: int, device: torch.device) -> list[Batch]:
    """All prompts in batches of `batch_size` rows; the first of them again where the last batch has room."""
    num_batches = -(-len(prompts) // batch_size)
    cyclic = [prompts[index % len(prompts)] for index in range(num_batches * batch_size)]
    return [_padded(cyclic[i : i + batch_size], pad_token_id, device) for i in range(0, len(cyclic), batch_size)]


def _padded(rows: Sequence[list[int]], pad_token_id: int, device: torch.device) -> Batch:
    width = max(map(len, rows))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Batch(ids.to(device), mask.to(device))
