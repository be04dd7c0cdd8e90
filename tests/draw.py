"""The part of many cases that a run takes. DRAW, a number in the environment, chooses it; CI sets it to the commit's."""

import os
import zlib


def drawn(cases: list, count: int, first: int = 0) -> list:
    """At most so many of the cases, at equal distances."""
    first += int(os.environ.get("DRAW", 0))
    return [cases[(first + i * len(cases) // count) % len(cases)] for i in range(min(count, len(cases)))]


def drawn_of_each_test(items: list, share: int = 0, most: int = 1) -> set:
    """One in ``share`` of the cases of each test, of a slow one a quarter of that, and at least one; if ``share`` is 0, at most ``most`` of
    them. The first one depends on the test, so that no parameter is always its first value."""
    tests: dict[str, list] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for name, cases in tests.items():
        one_in = 4 * share if share > 1 and "slow" in cases[0].keywords else share
        kept.update(drawn(cases, -(-len(cases) // one_in) if share else most, zlib.crc32(name.encode())))
    return kept
