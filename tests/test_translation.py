"""Two tokenizers: what corresponds to what, and what a draft reads of the target's text."""

from __future__ import annotations

import copy

import pytest
import torch
from test_drafting import Successor
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import tiny
from cactus_hf.reading import Reader
from cactus_hf.sequences import Sequences
from cactus_hf.translation import TranslatedText, Translation, spellings


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def fast(model, pre_tokenizer=None, decoder=None, **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def byte_bpe(merges: str, **special: str) -> PreTrainedTokenizerFast:
    """Byte-level: the bytes, and the results of `merges` such as "t h"."""
    pairs = [tuple(merge.split()) for merge in merges.split(", ")]
    vocab = {token: i for i, token in enumerate(BYTES + ["".join(pair) for pair in pairs])}
    return fast(
        models.BPE(vocab=vocab, merges=pairs), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(),
        **special,
    )  # fmt: skip


def pieces(*tokens: str, **special: str) -> PreTrainedTokenizerFast:
    """In SentencePiece's manner: bytes for what is missing, "▁" for a space."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [(token, -10.0 - len(names) + i) for i, token in enumerate(["<unk>", *names, "▁", *tokens])]
    model = models.Unigram(scores, unk_id=0, byte_fallback=True)
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast(
        model, pre_tokenizers.Metaspace(prepend_scheme="never", split=False), decoder, unk_token="<unk>", **special
    )


def words(*tokens: str, unknown: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    model = models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=unknown or tokens[0])
    return fast(model, pre_tokenizers.WhitespaceSplit(), **special)


def named(translation: Translation) -> dict[str, str]:
    """The ids of a translation as tokens."""
    to_tokens = translation.tokenizer.convert_ids_to_tokens
    return {to_tokens(i): translation.draft_tokenizer.convert_ids_to_tokens(own) for i, own in translation.ids.items()}


class TestCorrespondence:
    def test_same_strings(self):
        pairs = named(Translation(words("a", "b", "ab"), words("x", "ab", "a"), 3))
        assert pairs == {"a": "a", "ab": "ab"}

    def test_spaces_and_letters_beyond_ascii(self):
        """ "é" is two bytes: one token of either vocabulary stands for both."""
        byte, piece = byte_bpe("Ġ t, Ġt h, Ã ©"), pieces("▁th", "é", "th", "<", "a")
        for pairs in (
            named(Translation(byte, piece, 999)),
            {b: a for a, b in named(Translation(piece, byte, 999)).items()},
        ):
            assert pairs["Ġth"] == "▁th" and pairs["Ã©"] == "é" and pairs["Ġ"] == "▁" and pairs["<"] == "<"
            assert "th" not in pairs and "th" not in pairs.values()
        assert named(Translation(byte, piece, 999))["Ã"] == "<0xC3>"

    def test_the_plainer_of_two_ids_for_the_same(self):
        """SentencePiece has "a" and the byte of "a"."""
        byte, piece = byte_bpe("t h"), pieces("a")
        assert named(Translation(byte, piece, 999))["a"] == "a"
        pairs = named(Translation(piece, byte, 999))
        assert pairs["a"] == pairs["<0x61>"] == "a"
        a, byte_a = piece.convert_tokens_to_ids(["a", "<0x61>"])
        is_drafted = Translation(piece, byte, 999).tables(999)[1]
        assert is_drafted[a] and not is_drafted[byte_a], "the two do not share the probability of one"

    def test_added_tokens(self):
        """Ordinary ones stand for their text, special ones for themselves."""
        byte = byte_bpe("Ġ Ġ")
        other = byte_bpe("t h")
        other.add_tokens(["  ", "é!"])
        other.add_tokens([AddedToken("<turn>", special=True), AddedToken("th", special=True)])
        pairs = named(Translation(other, byte, 999))
        assert pairs["  "] == "ĠĠ" and "é!" not in pairs and "<turn>" not in pairs
        byte.add_tokens([AddedToken("<turn>", special=True)])
        pairs = named(Translation(other, byte, 999))
        assert pairs["<turn>"] == "<turn>"

    def test_special_tokens_correspond_by_name_and_the_end_by_its_role(self):
        one = byte_bpe("t h", bos_token="<s>", eos_token="<end>", pad_token="<pad>")
        other = byte_bpe("t e", bos_token="<begin>", eos_token="</s>", pad_token="<end>")
        assert named(Translation(one, other, 999))["<end>"] == "<end>"
        pairs = named(Translation(other, one, 999))
        assert pairs["</s>"] == pairs["<end>"] == "<end>" and "<begin>" not in pairs
        assert "<pad>" not in named(Translation(one, other, 999))
        end, pad = other.convert_tokens_to_ids(["</s>", "<end>"])
        is_drafted = Translation(other, one, 999).tables(999)[1]
        assert is_drafted[end] and not is_drafted[pad], "what ends the draft's text ends the target's"

    def test_tokenizers_that_do_not_tell_their_special_tokens(self):
        class Silent:
            def get_vocab(self):
                return {}

            @property
            def added_tokens_decoder(self):
                raise NotImplementedError

        with pytest.raises(ValueError, match="special tokens, which a Silent does not: load one of transformers' own"):
            Translation(byte_bpe("t h"), Silent(), 999)

    def test_ids_that_a_model_has_not(self):
        translation = Translation(words("a", "b", "c"), words("c", "b", "a", "d"), 2)
        assert named(translation) == {"b": "b", "c": "c"}
        no, yes = False, True
        assert [table.tolist() for table in translation.tables(5)] == [[0, 1, 0, 0, 0], [no, yes, yes, no, no]]
        assert [table.tolist() for table in translation.tables(2)] == [[0, 1], [no, yes]]

    def test_whether_it_is_needed(self):
        one = byte_bpe("t h, t e", eos_token="<end>")
        assert not Translation(one, copy.deepcopy(one), 999).is_needed
        assert not Translation(one, byte_bpe("t h, t e", eos_token="</s>"), 999).is_needed
        assert Translation(one, byte_bpe("t e, t h", eos_token="<end>"), 999).is_needed

    def test_nothing_in_common(self):
        translation = Translation(words("a", "b", eos_token="<end>"), words("c", "d", eos_token="<end>"), 3)
        assert translation.is_needed and not translation.has_common_tokens

    def test_spellings_of_any_bytes(self):
        ordinary, special = spellings(tiny.byte_tokenizer())
        assert len(ordinary) == 256 and set(special.values()) == set(tiny.SPECIAL_IDS)


class TestReading:
    def test_tokens_that_the_draft_has_in_pieces(self):
        target = byte_bpe("t h, th e, Ġ the, ð Ł, ĺ Ģ, Ã ©")
        translation = Translation(target, byte_bpe("t h, h e"), 999)
        ids = dict(target.get_vocab())
        own = translation.draft_tokenizer.convert_tokens_to_ids

        def read(token: str) -> list[int]:
            return translation.read_token(ids[token])

        assert read("th") == own(["th"]) and read("Ġthe") == own(["Ġ", "th", "e"])
        assert read("ðŁ") == own(["ð", "Ł"]), "half a character"
        piece = Translation(target, pieces("▁th", "e", "é"), 999)
        assert piece.draft_tokenizer.convert_ids_to_tokens(piece.read_token(ids["Ġthe"])) == ["▁th", "e"]
        assert piece.draft_tokenizer.convert_ids_to_tokens(piece.read_token(ids["ðŁ"])) == ["<0xF0>", "<0x9F>"]

    def test_tokens_that_the_draft_has_not_at_all(self):
        target = words("a", "b", "?", eos_token="<end>")
        translation = Translation(target, words("a", "c"), 2)
        assert [translation.read_token(token) for token in (0, 1, 2, 3, 77)] == [[0], [], [], [], []]

    def test_prompts_are_read_as_text(self):
        target, draft = byte_bpe("t h, th e"), byte_bpe("h e, Ġ t", bos_token="<s>")
        tokens = target("the the é😀")["input_ids"]
        assert Translation(target, draft, 999).read_prompt(tokens) == draft("the the é😀")["input_ids"]

    def test_special_tokens_in_prompts(self):
        target = byte_bpe("t h", bos_token="<s>", eos_token="<end>")
        target.add_tokens([AddedToken("<turn>", special=True), AddedToken("<think>", special=False)])
        draft = byte_bpe("t e", bos_token="<begin>", eos_token="<end>")
        tokens = target("<s><turn>the<end><think>a")["input_ids"]
        translation = Translation(target, draft, 999)
        assert translation.read_prompt(tokens) == draft("the<end><think>a")["input_ids"]

    def test_a_draft_that_is_used_to_a_beginning(self):
        target, draft = byte_bpe("t h", bos_token="<begin>"), byte_bpe("t e", bos_token="<begin>")
        begin = draft.bos_token_id
        draft.backend_tokenizer.post_processor = TemplateProcessing("<begin> $A", special_tokens=[("<begin>", begin)])
        translation = Translation(target, draft, 999)
        the = draft("the", add_special_tokens=False)["input_ids"]
        assert translation.read_prompt(target("the")["input_ids"]) == [begin, *the]
        assert translation.read_prompt(target("<begin>the")["input_ids"]) == [begin, *the], "one beginning only"

    def test_a_prompt_of_which_nothing_is_left(self):
        target = byte_bpe("t h", eos_token="<turn>")
        for draft, first in ((byte_bpe("t e", bos_token="<s>"), 257), (byte_bpe("t e"), 0)):
            assert Translation(target, draft, 999).read_prompt([target.eos_token_id] * 2) == [first]

    def test_rows_grow_at_their_own_speed(self):
        target, draft = words("a", "b", "ab", "?"), words("b", "a", "x")
        tokens = torch.tensor([[3, 0, 1], [2, 2, 0]])  # the first is padding
        rows = Sequences(tokens, torch.tensor([1, 0]), 20, 0)
        text = TranslatedText(Translation(target, draft, 3), rows, 6, torch.device("cpu"))
        x = draft.convert_tokens_to_ids("b")  # stands for what its tokenizer does not know
        assert [each.tolist() for each in text.follow(rows)] == [[2, 3], [2, 3]]
        assert text.read(rows, torch.tensor([0, 0]), 3).tolist() == [[1, 0, 0], [x, x, 1]]
        assert text.read(rows, torch.tensor([-1, 0]), 3).tolist() == [[0, 1, 0], [x, x, 1]]
        block = torch.tensor([[1, 0, 2], [3, 0, 0]])
        rows.write(0, block)
        rows.commit(block, torch.tensor([3, 1]))
        assert [each.tolist() for each in text.follow(rows)] == [[6, 3], [4, 3]], "two of the new tokens were drafts"
        assert text.read(rows, torch.tensor([2, 2]), 4).tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
        rows.keep(torch.tensor([1]))
        block = torch.tensor([[2, 3, 1]])  # the first of them forced by a processor, as the draft lacks it
        rows.write(0, block)
        rows.commit(block, torch.tensor([3]))
        assert [each.tolist() for each in text.follow(rows)] == [[6], [3]]

    def test_a_row_shorter_than_what_another_has_to_read(self):
        """It reads on behind its end, where drafts go next, and never at a position before its beginning."""
        target, draft = words("a", "b", "abba"), words("b", "a")
        rows = Sequences(torch.tensor([[0], [1]]), torch.tensor([0, 0]), 20, 0)
        text = TranslatedText(Translation(target, draft, 2), rows, 6, torch.device("cpu"))
        model = Successor(vocab=2)
        reader = Reader(model.prefill, text, rows)
        rows.write(0, torch.tensor([[2], [0]]))
        rows.commit(torch.tensor([[2], [0]]), torch.tensor([1, 1]))
        logits = reader.begin(rows, torch.tensor([2, 2]))
        assert model.fed == [([[1, 0, 0, 1], [0, 1, 0, 0]], [1, 0])]
        assert logits.argmax(-1).tolist() == [0, 0], "what follows the last id of each row"
        reader.go_on(torch.tensor([[0], [0]]))
        assert model.fed[1] == ([[1], [1]], [5, 2])

    def test_laws_over_the_targets_ids(self):
        rows = Sequences(torch.tensor([[0]]), torch.tensor([0]), 20, 0)
        text = TranslatedText(Translation(words("a", "b", "c"), words("c", "x", "a"), 3), rows, 5, torch.device("cpu"))
        logits = text.over_target(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        assert logits.tolist() == [[3.0, -torch.inf, 1.0, -torch.inf, -torch.inf]]
        assert text.read_drafts(torch.tensor([[0], [2], [4]])).tolist() == [[2], [0], [0]]
