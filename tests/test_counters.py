from __future__ import annotations

import torch

import cactus_hf
from cactus_hf.counters import Recorder, Round, publish


def make_round(**changes) -> Round:
    """Two rows: one keeps a draft of three and replaces the next, the other keeps all its two and
    gets an extra token.
    """
    fields = {
        "rows": torch.tensor([0, 1]),
        "begin": torch.tensor([1, 1]),
        "tokens": torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]]),
        "num_emitted": torch.tensor([2, 3]),
        "has_ended": torch.tensor([False, False]),
        "num_accepted": torch.tensor([1, 2]),
        "num_drafted": torch.tensor([3, 2]),
        "is_boosted": torch.tensor([[False, False, False], [False, True, False]]),
        "divergence": torch.ones(3, 2, 3, dtype=torch.float64),
    }
    return Round(**fields | changes)


def recorder() -> Recorder:
    made = Recorder(2, with_emitted=True)
    made.add_first(torch.arange(2), torch.tensor([1, 1]))
    return made


def test_a_round():
    made = recorder()
    made.add(make_round())
    stats = made.stats()
    assert stats.drafted.tolist() == [3, 2]
    assert stats.verified.tolist() == [2, 2]
    assert stats.accepted.tolist() == [1, 2]
    assert stats.emitted.tolist() == [3, 4]
    assert stats.rounds.tolist() == [1, 1]
    assert stats.accepted_by_position.tolist() == [[1, 0, 0], [1, 1, 0]]
    assert stats.kinds.tolist() == [[0, 1, 3, -1], [0, 1, 2, 4]]
    assert stats.ball_kl_sum.tolist() == [2.0, 2.0], "the extra token's row is not counted"
    assert stats.accepted_length == 1.5 and stats.tokens_per_round == 2.5
    assert stats.acceptance_rate == 3 / 5 and stats.position_acceptance == 3 / 4
    assert stats.ball_kl == stats.emitted_kl == stats.emitted_tv == 1.0


def test_nothing_behind_the_end_of_a_row_counts():
    """Both rows end at their first token: one at a draft that was kept, the other at one too."""
    made = recorder()
    made.add(make_round(num_emitted=torch.tensor([1, 1]), has_ended=torch.tensor([True, True])))
    stats = made.stats()
    assert stats.accepted.tolist() == [1, 1]
    assert stats.drafted.tolist() == [1, 1] and stats.verified.tolist() == [1, 1]
    assert stats.kinds.tolist() == [[0, 1], [0, 1]]
    assert stats.ball_kl_sum.tolist() == [1.0, 1.0]


def test_what_was_not_verified_does_not_count_even_if_it_is_no_number():
    made = recorder()
    divergence = torch.ones(3, 2, 3, dtype=torch.float64)
    divergence[:, 0, 2], divergence[:, 1, 2] = torch.nan, torch.inf
    made.add(make_round(divergence=divergence))
    assert made.stats().emitted_kl == 1.0


def test_stats_can_be_compared():
    stats = recorder().stats()
    assert stats == stats and stats != recorder().stats()


def test_a_row_that_has_left_gets_no_more():
    made = recorder()
    made.add(make_round())
    only = {name: value[1:] for name, value in make_round()._asdict().items() if name != "divergence"}
    only["begin"] = torch.tensor([4])
    made.add(Round(**only, divergence=make_round().divergence[:, 1:]))
    assert made.stats().emitted.tolist() == [3, 7]
    assert made.stats().rounds.tolist() == [1, 2]


def test_emitted_divergence_is_none_if_not_asked_for():
    stats = Recorder(1, with_emitted=False).stats()
    assert stats.emitted_kl is None and stats.emitted_tv is None and stats.ball_kl == 0.0


def test_track_collects_calls_and_nests():
    stats = Recorder(1, with_emitted=False).stats()
    with cactus_hf.track() as outer:
        publish(stats)
        with cactus_hf.track() as inner:
            publish(stats)
        publish(stats)
    publish(stats)
    assert len(outer) == 2 and len(inner) == 1
