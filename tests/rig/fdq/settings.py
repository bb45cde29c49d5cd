"""The settings of a round, and the faults that may be injected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.rig.fdq.message_plan import ROUGH

KILL: Final = "kill"  # kill a consumer with -9
STOP: Final = "stop"  # stop a consumer cleanly
START: Final = "start"  # start another consumer
PAUSE: Final = "pause"  # pause a consumer until the group continues without it
KILL_BUS: Final = "kill the bus"  # kill the bus with -9 and start it again on its data
KILL_UNHEARD: Final = "kill the bus unheard"  # likewise, before it responds
KILL_PRODUCER: Final = "kill a producer"
TAKE_OVER: Final = "take a name over"  # a second client of the same name
RESHARD: Final = "reshard"  # the topic, or the one to which transactions produce
KILL_RESHARD: Final = "kill the bus in a reshard"

# With weights.
TO_CONSUMERS: Final = {KILL: 3, STOP: 2, START: 2, PAUSE: 2}
TO_ALL: Final = {**TO_CONSUMERS, KILL_BUS: 2, KILL_PRODUCER: 1, TAKE_OVER: 1}
WITH_RESHARDS: Final = {**TO_ALL, RESHARD: 12, KILL_RESHARD: 2}


@dataclass(frozen=True)
class Settings:
    shards: int = 4
    producers: int = 2
    consumers: int = 3
    mix: Mapping[str, int] = field(default_factory=lambda: ROUGH)  # of messages' plans
    faults: Mapping[str, int] = field(default_factory=lambda: TO_ALL)
    # No process dies or expires: no duplicates, and all counts are exact.
    is_exact: bool = False
    is_relayed: bool = False  # clients speak to the bus through a relay
    orders: Mapping[str, Any] = field(default_factory=dict)  # for all children
