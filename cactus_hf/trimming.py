"""Drafts with a smaller vocabulary: an output layer over the kept ids alone.

Of a small model's work the output layer is a large share, most of it for ids that it hardly ever draws. Which ids a
draft may draw is free: speculative sampling only needs the law that the tokens were drawn from, which here is the
model's own, over the kept ids.

Letters: K kept ids, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .parameters import is_integer
from .wrappers import unwrapped


Model = TypeVar("Model", bound=nn.Module)
MASKED = ("chameleon",)  # model types that change logits of certain ids behind the output layer
TEXTS_AT_ONCE = 256  # that a tokenizer reads


def trim_draft(
    draft: Model,
    token_ids: Iterable[int] | Tensor | Iterable[str],
    *,
    tokenizer: Any = None,
    num_tokens: int | None = None,
) -> Model:
    """
    A copy of a draft that computes logits for some token ids only, and draws no others.

    Its law is the draft's own over the kept ids, made to sum to 1. It is used as any other draft, and its logits cover
    the whole vocabulary, with `-inf` for the ids that were left out. `draft` is left as it is; of its weights the kept
    rows of the output layer are copied, and all others shared.

    Args:
        draft (`PreTrainedModel`):
            The model; a wrapper such as PEFT's may be around it.
        token_ids (list of `int` or `torch.Tensor` of shape [K], or iterable of `str`):
            The ids to keep, or texts of the kind to be written, of which the most frequent are kept.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The draft's own, for texts.
        num_tokens (`int`, *optional*):
            K, for texts: how many of the most frequent ids to keep, special ids, which mark the ends of texts and
            turns, before all others. Fewer are kept if fewer occur.

    Returns:
        The copy, with `kept_ids`, int64 [K] in ascending order. It cannot be saved; the ids can.

    Raises:
        ValueError: for ids that are not in the vocabulary or given twice, no ids, and drafts whose output layer is no
            ordinary one.
        TypeError: for anything else than ids or texts, and a draft that is no model.
    """
    inner = unwrapped(draft, PreTrainedModel)
    head = _checked_head(inner)
    kept_ids = _kept_ids(token_ids, tokenizer, num_tokens, inner, head.out_features)
    # New parameters over the same numbers, so that either model can be moved or cast without the other
    shared = {id(each): _same_numbers(each) for each in (*draft.parameters(), *draft.buffers())}
    trimmed = copy.deepcopy(draft, shared)
    own = unwrapped(trimmed, PreTrainedModel)
    cut_head(own, head.weight, head.bias, kept_ids)
    if hasattr(own, "final_logits_bias"):
        own.final_logits_bias = own.final_logits_bias[:, kept_ids.to(own.final_logits_bias.device)]
    return trimmed


def cut_head(model: PreTrainedModel, weight: Tensor, bias: Tensor | None, kept_ids: Tensor) -> None:
    """Give a model an output layer of its own over `kept_ids` [K], from `weight` [V, hidden] and `bias` [V]."""
    kept_ids = kept_ids.to(weight.device)
    head = nn.Linear(weight.shape[1], len(kept_ids), bias is not None, device="meta")
    head.weight = nn.Parameter(weight.detach()[kept_ids], requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias.detach()[kept_ids], requires_grad=False)
    model.set_output_embeddings(head.train(model.training))
    model.register_buffer("kept_ids", kept_ids, persistent=False)
    model.trimmed_size = len(weight)
    # Behind what the model does to its logits: a softcap would make a finite number of -inf
    model.register_forward_hook(over_vocabulary)
    model.save_pretrained = refuse_to_save


def over_vocabulary(model: Any, args: Any, output: Any) -> Any:
    """A forward hook: logits [..., K] of a model with a cut head as logits [..., V], `-inf` for the other ids."""
    is_tuple = isinstance(output, tuple)
    logits = output[0] if is_tuple else output.logits
    if logits.shape[-1] != len(model.kept_ids):
        raise ValueError(
            f"{type(model).__name__}, a trimmed draft, returns {logits.shape[-1]} logits a token where its output "
            f"layer has {len(model.kept_ids)}: models that compute logits in another way cannot be trimmed."
        )
    full = logits.new_full((*logits.shape[:-1], model.trimmed_size), -torch.inf)
    full.index_copy_(-1, model.kept_ids.to(logits.device), logits)
    if is_tuple:
        return full, *output[1:]
    output.logits = full
    return output


def refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "A draft with a cut output layer cannot be saved as a model of its class: save the model that it was made of, "
        "and its `kept_ids`; after loading, call `cactus_hf.trim_draft` again."
    )


def most_frequent(texts: Iterable[str], tokenizer: Any, num_tokens: int, always: set[int], vocab_size: int) -> Tensor:
    """The `num_tokens` ids that `tokenizer` makes most often of `texts`, of equals the lowest; `always` come first.

    Other ids that do not occur are left out.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    texts = iter(texts)
    while batch := list(itertools.islice(texts, TEXTS_AT_ONCE)):
        if wrong := next((text for text in batch if not isinstance(text, str)), None):
            raise TypeError(f"`token_ids` must be ids or texts, got {wrong!r} among texts.")
        for ids in tokenizer(batch, verbose=False)["input_ids"]:
            counts += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)[:vocab_size]
    counts[list(always)] = torch.iinfo(torch.long).max
    ranked = counts.argsort(descending=True, stable=True)[:num_tokens]
    return ranked[counts[ranked] > 0]


