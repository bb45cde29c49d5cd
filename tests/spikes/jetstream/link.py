"""The little of JetStream that the engine needs, blocking: an event loop on a thread.

An atomic batch (NATS ADR-50) is a row of messages with one batch id; the last one
asks for the commit, and its answer is the answer for all. Each message may demand
the sequence that the last one on its subject must have: compare-and-set.
"""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64decode
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from tests.spikes.jetstream.subjects import STREAM

T = TypeVar("T")

WRONG_LAST_SEQUENCE = (10071, 10164)
BATCH_TOO_LARGE = 10199
BATCH_HEADERS_BYTES = 256  # headers count towards the server's max_payload
PENDING_BYTES = 256 << 20  # a whole batch is written before its answer is awaited


class Outrun(Exception):
    """Another bus has written to one of the batch's subjects; nothing was changed."""


class Oversized(Exception):
    """More messages than an atomic batch can have, or a larger one; nothing was changed."""


class Unanswered(Exception):
    """No answer arrived; it is unknown whether the batch was done."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message of a batch; `after` is the sequence that its subject's last one must have."""

    subject: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int | None = None

    def wire_headers(self) -> dict[str, str]:
        if self.after is None:
            return dict(self.headers)
        return {**self.headers, "Nats-Expected-Last-Subject-Sequence": str(self.after)}


@dataclass(frozen=True, slots=True)
class Stored:
    subject: str
    sequence: int
    body: bytes
    headers: Mapping[str, str]


class Link:
    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client: Client | None = None
        self._ended = asyncio.Event()

    def connect(self) -> None:
        """Make a new connection. Raises OSError if there is no server."""
        try:
            self._run(self._connect())
        except Exception as error:  # nats-py lets errors of sockets and of its own through
            raise OSError(f"{self._url}: {error!r}") from error

    def close(self) -> None:
        self._run(self._drop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def make_stream(self, fresh: bool) -> None:
        """The namespace, if it is not there yet; `fresh` removes one that is."""
        if fresh:
            self._ask(f"$JS.API.STREAM.DELETE.{STREAM}", {})
        self._run(self._make_stream())

    def last(self, subject: str) -> Stored | None:
        return self._get({"last_by_subj": subject})

    def following(self, subject: str, sequence: int) -> Stored | None:
        """The first message of the subject at this sequence or later."""
        return self._get({"next_by_subj": subject, "seq": sequence})

    def last_sequence(self) -> int:
        info = self._ask(f"$JS.API.STREAM.INFO.{STREAM}", {})
        return int(info["state"]["last_seq"])

    def subjects(self, pattern: str) -> list[str]:
        """Return all subjects that match, in no order."""
        info = self._ask(f"$JS.API.STREAM.INFO.{STREAM}", {"subjects_filter": pattern})
        return list(info["state"].get("subjects", {}))

    def purge(self, subject: str, before: int | None = None) -> None:
        """Remove the subject's messages, or those below a sequence if one is given."""
        bound = {} if before is None else {"seq": before}
        self._ask(f"$JS.API.STREAM.PURGE.{STREAM}", {"filter": subject, **bound})

    def batch(self, name: str, messages: Sequence[Outgoing]) -> int:
        """Store all messages or none. Returns the sequence of the last; they are consecutive."""
        self._check_sizes(messages)
        try:
            answer = json.loads(self._run(self._batch(name, messages)).data)
        except (nats.errors.Error, OSError) as error:
            raise Unanswered from error
        if "error" not in answer:
            return int(answer["seq"])
        code, text = answer["error"]["err_code"], answer["error"]["description"]
        if code in WRONG_LAST_SEQUENCE:
            raise Outrun(text)
        if code == BATCH_TOO_LARGE:
            raise Oversized(text)
        raise OSError(f"{code}: {text}")

    def _check_sizes(self, messages: Sequence[Outgoing]) -> None:
        """The server would not refuse a message that is too large: it cuts the connection."""
        assert self._client is not None
        most = self._client.max_payload - BATCH_HEADERS_BYTES
        for message in messages:
            headers = sum(len(name) + len(value) + 4 for name, value in message.headers.items())
            if len(message.body) + headers > most:
                raise Oversized(f"{len(message.body)} bytes for {message.subject}, at most {most}")

    # --- on the loop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self) -> None:
        await self._drop()
        self._ended = ended = asyncio.Event()

        async def ends() -> None:
            ended.set()

        self._client = Client()
        await self._client.connect(
            self._url,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=1,
            pending_size=PENDING_BYTES,
            error_cb=_quiet,
            closed_cb=ends,
        )

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None and not client.is_closed:
            await client.close()

    async def _make_stream(self) -> None:
        assert self._client is not None
        await self._client.jetstream().add_stream(
            api.StreamConfig(
                name=STREAM,
                subjects=[f"{STREAM}.>"],
                discard=api.DiscardPolicy.NEW,  # a full store refuses; it never forgets by itself
                allow_atomic=True,
                allow_direct=False,  # a follower's answer may be older than the leader's
                allow_rollup_hdrs=True,
                allow_msg_ttl=True,
            )
        )

    async def _batch(self, name: str, messages: Sequence[Outgoing]) -> Msg:
        assert self._client is not None
        for number, message in enumerate(messages[:-1], 1):
            headers = {**message.wire_headers(), **_batch_headers(name, number)}
            await self._client.publish(message.subject, message.body, headers=headers)
        final = messages[-1]
        headers = {**final.wire_headers(), **_batch_headers(name, len(messages))}
        headers["Nats-Batch-Commit"] = "1"
        return await self._request(final.subject, final.body, headers)

    async def _request(self, subject: str, body: bytes, headers: dict[str, str] | None) -> Msg:
        """nats-py would wait out the timeout of a question whose connection has ended."""
        assert self._client is not None
        timeout_s = self._timeout_s
        asked = self._client.request(subject, body, timeout=timeout_s, headers=headers)
        answer = asyncio.ensure_future(asked)
        lost = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise OSError(f"{self._url}: the connection has ended")
        lost.cancel()
        return answer.result()

    # --- asking

    def _ask(self, subject: str, question: Mapping[str, object]) -> dict[str, Any]:
        """Return the API's answer. Raises OSError if there is none."""
        asked = self._request(subject, json.dumps(question).encode(), None)
        try:
            answer: dict[str, Any] = json.loads(self._run(asked).data)
        except nats.errors.Error as error:
            raise OSError(f"{self._url}: {error!r}") from error
        return answer

    def _get(self, question: Mapping[str, object]) -> Stored | None:
        answer = self._ask(f"$JS.API.STREAM.MSG.GET.{STREAM}", question)
        return None if "error" in answer else _stored(answer["message"])


def _batch_headers(name: str, number: int) -> dict[str, str]:
    return {"Nats-Batch-Id": name, "Nats-Batch-Sequence": str(number)}


def _stored(message: Mapping[str, Any]) -> Stored:
    raw = b64decode(message.get("hdrs", "")).decode()
    lines = (line.partition(": ") for line in raw.split("\r\n")[1:])
    headers = {name: value for name, _, value in lines if value}
    body = b64decode(message.get("data", ""))
    return Stored(message["subject"], int(message["seq"]), body, headers)


async def _quiet(error: Exception) -> None:
    """Errors reach the caller; nats-py would print them as well."""
