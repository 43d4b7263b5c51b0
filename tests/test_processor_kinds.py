"""Every logits processor of the installed transformers is sorted, and does what its place says."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process

from cactus_hf import processor_kinds


LISTS = (processor_kinds.CONTEXT_FREE, processor_kinds.PREFIX_ONLY, processor_kinds.FOR_OTHER_MODELS)
# Tested in test_remembering.py
REMEMBERING = {"SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"}
CLASSES = {
    name
    for name, cls in inspect.getmembers(logits_process, inspect.isclass)
    if cls.__module__ == logits_process.__name__ and issubclass(cls, logits_process.LogitsProcessor)
} - {"LogitsProcessor"}
END = torch.tensor([1])
WHISPER = GenerationConfig(eos_token_id=1)
WHISPER.no_timestamps_token_id = 5
ARGUMENTS = {
    "AlternatingCodebooksLogitsProcessor": (2, 4, 4),
    "BarkEosPrioritizerLogitsProcessor": (END, 0.02),
    "EncoderNoRepeatNGramLogitsProcessor": (2, torch.tensor([[5, 6, 7], [8, 9, 8]])),
    "EncoderRepetitionPenaltyLogitsProcessor": (1.5, torch.tensor([[5, 6, 7], [8, 9, 8]])),
    "EpsilonLogitsWarper": (0.05,),
    "EtaLogitsWarper": (0.05,),
    "ExponentialDecayLengthPenalty": ((1, 1.5), END, 2),
    "ForcedBOSTokenLogitsProcessor": (3,),
    "ForcedEOSTokenLogitsProcessor": (6, END),
    "InfNanRemoveLogitsProcessor": (),
    "LogitNormalization": (),
    "MinLengthLogitsProcessor": (6, END),
    "MinNewTokensLengthLogitsProcessor": (3, 3, END),
    "MinPLogitsWarper": (0.5,),
    "NoBadWordsLogitsProcessor": ([[3], [4, 5]], END),
    "NoRepeatNGramLogitsProcessor": (2,),
    "PrefixConstrainedLogitsProcessor": (lambda row, text: [int(text[-1]), 3], 1),
    "RepetitionPenaltyLogitsProcessor": (1.5,),
    "SequenceBiasLogitsProcessor": ([[[3], 2.0], [[4, 5], 3.0]],),
    "SuppressTokensAtBeginLogitsProcessor": ([3], 3),
    "SuppressTokensLogitsProcessor": ([3],),
    "TemperatureLogitsWarper": (0.5,),
    "TopHLogitsWarper": (0.5,),
    "TopKLogitsWarper": (3,),
    "TopPLogitsWarper": (0.5,),
    "TypicalLogitsWarper": (0.5,),
    "WatermarkLogitsProcessor": (12, "cpu"),
    "WhisperNoSpeechDetection": (3, 1),
    "WhisperTimeStampLogitsProcessor": (WHISPER, 2),
}


def test_every_class_is_in_one_place():
    """A release of transformers that adds a class fails here: list it in `processor_kinds.py`, or above."""
    listed = [name for names in (*LISTS, REMEMBERING) for name in names]
    assert sorted(set(listed)) == sorted(listed)
    assert CLASSES <= set(listed)


def make(name: str):
    return getattr(logits_process, name)(*ARGUMENTS[name])


@pytest.mark.parametrize("name", sorted(processor_kinds.CONTEXT_FREE & CLASSES))
def test_context_free_ones_look_at_the_scores_of_one_row(name):
    scores = 3 * torch.randn(6, 12)
    together = make(name)(torch.tensor([[5, 6, 7]]), scores.clone())
    alone = [make(name)(torch.tensor([[8, 9, 3, 4]]), row[None].clone()) for row in scores]
    torch.testing.assert_close(together, torch.cat(alone))
    assert not torch.equal(together, scores) or name == "InfNanRemoveLogitsProcessor"


@pytest.mark.parametrize("name", sorted(processor_kinds.PREFIX_ONLY & CLASSES))
def test_prefix_only_ones_give_the_same_whatever_they_saw_before(name):
    texts = torch.randint(3, 12, (2, 9))
    scores = torch.randn(9, 2, 12)
    used = make(name)
    lengths = [2, 3, 5, 4, 8, 6, 5, 2, 3]
    for t, length in enumerate(lengths):
        expected = make(name)(texts[:, :length], scores[t].clone())
        assert torch.equal(used(texts[:, :length], scores[t].clone()), expected)
