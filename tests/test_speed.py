from __future__ import annotations

import math

import pytest

from cactus_hf.speed import best_length, expected_tokens, tokens_per_second


def test_expected_tokens():
    assert expected_tokens([0.5, 0.25], 0) == 1
    assert expected_tokens([0.5, 0.25], 2) == 1 + 0.5 + 0.125
    assert math.isclose(expected_tokens([0.9], 3), (1 - 0.9**4) / (1 - 0.9))  # the last chance goes on


def test_expected_tokens_of_nothing():
    assert expected_tokens([], 0) == 1
    with pytest.raises(ValueError, match="acceptance.*2 drafts"):
        expected_tokens([], 2)


def test_speed_and_best_length():
    seconds = [1.0, 1.5, 1.6]
    speeds = tokens_per_second([0.5], seconds, batch_size=4)
    assert speeds == [4.0, 4.0, 4 * 1.75 / 1.6]
    tokens = [expected_tokens([0.5], m) for m in range(3)]
    assert best_length(tokens, seconds) == 2
    assert best_length([1.0, 1.5], [1.0, 1.5]) == 0 and best_length([1.0, 1.5], [1.0, 1.5], shortest=1) == 1