def _same_numbers(tensor: Tensor) -> Tensor:
    # Classes of their own, as quantised weights have, are taken as they are
    return nn.Parameter(tensor.detach(), tensor.requires_grad) if type(tensor) is nn.Parameter else tensor


def _checked_head(model: PreTrainedModel) -> nn.Linear:
    name, head = type(model).__name__, model.get_output_embeddings()
    if hasattr(model, "kept_ids"):
        raise ValueError(f"The draft, {name}, is trimmed already: trim the model that it was made of.")
    if model.config.model_type in MASKED:
        raise ValueError(
            f"{name} changes the logits of certain ids, which a trimmed draft does not have: take it whole."
        )
    if type(head) is not nn.Linear:
        raise ValueError(
            f"The output layer of the draft, {name}, is of class {type(head).__name__} where an ordinary `nn.Linear` "
            "is needed: trim a draft before it is packed, quantised or given an adapter there."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"Weights of the draft, {name}, are offloaded (on the meta device): load it without.")
    return head


def _kept_ids(token_ids: Any, tokenizer: Any, num_tokens: Any, model: PreTrainedModel, vocab_size: int) -> Tensor:
    """Checked and in ascending order."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
        raise TypeError(f"`token_ids` must be a list or tensor of ids, or an iterable of texts, got {token_ids!r}.")
    items = iter(token_ids.tolist() if isinstance(token_ids, Tensor) and token_ids.dim() == 1 else token_ids)
    first = next(items, None)
    if first is None:
        raise ValueError("`token_ids` is empty: give the ids to keep, or texts to take them from.")
    items = itertools.chain([first], items)
    if isinstance(first, str):
        if tokenizer is None or not is_integer(num_tokens) or num_tokens < 1:
            raise ValueError(
                f"Texts need `tokenizer=`, the draft's, and `num_tokens=`, how many ids to keep (at least 1, got "
                f"{num_tokens!r})."
            )
        always = {i for i in {*tokenizer.all_special_ids, *_ends(model)} if i < vocab_size}
        if num_tokens < len(always):
            raise ValueError(f"`num_tokens={num_tokens}` is less than the {len(always)} special ids.")
        return most_frequent(items, tokenizer, num_tokens, always, vocab_size).sort().values
    if tokenizer is not None or num_tokens is not None:
        raise ValueError("`tokenizer` and `num_tokens` are for texts: leave them out with ids.")
    ids = list(items)
    if wrong := [each for each in ids if not is_integer(each)]:
        raise TypeError(f"`token_ids` must be whole numbers, in one dimension, got {wrong[0]!r}.")
    if outside := [each for each in ids if not 0 <= each < vocab_size]:
        raise ValueError(f"Token {outside[0]} is not among the {vocab_size} ids of the draft, {type(model).__name__}.")
    kept = torch.tensor(sorted(set(ids)))
    if len(kept) < len(ids):
        raise ValueError(f"`token_ids` has ids more than once: {len(ids)} given, {len(kept)} different ones.")
    return kept


def _ends(model: PreTrainedModel) -> list[int]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    return [] if ends is None else ends if isinstance(ends, list) else [ends]
