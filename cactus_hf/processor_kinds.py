"""Transformers' own logits processors, sorted by what they look at.

What is not listed remembers earlier calls, or is of the user's own, and is tried out: see `remembering.py`.
"""

from __future__ import annotations

from typing import Any

from transformers.generation import logits_process


# Look at the scores of one row and at nothing else
CONTEXT_FREE = frozenset(
    (
        "BarkEosPrioritizerLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
)
# Of these, the ones that give what they give whether or not logits of -inf stand beside the others, and wherever
ROW_WISE = frozenset(
    (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "MinPLogitsWarper",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
)
# Look at the text so far too. What some keep is the same after every call, or is made once, at the first token.
PREFIX_ONLY = frozenset(
    (
        "AlternatingCodebooksLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        # Beam search asks `prefix_allowed_tokens_fn` about texts in any order, so it must not remember any
        "PrefixConstrainedLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "WatermarkLogitsProcessor",
        "WhisperNoSpeechDetection",
        "WhisperTimeStampLogitsProcessor",
    )
)
# Want several rows of scores a text, as only the models they are for have
FOR_OTHER_MODELS = frozenset(
    (
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
    )
)


def is_among(processor: Any, names: frozenset[str]) -> bool:
    """Whether a processor is of one of these classes, and not of a subclass that may do anything."""
    return type(processor).__module__ == logits_process.__name__ and type(processor).__name__ in names
