from __future__ import annotations

import functools
import itertools
import random
import re
import time
import types
from collections import deque

import numpy as np
import pytest
import torch

import tiny
from cactus_hf.object_state import Record, copied


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("value", "__hidden", "unset")

    def __init__(self, value, hidden):
        self.value, self.__hidden = value, hidden

    def hide(self, value):
        self.__hidden = value


def set_item(container, key, value):
    container[key] = value


CHANGES = {
    "attribute": (lambda: Thing(n=1), lambda x: setattr(x, "n", 2)),
    "new attribute": (lambda: Thing(), lambda x: setattr(x, "n", 2)),
    "another equal list": (lambda: Thing(n=[1, 2]), lambda x: setattr(x, "n", [1, 3])),
    "list": (lambda: Thing(n=[1, 2]), lambda x: x.n.append(1)),
    "item": (lambda: Thing(n=[1, 2]), lambda x: set_item(x.n, 0, 7)),
    "item of many": (lambda: Thing(n=[1] * 5000), lambda x: set_item(x.n, 4321, 7)),
    "dictionary": (lambda: Thing(n={1: 2}), lambda x: set_item(x.n, 1, 3)),
    "set": (lambda: Thing(n={1, 2}), lambda x: x.n.add(3)),
    "queue": (lambda: Thing(n=deque((1, 2))), lambda x: x.n.rotate()),
    "item of a large table": (lambda: Thing(n={str(i): i for i in range(50_000)}), lambda x: set_item(x.n, "7", 8)),
    "beside a large table": (lambda: Thing(m=[[i] for i in range(50_000)], n=[3]), lambda x: x.n.append(1)),
    "nested": (lambda: Thing(n=[{"a": Thing(m=(Thing(k=1),))}]), lambda x: setattr(x.n[0]["a"].m[0], "k", 2)),
    "tensor in place": (lambda: Thing(n=torch.zeros(3)), lambda x: x.n.add_(1)),
    "tensor": (lambda: Thing(n=torch.zeros(3)), lambda x: setattr(x, "n", x.n + 0)),
    "array": (lambda: Thing(n=np.zeros(3)), lambda x: set_item(x.n, 1, 2.0)),
    "slot": (lambda: Slotted(1, 2), lambda x: setattr(x, "value", 2)),
    "hidden slot": (lambda: Slotted(1, 2), lambda x: x.hide(3)),
    "slot set late": (lambda: Slotted(1, 2), lambda x: setattr(x, "unset", 3)),
    "bound method": (lambda: Thing(n=[]).__init__, lambda x: setattr(x.__self__, "n", 2)),
    "partial": (lambda: functools.partial(print, Thing(n=1)), lambda x: setattr(x.args[0], "n", 2)),
    "list with attributes": (lambda: type("L", (list,), {})([Thing(n=1)]), lambda x: setattr(x[0], "n", 2)),
    "module": (lambda: torch.nn.Linear(2, 2), lambda x: x.weight.detach().add_(1)),
    "generator of torch": (lambda: Thing(n=torch.Generator()), lambda x: torch.rand(1, generator=x.n)),
    "generator of numpy": (lambda: Thing(n=np.random.default_rng(0)), lambda x: x.n.random()),
    "generator of python": (lambda: Thing(n=random.Random(0)), lambda x: x.n.random()),
    "iterator": (lambda: Thing(n=iter([1, 2])), lambda x: next(x.n)),
    "counter": (lambda: Thing(n=itertools.count()), lambda x: next(x.n)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name):
    make, change = CHANGES[name]
    thing = make()
    before = Record(thing)
    change(thing)
    assert Record(thing) != before


STABLE = {
    "values": lambda: Thing(a=1, b="x", c=2.5, d=None, e=(1, 2), f={"g": [3]}, h=b"i", j=range(3), k=1j),
    "constants": lambda: Thing(a=print, b=Thing, c=re.compile("a"), d=torch.float32, e=torch.device("cpu"), f=len),
    "tensors": lambda: Thing(a=torch.zeros(3), b=[torch.ones(2)], c=np.ones(3), d=torch.nn.Linear(2, 2)),
    "libraries": lambda: Thing(a=torch, b=tiny.model("llama"), c=tiny.word_tokenizer()),
    "cycle": lambda: vars(thing := Thing(a=1)).update(b=thing) or thing,
    "many": lambda: Thing(a={str(i): i for i in range(5000)}, b=[[i] for i in range(20_000)]),
}


@pytest.mark.parametrize("name", STABLE)
def test_nothing_changes_by_looking(name):
    thing = STABLE[name]()
    assert Record(thing) == Record(thing)
    thing.a = thing.a  # nor by setting what was there
    assert Record(thing) == Record(thing)


def test_a_value_made_anew_is_no_change():
    thing = Thing(n=1234.5, s="ab")
    before = Record(thing)
    thing.n, thing.s = float("1234.5"), "".join(("a", "b"))
    assert Record(thing) == before


def test_copies_are_independent_but_share_what_is_large():
    model, tokenizer, bound = tiny.model("llama"), tiny.word_tokenizer(), Thing(n=[1])
    thing = Thing(model=model, tokenizer=tokenizer, library=torch, state=[torch.zeros(2)], method=bound.__init__)
    copy = copied(thing)
    assert copy.model is model and copy.tokenizer is tokenizer and copy.library is torch
    copy.state[0] += 1
    copy.method.__self__.n.append(2)
    assert not thing.state[0].any() and bound.n == [1]


def test_large_tables_of_values_take_no_time():
    thing = Thing(vocabulary={str(i): i for i in range(150_000)}, counts=[0] * 150_000)
    start = time.perf_counter()
    assert Record(thing) == Record(thing)
    copy = copied(thing)
    assert time.perf_counter() - start < 1  # looking at one item after another takes several
    copy.counts[3] += 1
    assert thing.counts[3] == 0


def test_what_can_fork_is_forked():
    class Matcher:
        def __init__(self, text=""):
            self.text, self.lock = text, (i for i in range(3))

        def fork(self):
            return Matcher(self.text)

    thing = Thing(matchers=[Matcher("a"), Matcher("b")])
    copy = copied(thing)
    copy.matchers[0].text += "c"
    assert [m.text for m in thing.matchers] == ["a", "b"] and [m.text for m in copy.matchers] == ["ac", "b"]


def test_a_class_may_say_how_it_is_copied():
    class Constant:
        def __init__(self):
            self.stream = (i for i in range(3))

        def __deepcopy__(self, memo):
            return self

    constant = Constant()
    assert copied(Thing(n=constant)).n is constant


def test_what_cannot_be_copied_is_named():
    with pytest.raises(ValueError, match="Thing cannot be copied.*generator.*__deepcopy__"):
        copied(Thing(n=(i for i in range(3))))
    with pytest.raises(ValueError, match="Thing cannot be copied"):
        copied(types.MethodType(lambda self: None, Thing(n=(i for i in range(3)))))


def test_values_for_each_row_are_found():
    for value in ([0] * 3, (1, 2, 3), {1: 2, 3: 4, 5: 6}, torch.zeros(3, 7), [[[1, 2, 3]]]):
        assert Record(Thing(n=value)).holds(3)
        assert not Record(Thing(n=value)).holds(4)
    assert not Record(Thing(n="abc", m=torch.tensor(3))).holds(3)
