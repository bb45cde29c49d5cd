"""Every error polybus raises on purpose, as one tree.

    PolybusError
    ├── UsageError            you asked for something that cannot be: mend the call
    │   ├── ConfigError           a setting, flag or config file is wrong
    │   ├── AddressError          an address that cannot be parsed, or not used so
    │   ├── InvalidTopic          a topic name that breaks the rules
    │   ├── InvalidRule           a line that is no rule of the policy
    │   ├── TooLarge              a message over a limit that was set
    │   ├── MalformedRequest      the bus cannot make sense of a request
    │   └── MissingExtra          an optional part is not installed
    ├── PeerError             the other side broke the protocol
    │   └── BadFrame              bytes that are no frame of the dialect
    ├── Refused               the bus understood, and said no
    │   ├── Denied                the policy does not allow it
    │   ├── DoesNotExist          there is no such topic, or no such subscription
    │   │   ├── TopicDeleted          there was, and somebody deleted it
    │   │   ├── UnknownProducer       nobody has opened a producer of this name
    │   │   ├── StageGone             a stage that was published, discarded or collected
    │   │   └── Trimmed               messages that the topic no longer keeps
    │   ├── NotSupported          nothing is wrong with it, but this bus cannot do it
    │   ├── AlreadyExists         a topic of this name is there
    │   ├── WrongKind             the topic is of the other kind: ephemeral, durable
    │   ├── Conflict              a record is no longer as it was expected
    │   ├── ShardSealed           a shard that takes no more: newer ones are open
    │   ├── Fenced                somebody newer has taken over
    │   │   └── Expired               it gave no sign of life for too long: join again
    │   ├── OutOfSequence         a stamp's counter leaves a gap
    │   ├── Stale                 a stamp's counter was used, and for what is not known any more
    │   ├── CallCancelled         a call that was cancelled before its answer
    │   └── LimitReached          a named limit or quota is used up
    ├── ServiceFailed         a service was called, and says that it failed
    ├── StoreFault            what is stored cannot be used as it is
    │   ├── Damaged               bytes that are not what was written
    │   └── WrongFormat           written by another version of polybus, or not by polybus
    └── Unavailable           nobody is to blame yet: try again, or start something
        ├── AddressInUse          something else listens there
        ├── DataFolderInUse       another bus owns the data folder
        ├── StoreFull             the disk has no room; nothing was changed
        ├── StoreClosed           the store was closed, or belongs to the parent of a fork
        ├── ServiceGone           the service that was called went away
        ├── DeadlinePassed        no answer came in time
        ├── NotConnected          no bus answers at the address
        ├── ConnectionLost        the connection ended while something waited on it
        └── OutcomeUnknown        no answer came: it may have been done, or not; it is kept

The type says who is to blame. `code` is stable: it is what other languages,
logs, counters and exit codes see, so it never changes once released; the text
is for people and may.
"""

from __future__ import annotations


class PolybusError(Exception):
    """Root of the tree; catches everything polybus raises on purpose."""

    code = "error"


class UsageError(PolybusError):
    code = "usage"


class ConfigError(UsageError):
    code = "config"


class AddressError(UsageError):
    code = "address"


class InvalidTopic(UsageError):
    code = "invalid_topic"


class InvalidRule(UsageError):
    code = "invalid_rule"


class TooLarge(UsageError):
    code = "too_large"


class MalformedRequest(UsageError):
    code = "malformed_request"


class MissingExtra(UsageError):
    """An optional part is not installed; the text says which command brings it."""

    code = "missing_extra"

    def __init__(self, part: str, extra: str) -> None:
        super().__init__(f"{part} is not installed: pip install 'polybus[{extra}]'")


class PeerError(PolybusError):
    code = "peer"


class BadFrame(PeerError):
    """`reason` is one of the dialect's stable reasons, the same as in its counters."""

    code = "bad_frame"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Refused(PolybusError):
    code = "refused"


class Denied(Refused):
    code = "denied"


class DoesNotExist(Refused):
    code = "does_not_exist"


class TopicDeleted(DoesNotExist):
    code = "topic_deleted"


class UnknownProducer(DoesNotExist):
    code = "unknown_producer"


class StageGone(DoesNotExist):
    code = "stage_gone"


class Trimmed(DoesNotExist):
    """`start` is the first offset that the shard still has."""

    code = "trimmed"

    def __init__(self, text: str, start: int) -> None:
        super().__init__(text)
        self.start = start


class NotSupported(Refused):
    code = "not_supported"


class AlreadyExists(Refused):
    code = "already_exists"


class WrongKind(Refused):
    code = "wrong_kind"


class Conflict(Refused):
    code = "conflict"


class ShardSealed(Refused):
    code = "shard_sealed"


class Fenced(Refused):
    code = "fenced"


class Expired(Fenced):
    code = "expired"


class OutOfSequence(Refused):
    code = "out_of_sequence"


class Stale(Refused):
    code = "stale"


class CallCancelled(Refused):
    code = "call_cancelled"


class LimitReached(Refused):
    """`limit` is the name of the setting that was reached."""

    code = "limit_reached"

    def __init__(self, limit: str, text: str | None = None) -> None:
        super().__init__(text or f"limit reached: {limit}")
        self.limit = limit


class ServiceFailed(PolybusError):
    """`status` and `data` are what the service said: a number of its own, and anything more."""

    code = "service_failed"

    def __init__(self, text: str, status: int = 500, data: object = None) -> None:
        super().__init__(text)
        self.status = status
        self.data = data


class StoreFault(PolybusError):
    code = "store_fault"


class Damaged(StoreFault):
    """The text names topic, shard and offset where they are known."""

    code = "damaged"


class WrongFormat(StoreFault):
    code = "wrong_format"


class Unavailable(PolybusError):
    code = "unavailable"


class AddressInUse(Unavailable):
    code = "address_in_use"


class DataFolderInUse(Unavailable):
    code = "data_folder_in_use"


class StoreFull(Unavailable):
    code = "store_full"


class StoreClosed(Unavailable):
    code = "store_closed"


class ServiceGone(Unavailable):
    code = "service_gone"


class DeadlinePassed(Unavailable):
    code = "deadline_passed"


class NotConnected(Unavailable):
    code = "not_connected"


class ConnectionLost(Unavailable):
    code = "connection_lost"


class OutcomeUnknown(Unavailable):
    code = "outcome_unknown"


def error_from_code(code: str, text: str) -> PolybusError:
    """The error that travelled as these two; one that is not known here is a plain one."""
    kind = _by_code().get(code, PolybusError)
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    error.__dict__.update(_DEFAULT_ATTRIBUTES.get(kind, {}))
    return error


def _by_code() -> dict[str, type[PolybusError]]:
    found: dict[str, type[PolybusError]] = {}
    kinds = [PolybusError]
    for kind in kinds:  # grows while it is walked
        found[kind.code] = kind
        kinds += kind.__subclasses__()
    return found


# What an error knows beside its text does not travel.
_DEFAULT_ATTRIBUTES: dict[type[PolybusError], dict[str, object]] = {
    BadFrame: {"reason": ""},
    LimitReached: {"limit": ""},
    ServiceFailed: {"status": 500, "data": None},
    Trimmed: {"start": -1},
}
