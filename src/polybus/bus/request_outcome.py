"""How a request of an ephemeral topic ended: values, because none of them is a fault."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    OK = "ok"
    NOTHING_HAPPENED = "nothing_happened"
    NO = "no"
    DOES_NOT_EXIST = "does_not_exist"
    OVER_QUOTA = "over_quota"
    WAIT = "wait"  # a push reader is full; the producer is resumed when it has room


class Outcome(NamedTuple):
    kind: Kind
    text: str = ""  # for people: the name of the quota


OK = Outcome(Kind.OK)
NOTHING_HAPPENED = Outcome(Kind.NOTHING_HAPPENED)
NO = Outcome(Kind.NO)
DOES_NOT_EXIST = Outcome(Kind.DOES_NOT_EXIST)
WAIT = Outcome(Kind.WAIT)


def over_quota(name: str) -> Outcome:
    return Outcome(Kind.OVER_QUOTA, name)
