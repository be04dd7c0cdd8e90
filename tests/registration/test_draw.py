"""The cases that a run with --sample or --one-in takes."""

from typing import NamedTuple

from ..draw import drawn, drawn_of_each_test


class Item(NamedTuple):
    nodeid: str
    keywords: tuple = ()


def test_the_draws_take_every_case_between_them(monkeypatch):
    taken = set()
    for number in range(7):
        monkeypatch.setenv("DRAW", str(number))
        cases = drawn(list(range(7)), 3)
        assert len({*cases}) == 3
        taken.update(cases)
    assert taken == {*range(7)}


def test_no_draw_leaves_a_test_out(monkeypatch):
    items = [Item(f"a.py::{name}[{case}]") for name in ("one", "two") for case in range(5)] + [Item("a.py::three")]
    for number in range(5):
        monkeypatch.setenv("DRAW", str(number))
        names = [item.nodeid.partition("[")[0].partition("::")[2] for item in drawn_of_each_test(items, 2)]
        assert [names.count(name) for name in ("one", "two", "three")] == [3, 3, 1]


def test_slow_tests_have_a_quarter_of_the_share():
    cases = [Item(f"a.py::slow[{case}]", ("slow",)) for case in range(9)]
    assert [len(drawn_of_each_test(cases, share)) for share in (1, 2, 8)] == [9, 2, 1]
