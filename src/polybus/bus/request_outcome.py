"""Outcomes of a request on a topic: values, because none of them is a fault."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class OutcomeKind(Enum):
    OK = "ok"
    NOTHING_HAPPENED = "nothing_happened"
    NO = "no"
    DOES_NOT_EXIST = "does_not_exist"
    OVER_QUOTA = "over_quota"
    WAIT = "wait"  # a push reader is full; the producer is resumed when it has room


class RequestOutcome(NamedTuple):
    kind: OutcomeKind
    text: str = ""  # the name of the quota


OK = RequestOutcome(OutcomeKind.OK)
NOTHING_HAPPENED = RequestOutcome(OutcomeKind.NOTHING_HAPPENED)
NO = RequestOutcome(OutcomeKind.NO)
DOES_NOT_EXIST = RequestOutcome(OutcomeKind.DOES_NOT_EXIST)
WAIT = RequestOutcome(OutcomeKind.WAIT)


def over_quota(name: str) -> RequestOutcome:
    return RequestOutcome(OutcomeKind.OVER_QUOTA, name)
