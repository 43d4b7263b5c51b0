from __future__ import annotations

import json

import pytest

from cactus_hf.measured_costs import MeasuredCosts
from cactus_hf.round_costs import RoundCosts


COSTS = {
    "1": {"draft": [0.1, 0.2], "verify": [1.0, 1.5, 2.0]},
    "5": {"draft": [0.3, 0.4], "verify": [3.0, 3.5, 4.0]},
}


def test_survive_json_and_integer_keys():
    costs = RoundCosts.from_dict(json.loads(json.dumps(COSTS)))
    assert costs.to_dict() == COSTS
    assert RoundCosts.from_dict({5: COSTS["5"], 1: COSTS["1"]}) == costs
    assert costs.longest == 2


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    ((1, [1.0, 1.6, 2.2]), (5, [3.0, 3.8, 4.4]), (2, [1.5, 2.15, 2.75]), (9, [3.0, 3.8, 4.4])),
)
def test_rounds_at_any_batch_size(batch_size, expected):
    assert RoundCosts.from_dict(COSTS).seconds(batch_size) == pytest.approx(expected)


def test_numbers_of_numpy():
    numpy = pytest.importorskip("numpy")
    curve = {"draft": [numpy.float32(0.5)], "verify": [numpy.float64(1.0), 1]}
    assert RoundCosts.from_dict({numpy.int64(1): curve}).to_dict() == {"1": {"draft": [0.5], "verify": [1.0, 1.0]}}


def test_below_the_smallest_batch_size():
    assert RoundCosts.from_dict({"5": COSTS["5"]}).seconds(1) == pytest.approx([3.0, 3.8, 4.4])


GOOD = {"draft": [0.1], "verify": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("value", "words"),
    (
        (3, "no dictionary"),
        ({}, "no dictionary"),
        ({"0": GOOD}, "no batch size"),
        ({"x": GOOD}, "no batch size"),
        ({True: GOOD}, "no batch size"),
        ({"1": {"draft": [0.1]}}, "batch size 1"),
        ({"1": GOOD | {"drafts": []}}, "batch size 1"),
        ({"1": GOOD | {"verify": [1.0]}}, "1 values of draft and 1 of verify"),
        ({"1": {"draft": [], "verify": [1.0]}}, "0 values of draft"),
        ({"1": GOOD | {"draft": [0.0]}}, "positive"),
        ({"1": GOOD | {"draft": [float("nan")]}}, "positive"),
        ({"1": GOOD | {"draft": "1"}}, "positive"),
        ({"1": GOOD | {"draft": [10**400]}}, "positive"),
        ({"1": GOOD, 1: GOOD}, "a batch size given twice"),
        ({"1": GOOD, "2": COSTS["1"]}, "different lengths"),
    ),
)
def test_what_is_none(value, words):
    with pytest.raises(ValueError, match=f"speculation_costs.*{words}.*cactus-hf tune"):
        RoundCosts.from_dict(value)


class TestMeasured:
    def costs(self, rounds: dict[int, list[float]], longest: int = 6) -> MeasuredCosts:
        costs = MeasuredCosts(longest)
        for length, seconds in rounds.items():
            for each in seconds:
                costs.add(length, each)
        return costs

    def test_outliers_do_not_count(self):
        estimates = self.costs({0: [1.0, 9.0], 2: [2.0, 8.0, 2.2]}).estimates()
        assert estimates[0] == 1.0 and estimates[2] == 2.2

    def test_untried_lengths_lie_on_a_line(self):
        assert self.costs({0: [1.0], 2: [2.0, 2.0], 4: [3.0, 3.0]}).estimates() == pytest.approx(
            [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
        )

    def test_one_bad_round_does_not_bend_the_line(self):
        rounds = {0: [1.0, 1.0], 1: [1.5, 1.5], 2: [9.0], 3: [2.5, 2.5], 5: [3.5, 3.5]}
        estimates = self.costs(rounds).estimates()
        assert estimates[6] == pytest.approx(4.0) and estimates[2] == pytest.approx((9 + 2) / 2)

    def test_irregular_widths_have_their_own_cost(self):
        rounds = {0: [1.4] * 2, 3: [6.5] * 2, 6: [2.2] * 2}
        estimates = self.costs(rounds).estimates()
        assert estimates[3] == 6.5 and estimates[6] == 2.2

    def test_before_plain_decoding_was_timed(self):
        assert self.costs({3: [2.0]}).estimates() == [2.0] * 7

    def test_hope_fades_with_rounds(self):
        costs = self.costs({0: [1.0] * 9, 1: [1.2] * 9, 3: [4.0], 4: [4.0] * 9})
        estimates = costs.estimates()
        hopeful = costs.hopeful(estimates)
        assert hopeful[3] == pytest.approx(1 + 3 * 0.2)  # tried once: as cheap a draft as at length 1
        assert hopeful[4] > 0.9 * estimates[4] and hopeful[6] < 0.6 * estimates[6]

    def test_forgets_when_costs_change(self):
        costs = self.costs({0: [9.0, 9.0, 9.0, 1.0]})
        costs.fade()
        assert costs.estimates()[0] == 1.0
