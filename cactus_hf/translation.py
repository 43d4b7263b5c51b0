"""Drafts by a model with another tokenizer, over the tokens that both vocabularies have.

Token-level intersection, after Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies" (arXiv 2502.05202): the draft's law is that over the target's ids to which one of its
own corresponds. What the target writes beyond them the draft reads in pieces. Models and tokenizers stay as they are.

Tokens are compared by the bytes they stand for, written in the alphabet of byte-level vocabularies ("Ġ" is a space).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .sequences import Sequences


ALPHABET = bytes_to_unicode()  # letter of each byte
PIECE_SPACE, BYTE_SPACE = "▁", "Ġ"  # spaces in SentencePiece's vocabularies and in byte-level ones


class Translation:
    """From the target's token ids to the draft's.

    Args:
        tokenizer, draft_tokenizer (`PreTrainedTokenizerBase`): of the target and of the draft.
        draft_size (`int`): ids that the draft model has.
    """

    def __init__(self, tokenizer: Any, draft_tokenizer: Any, draft_size: int):
        self.tokenizer, self.draft_tokenizer, self.draft_size = tokenizer, draft_tokenizer, draft_size
        self.ordinary, self.special = spellings(tokenizer)
        own_ordinary, own_special = spellings(draft_tokenizer)
        self.is_needed = self.ordinary != own_ordinary
        own_ids = {text: i for i, text in own_ordinary.items() if i < draft_size}
        self.own_ids, self.longest = own_ids, max(map(len, own_ids), default=0)
        # The draft's id of each of the target's that has one
        self.ids = {i: own for i, text in self.ordinary.items() if (own := own_ids.get(text)) is not None}
        self.has_common_tokens = bool(self.ids)  # other than special ones
        special_ids = {text: i for i, text in own_special.items() if i < draft_size}
        self.ids |= {i: special_ids[text] for i, text in self.special.items() if text in special_ids}
        end, own_end = tokenizer.eos_token_id, draft_tokenizer.eos_token_id
        if end is not None and own_end is not None and own_end < draft_size:
            self.ids.setdefault(end, own_end)
        # Of several that the draft reads alike, the last alone is drafted, or they would share its probability
        self.drafted = {own: i for i, own in self.ids.items()}.values()
        self.pieces: dict[int, list[int]] = {}

    def tables(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """The draft's id of each of `vocab_size` ids of the target, 0 where it has none; and which it can draft."""
        own_ids, is_drafted = torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.bool)
        ids, drafted = torch.tensor(list(self.ids)), torch.tensor(list(self.drafted))
        is_within = ids < vocab_size  # a tokenizer may have more than the model
        own_ids[ids[is_within]] = torch.tensor(list(self.ids.values()))[is_within]
        is_drafted[drafted[drafted < vocab_size]] = True
        return own_ids, is_drafted

    def read_token(self, token: int) -> list[int]:
        """The draft's ids for one of the target's: several where it has the text in pieces, none if not at all."""
        if token in self.ids:
            return [self.ids[token]]
        if token not in self.pieces:
            self.pieces[token] = self._cut(self.ordinary.get(token, ""))
        return self.pieces[token]

    def _cut(self, text: str) -> list[int]:
        ids, begin = [], 0
        while begin < len(text):
            ends = range(min(len(text), begin + self.longest), begin, -1)
            end = next((end for end in ends if text[begin:end] in self.own_ids), None)
            if end is not None:
                ids.append(self.own_ids[text[begin:end]])
            begin = begin + 1 if end is None else end
        return ids

    def read_prompt(self, tokens: list[int]) -> list[int]:
        """The draft's ids for a prompt, as its own tokenizer makes them from the text.

        Special tokens that the draft lacks, such as another model's marks of turns, are left out; the end of a turn is
        read as the draft's own, and the beginning is marked as the draft is used to.
        """
        bos = self.draft_tokenizer.bos_token_id
        begins = bos is not None and self.draft_tokenizer("")["input_ids"][:1] == [bos]
        ids = [bos] if begins else []
        for is_special, group in itertools.groupby(tokens, lambda token: token in self.special):
            if is_special:
                ids += [own for own in map(self.ids.get, group) if own is not None and [own] != ids]
            else:
                text = self.tokenizer.decode(list(group), clean_up_tokenization_spaces=False)
                ids += self.draft_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids = [own for own in ids if own < self.draft_size]
        return ids or [next((own for own in (bos, self.draft_tokenizer.eos_token_id) if own is not None), 0)]


