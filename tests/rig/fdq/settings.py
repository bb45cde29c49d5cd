"""What a round is made of, and what may be done to those who take part in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.rig.fdq.message_plan import ROUGH

KILL: Final = "kill"  # a consumer, with -9
STOP: Final = "stop"  # one, cleanly
START: Final = "start"  # another one
PAUSE: Final = "pause"  # one stands still, until the group goes on without it
KILL_BUS: Final = "kill the bus"  # with -9; it is started again on the same data
KILL_UNHEARD: Final = "kill the bus unheard"  # likewise, before it has told what it did
KILL_PRODUCER: Final = "kill a producer"
TAKE_OVER: Final = "take a name over"  # a second client of the same name

# With weights.
TO_CONSUMERS: Final = {KILL: 3, STOP: 2, START: 2, PAUSE: 2}
TO_ALL: Final = {**TO_CONSUMERS, KILL_BUS: 2, KILL_PRODUCER: 1, TAKE_OVER: 1}


@dataclass(frozen=True)
class Settings:
    shards: int = 4
    producers: int = 2
    consumers: int = 3
    mix: Mapping[str, int] = field(default_factory=lambda: ROUGH)  # of messages' plans
    deeds: Mapping[str, int] = field(default_factory=lambda: TO_ALL)
    # Nobody dies, or is taken for dead: nothing is done twice, and all is counted.
    is_exact: bool = False
    is_relayed: bool = False  # clients speak to the bus through a relay
    orders: Mapping[str, Any] = field(default_factory=dict)  # for all children
