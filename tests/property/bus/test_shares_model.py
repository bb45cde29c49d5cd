"""Any order of takes, releases and hang-ups leaves the shares where an obvious model has them."""

from __future__ import annotations

from collections import Counter
from threading import Thread

from hypothesis import given, strategies

from polybus.bus.shares import ShareTable
from polybus.errors import LimitReached
from polybus.model.identity import Identity

CALLERS = [Identity(uid=uid) for uid in range(4)]  # uid 0 is the admin
STEPS = strategies.lists(
    strategies.tuples(
        strategies.sampled_from(["take", "release", "hang_up"]),
        strategies.sampled_from(CALLERS),
        strategies.integers(1, 3),
    ),
    max_size=60,
)


def may_take(
    held: Counter[str], caller: Identity, amount: int, bounds: tuple[int, int, int]
) -> bool:
    """The oracle: the rule as the settings describe it."""
    total, share, reserve = bounds
    used = held.total() + amount
    if caller.uid == 0:
        return used <= total
    return used <= total - reserve and held[caller.name] + amount <= share


@given(
    total=strategies.integers(1, 12),
    share=strategies.integers(1, 12),
    reserve=strategies.integers(0, 6),
    steps=STEPS,
)
def test_table_agrees_with_the_model(total, share, reserve, steps):
    share, reserve = min(share, total), min(reserve, total)
    table = ShareTable("max_things", total, share, reserve, lambda caller: caller.uid == 0)
    held: Counter[str] = Counter()
    for step, caller, amount in steps:
        name = caller.name
        if step == "take":
            allowed = may_take(held, caller, amount, (total, share, reserve))
            try:
                table.take(caller, amount)
                taken = True
            except LimitReached:
                taken = False
            assert taken == allowed, "a limit is not exact"
            held[name] += amount * taken
        elif step == "release" and held[name] >= amount:
            table.release(name, amount)
            held[name] -= amount
        elif step == "hang_up":
            table.release(name, held[name])
            held[name] = 0
        assert table.used == held.total(), "an entry has leaked"
        assert all(table.held(one.name) == held[one.name] for one in CALLERS)


def test_threads_never_exceed_the_bounds():
    table = ShareTable("max_things", 20, 10, 2, lambda caller: False)
    highest = [0]

    def take_and_release(caller: Identity) -> None:
        for _ in range(2000):
            try:
                table.take(caller)
            except LimitReached:
                continue
            highest[0] = max(highest[0], table.used)
            table.release(caller.name)

    threads = [Thread(target=take_and_release, args=(CALLERS[n % 3],)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.used == 0
    assert highest[0] <= 18