class TranslatedText:
    """The text as a draft with another tokenizer reads it: a `DraftText`.

    Args:
        translation (`Translation`): of the two tokenizers.
        sequences (`Sequences`): the prompts.
        vocab_size (`int`): the target's V.
        device (`torch.device`): the draft's.
    """

    def __init__(self, translation: Translation, sequences: Sequences, vocab_size: int, device: torch.device):
        self.translation, self.device = translation, device
        self.own_ids, self.is_drafted = (x.to(sequences.tokens.device) for x in translation.tables(vocab_size))
        self.ids: dict[int, list[int]] = {}  # of each row of R
        self.num_columns: dict[int, int] = {}  # of the target's text that were translated
        for row in sequences.rows.tolist():
            begin, end = int(sequences.padding[row]), int(sequences.length[row])
            self.ids[row] = translation.read_prompt(sequences.text[row, begin:end].tolist())
            self.num_columns[row] = end

    def follow(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        lengths, met = [], []
        for row in sequences.rows.tolist():
            ids, end = self.ids[row], int(sequences.length[row])
            new = sequences.text[row, self.num_columns[row] : end].tolist()
            # All but the last were drafts, which the draft has read, unless a processor forced what it lacks
            kept = itertools.takewhile(self.translation.ids.__contains__, new[:-1])
            met.append(len(ids) + sum(1 for _ in kept))
            ids.extend(itertools.chain.from_iterable(map(self.translation.read_token, new)))
            self.num_columns[row] = end
            lengths.append(len(ids))
        return torch.tensor(lengths), torch.tensor(met)

    def read(self, sequences: Sequences, first: Tensor, count: int) -> Tensor:
        block = torch.zeros(len(first), count, dtype=torch.long)
        for line, row, start in zip(block, sequences.rows.tolist(), first.tolist(), strict=True):
            ids = self.ids[row][max(start, 0) : start + count]
            outside = max(-start, 0)
            line[outside : outside + len(ids)] = torch.tensor(ids, dtype=torch.long)
        return block.to(self.device)

    def read_drafts(self, tokens: Tensor) -> Tensor:
        return self.own_ids[tokens].to(self.device)

    def over_target(self, logits: Tensor) -> Tensor:
        return logits[..., self.own_ids].masked_fill_(~self.is_drafted, -torch.inf)


def spellings(tokenizer: Any) -> tuple[dict[int, str], dict[int, str]]:
    """What the ordinary ids of a tokenizer stand for, as bytes in the alphabet of byte-level vocabularies; and the
    names of its special tokens. Where two ids stand for the same, the plainer one comes last.
    """
    vocabulary = dict(tokenizer.get_vocab())
    try:
        special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    except NotImplementedError as error:  # mistral-common's
        raise ValueError(
            f"A draft with another tokenizer needs tokenizers that tell their special tokens, which a "
            f"{type(tokenizer).__name__} does not: load one of transformers' own classes, such as `LlamaTokenizer`."
        ) from error
    special_ids.update(tokenizer.all_special_ids)
    named = tokenizer.get_added_vocab() | {tokenizer.convert_ids_to_tokens(i): i for i in special_ids}
    added = {text: vocabulary.pop(text, i) for text, i in named.items()}
    special = {i: text for text, i in added.items() if i in special_ids}
    ordinary = _in_bytes({text: i for text, i in added.items() if i not in special_ids})
    if PIECE_SPACE in vocabulary:
        for byte, letter in ALPHABET.items():
            if (i := vocabulary.pop(f"<0x{byte:02X}>", None)) is not None:
                ordinary[i] = letter
        ordinary |= _in_bytes({text.replace(PIECE_SPACE, " "): i for text, i in vocabulary.items()})
    elif BYTE_SPACE in vocabulary:
        ordinary |= {i: text for text, i in vocabulary.items()}
    else:
        ordinary |= _in_bytes(vocabulary)
    return ordinary, special


def _in_bytes(vocabulary: dict[str, int]) -> dict[int, str]:
    """The UTF-8 bytes of texts, each written as the letter that byte-level vocabularies have for it."""
    whole = "\0".join(text.replace("\0", "") for text in vocabulary)  # one string, as there are many
    letters = whole.encode().decode("latin-1").translate(ALPHABET | {0: "\0"})
    return dict(zip(vocabulary.values(), letters.split("\0"), strict=True)) if vocabulary else {}
