"""The errors that polybus raises on purpose, as one tree.

    PolybusError
    ├── UsageError            the call is wrong; change the call
    │   ├── ConfigError           a setting, flag or config file is invalid
    │   ├── AddressError          an address is invalid, or cannot be used here
    │   ├── InvalidTopic          a topic name breaks the rules
    │   ├── InvalidRule           a line is not a rule of the policy
    │   ├── TooLarge              a message exceeds a configured limit
    │   ├── MalformedRequest      the bus cannot parse a request
    │   └── MissingExtra          an optional dependency is not installed
    ├── PeerError             the peer violated the protocol
    │   └── BadFrame              the bytes are not a frame of the dialect
    ├── Refused               the bus understood the request and refused it
    │   ├── Denied                the policy does not allow it
    │   ├── DoesNotExist          the topic or subscription does not exist
    │   │   ├── TopicDeleted          the topic existed and was deleted
    │   │   ├── UnknownProducer       no producer of this name is open
    │   │   ├── StageGone             the stage was published, discarded or collected
    │   │   └── Trimmed               the topic no longer has these messages
    │   ├── NotSupported          the request is valid, but this bus does not support it
    │   ├── AlreadyExists         a topic of this name exists
    │   ├── WrongKind             the topic is of the other kind (ephemeral, durable)
    │   ├── Conflict              a record does not have the expected version
    │   ├── ShardSealed           the shard takes no more messages; newer shards are open
    │   ├── Fenced                a newer owner has taken over
    │   │   └── Expired               the lease ended without a heartbeat; join again
    │   ├── OutOfSequence         the counter of a stamp leaves a gap
    │   ├── Stale                 the counter of a stamp was used, and its result is forgotten
    │   ├── CallCancelled         the call was cancelled before its answer
    │   ├── Paused                the topic is paused; retry after it is resumed
    │   └── LimitReached          a named limit or quota is used up
    ├── ServiceFailed         the called service reported a failure
    ├── StoreFault            stored data cannot be used as it is
    │   ├── Damaged               the bytes are not those that were written
    │   └── WrongFormat           written by another version of polybus, or not by polybus
    └── Unavailable           retryable: wait and retry, or start the missing process
        ├── AddressInUse          another process listens there
        ├── DataFolderInUse       another bus owns the data folder
        ├── StoreFull             the disk is full; nothing was changed
        ├── StoreClosed           the store was closed, or belongs to the parent of a fork
        ├── ServiceGone           the called service disconnected
        ├── DeadlinePassed        no answer arrived in time
        ├── NotConnected          no bus answers at the address
        ├── ConnectionLost        the connection ended while a request was pending
        └── OutcomeUnknown        no answer arrived; the request may have been executed

The type says whether the caller, the peer or the system is at fault. `code` is stable:
other languages, logs, counters and exit codes use it, so it never changes once released.
The text is for people and may change.
"""

from __future__ import annotations


class PolybusError(Exception):
    """Root of the tree: the base of every error that polybus raises on purpose."""

    code = "error"

    def __reduce__(self) -> tuple[object, ...]:
        # `copy` and `pickle` would call the class with `args`, which is the text alone, but
        # some kinds take other arguments.
        return _restore, (type(self), self.args, self.__dict__)


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
    """An optional dependency is not installed; the text has the command that installs it."""

    code = "missing_extra"

    def __init__(self, part: str, extra: str) -> None:
        super().__init__(f"{part} is not installed; run: pip install 'polybus[{extra}]'")


class PeerError(PolybusError):
    code = "peer"


class BadFrame(PeerError):
    """`reason` is one of the stable reasons of the dialect, as in its counters."""

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
    """`start` is the first offset that the shard still has, or -1 if it is not known."""

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


class Paused(Refused):
    code = "paused"


class LimitReached(Refused):
    """`limit` is the name of the setting that was reached."""

    code = "limit_reached"

    def __init__(self, limit: str, text: str | None = None) -> None:
        super().__init__(text or f"limit reached: {limit}")
        self.limit = limit


class ServiceFailed(PolybusError):
    """`status` and `data` are the service's own error number and details."""

    code = "service_failed"

    def __init__(self, text: str, status: int = 500, data: object = None) -> None:
        super().__init__(text)
        self.status = status
        self.data = data


class StoreFault(PolybusError):
    code = "store_fault"


class Damaged(StoreFault):
    """The text names topic, shard and offset if they are known."""

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
    """Return the error of a received code and text; an unknown code gives a PolybusError."""
    kind = _by_code().get(code, PolybusError)
    return _restore(kind, (text,), _DEFAULT_ATTRIBUTES.get(kind, {}))


def _restore(
    kind: type[PolybusError], args: tuple[object, ...], attributes: dict[str, object]
) -> PolybusError:
    """Return an error of known text and attributes, without a call of its `__init__`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def _by_code() -> dict[str, type[PolybusError]]:
    found: dict[str, type[PolybusError]] = {}
    kinds = [PolybusError]
    for kind in kinds:  # a breadth-first walk: the list grows during the loop
        found[kind.code] = kind
        kinds += kind.__subclasses__()
    return found


# Only code and text are transmitted, so a received error gets these attributes.
_DEFAULT_ATTRIBUTES: dict[type[PolybusError], dict[str, object]] = {
    BadFrame: {"reason": ""},
    LimitReached: {"limit": ""},
    ServiceFailed: {"status": 500, "data": None},
    Trimmed: {"start": -1},
}
