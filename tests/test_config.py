from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from cactus_hf import Cactus, TopK
from cactus_hf.config import make_options, rule_for_rows


def config(**options) -> types.SimpleNamespace:
    return types.SimpleNamespace(**options)


def test_nothing_asked_for_is_nothing():
    assert make_options({}, [config()]) is None
    assert make_options({"cactus_delta": None, "max_new_tokens": 3}, [config(cactus_delta=None)]) is None


def test_the_call_goes_before_the_configs_in_order():
    configs = [config(cactus_delta=0.2), config(cactus_delta=0.3)]
    assert make_options({"cactus_delta": 0.1}, configs).rule == Cactus(0.1)
    assert make_options({}, configs).rule == Cactus(0.2)
    assert make_options({}, [config(), *configs[1:]]).rule == Cactus(0.3)
    assert make_options({"acceptance_rule": TopK(3)}, configs).rule == TopK(3)


def test_only_the_call_is_explicit():
    assert make_options({"cactus_delta": 0.0}, []).is_explicit
    assert not make_options({}, [config(cactus_delta=0.0)]).is_explicit


@pytest.mark.parametrize("seeds", ((1, -2), range(3), [np.int64(2**62), 2**70]))
def test_seeds(seeds):
    assert make_options({"cactus_delta": 1.0, "generator": seeds}, []).generator == list(seeds)


@pytest.mark.parametrize("seeds", ([True], ["1"], [1.0], "12", np.arange(2), torch.arange(2), 1))
def test_what_is_no_list_of_seeds(seeds):
    with pytest.raises(TypeError, match="list of integer seeds"):
        make_options({"cactus_delta": 1.0, "generator": seeds}, [])


def test_draft_length():
    options = make_options(
        {"cactus_delta": 1.0, "num_assistant_tokens": 7},
        [config(num_assistant_tokens=6, assistant_confidence_threshold=0.2)],
    )
    length = options.draft_length({"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic"})
    assert (length.num_tokens, length.schedule, length.confidence_threshold) == (7, "heuristic", 0.2)


def test_per_row_values_of_prompts_are_repeated():
    cpu = torch.device("cpu")
    assert rule_for_rows(Cactus([0.1, 0.2]), 2, 1, cpu) == Cactus([0.1, 0.2])
    assert rule_for_rows(Cactus([0.1, 0.2]), 6, 3, cpu) == Cactus([0.1] * 3 + [0.2] * 3)
    assert rule_for_rows(Cactus([0.1] * 6), 6, 3, cpu) == Cactus([0.1] * 6)
    assert rule_for_rows(Cactus(0.1), 6, 3, cpu) == Cactus(0.1)


@pytest.mark.parametrize("name", ("acceptance_rule", "speculation_kl", "generator"))
def test_a_generation_config_holds_delta_only(name):
    with pytest.raises(ValueError, match=f"{name}.*generation config.*in the call"):
        make_options({"cactus_delta": 1.0}, [config(**{name: True})])
