"""A bus client that records fetches, acks and transactions in a journal.

It replaces the client that `native.bus_client.connect` returns, so the FDQ clients above it are
the real ones. Each try is an operation: if the bus dies before it responds, the try is unknown,
and the next one may be a duplicate.
"""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any, cast

from polybus.errors import NotConnected, PolybusError, Unavailable
from tests.rig.fdq.history import ACK, ASSIGNED, COMMIT, DUPLICATE, FAILED, OK, RUNNING, UNSENT
from tests.rig.fdq.journal import UNKNOWN, Journal

if TYPE_CHECKING:
    from polybus.native import Client
    from polybus.native.protocol.fields import A, Request


class RecordedBus:
    """`client`, with a journal; `epochs` are those of the shards that it was given, newest."""

    def __init__(self, client: Client, journal: Journal, epochs: dict[int, int]) -> None:
        self._client = client
        self._journal = journal
        self._epochs = epochs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def follow(self, **request: Any) -> Any:
        for answer, rows in self._client.follow(**request):
            for one in (answer or {}).get("assigned", ()):
                self._journal.note(ASSIGNED, shard=one["shard"], epoch=one["epoch"])
                self._epochs[one["shard"]] = one["epoch"]
            yield answer, rows

    def call(self, request: Request[A]) -> A:
        return cast("A", self._call(request.action_name, request.encode()))

    def _call(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        if name in ("group.ack", "group.leave"):
            return self._tries(name, request, ACK, {"shards": _acked(request["shards"])})
        if name == "group.commit":
            return self._tries(name, request, COMMIT, _outputs(request))
        if name == "group.heartbeat" and request.get("running"):
            self._journal.note(RUNNING, shards=request["running"])
        return self._client.act(name, **request)

    def _tries(
        self, name: str, request: dict[str, Any], kind: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        connection = self._client._connection

        def once() -> dict[str, Any]:
            number = self._journal.begin(kind, **fields)
            try:
                answer = connection.act_once(name, request)
            except NotConnected:
                self._journal.end(number, UNSENT)
                raise
            except Unavailable:
                raise  # no end: unknown
            except PolybusError as error:
                self._journal.end(number, FAILED, error=error.code)
                raise
            self._journal.end(
                number,
                _outcome(name, answer),
                refused=_refused(answer),
                duplicate=answer.get("duplicate", False),
            )
            return answer

        return connection.retry(once)


def _acked(shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"shard": one["shard"], "epoch": one["epoch"], "acked": one.get("acked") or []}
        for one in shards
    ]


def _outputs(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "shard": request["shard"],
        "epoch": request["shard_epoch"],
        "offset": request["offset"],
        "outputs": [b64decode(one["body"]).decode() for one in request["messages"]],
    }


def _outcome(name: str, answer: dict[str, Any]) -> str:
    """Return the outcome by shard. The response of a leave may have no shards."""
    if name == "group.commit":
        return DUPLICATE if answer.get("duplicate") else OK
    return OK if "shards" in answer else UNKNOWN


def _refused(answer: dict[str, Any]) -> list[int]:
    return [one["shard"] for one in answer.get("shards", ()) if one.get("error")]
