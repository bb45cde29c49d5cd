"""Sabotages: patches that break one property each, so that its fault test is seen to fail.

A test names them, `@pytest.mark.sabotage("stamps-off", expects=...)`; `plugin.py` applies them.
Names are unique over all areas.
"""

from __future__ import annotations

from collections import Counter

from tests.rig.patching import Patch
from tests.rig.sabotage import (
    cli,
    fdq,
    freud,
    groups,
    gsb,
    native,
    pirate,
    policy,
    shares,
    spark,
    store,
    store_log,
    streams,
    threads,
    zmq,
)

ALL: list[Patch] = [
    *store.SABOTAGES,
    *store_log.SABOTAGES,
    *groups.SABOTAGES,
    *fdq.SABOTAGES,
    *freud.SABOTAGES,
    *pirate.SABOTAGES,
    *zmq.SABOTAGES,
    *gsb.SABOTAGES,
    *native.SABOTAGES,
    *spark.SABOTAGES,
    *policy.SABOTAGES,
    *shares.SABOTAGES,
    *streams.SABOTAGES,
    *threads.SABOTAGES,
    *cli.SABOTAGES,
]
NAMES = frozenset(patch.name for patch in ALL)


def patch_of(name: str) -> Patch:
    (found,) = (patch for patch in ALL if patch.name == name)
    return found


def repeated_names() -> list[str]:
    return [name for name, count in Counter(patch.name for patch in ALL).items() if count > 1]
