"""Tiny random models, drafts, tokenizers and prompts for the tests: float32 on the CPU, no network.

Dimension letters: B rows, T length, V vocabulary.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from architectures import BOS, EOS, PAD, UNK, VOCAB
from architectures import LOGIT_SCALE as LOGIT_SCALE
from architectures import MAX_POSITIONS as MAX_POSITIONS
from architectures import WINDOW as WINDOW
from architectures import sharpen as sharpen
from architectures import spread as spread
from families import ARCHITECTURES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@cache
def model(name: str, attn_implementation: str | None = None, **options: Any) -> PreTrainedModel:
    """`ARCHITECTURES[name].build(...)`, made once and shared: a test that changes it works on a `copy.deepcopy`."""
    return ARCHITECTURES[name].build(attn_implementation=attn_implementation, **options)


def perturbed(model: PreTrainedModel, eps: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """
    A draft that often agrees with `model`: a copy whose every tensor has noise of `eps` times its own spread added.
    At eps .02, .05, .1, .2 and .3 its greedy choice on the target's text is the target's at about 90, 75, 55, 35 and
    25 % of the positions (mean over the families).
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.data += eps * parameter.detach().std(correction=0) * noise
    return draft


@cache
def pair(
    name: str, attn_implementation: str | None = None, eps: float = 0.05, **options: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and a draft that often agrees with it, made once and shared as in `model`."""
    target = model(name, attn_implementation, **options)
    return target, perturbed(target, eps)


@cache
def vocabulary8(seed: int = 0, logit_scale: float = 1.2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """
    A Llama with 8 tokens for tests of laws. Hardly any token has a probability below .5 % in any context, so that all
    cells of a joint law are reached. Two seeds make a target and a draft; they overlap by about .5.
    """
    return ARCHITECTURES["llama"].build(
        seed=seed, vocab=8, dtype=dtype, logit_scale=logit_scale, hidden_size=16, intermediate_size=32
    )


class Prompts(NamedTuple):
    """Left-padded prompts, as a tokenizer with `padding_side="left"` makes them."""

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64, 0 at pads

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What `generate(**inputs)` takes."""
        return self._asdict()

    def row(self, index: int, num_pads: int = 0) -> Prompts:
        """Prompt `index` alone, behind `num_pads` pads."""
        tokens = self.input_ids[index, self.attention_mask[index].bool()]
        mask = torch.ones_like(tokens)
        return Prompts(*(torch.nn.functional.pad(x, (num_pads, 0), value=PAD)[None] for x in (tokens, mask)))


def ragged_prompts(lengths: tuple[int, ...] = (5, 17, 9, 2), vocab: int = VOCAB, seed: int = 5) -> Prompts:
    """Random prompts of these lengths, left-padded; no special tokens where the vocabulary has room for others."""
    generator = torch.Generator().manual_seed(seed)
    lowest = UNK + 1 if vocab > 8 else 0
    rows = [torch.randint(lowest, vocab, (length,), generator=generator) for length in lengths]
    padded = [torch.nn.functional.pad(row, (max(lengths) - len(row), 0), value=PAD) for row in rows]
    mask = [(torch.arange(max(lengths)) >= max(lengths) - length).long() for length in lengths]
    return Prompts(torch.stack(padded), torch.stack(mask))


def plain_greedy(model: PreTrainedModel, prompts: Prompts, max_new_tokens: int, **options: Any) -> list[Tensor]:
    """Stock greedy continuations of the rows, each generated alone; `options` go to `generate`."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD, **options}
    rows = [prompts.row(index) for index in range(len(prompts.input_ids))]
    return [
        model.generate(**row.inputs, max_new_tokens=max_new_tokens, **options)[0, row.input_ids.shape[1] :]
        for row in rows
    ]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
SPECIAL_IDS = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, "<unk>": UNK}


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def word_tokenizer(vocab: int = VOCAB, rotate: int = 0) -> PreTrainedTokenizerFast:
    """Words "w4", "w5", ... separated by spaces; id i is "w<i>", or with `rotate` another word: another tokenizer."""
    first = UNK + 1
    words = {f"w{(i - first + rotate) % (vocab - first) + first}": i for i in range(first, vocab)}
    tokenizer = Tokenizer(models.WordLevel(SPECIAL_IDS | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, 260 in all: any text makes the round trip, and stop strings can straddle tokens."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=UNK + 1)}
    tokenizer = Tokenizer(models.BPE(vocab=SPECIAL_IDS | letters, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)
