"""The pirate client for asyncio (any loop, uvloop included).

    async with pirate.connect() as client:
        await client.subscribe("news")
        await client.put("news", b"hello")
        async for message in client.messages("news"):
            print(message.id, message.timestamp_ns, message.body)

What the client promises:

- What it knows (its id, counters, how far it has read, the request without an answer) is in
  its state folder, on disk before it matters. Kill it when you like, and start it again.
- PUT, SUB and UNSUB are carried out once, however often they had to be sent. A call that
  raises `OutcomeUnknown`, or was cancelled, may have been carried out or not; it is kept,
  and sent again before the next one. `resume` does that now, `forget` gives it up.
- Messages come in the order of their ids, each once; `Order` says what a crash can do to the
  one that is being handed over.
- Somebody else with the same id makes it `Fenced`: it changes and reads nothing any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from polybus.dialects.pirate import client_id as identity
from polybus.dialects.pirate import codec
from polybus.dialects.pirate.client import client_keys
from polybus.dialects.pirate.client.client_keys import ClientKeys
from polybus.dialects.pirate.client.journal_state import Outcome, Pending
from polybus.dialects.pirate.client.pirate_options import (
    DEFAULT_SERVER,
    ClientOptions,
    Order,
    parse_order,
)
from polybus.dialects.pirate.client.requester import Fate, Message, Requester
from polybus.dialects.pirate.client.state_folder import (
    ClientFolder,
    default_folder,
    run_to_completion,
)
from polybus.errors import NotConnected, StoreFull, TooLarge, Unavailable, UsageError
from polybus.model import topic_name

DEFAULTS: Final = ClientOptions()
MAX_NOTICES: Final = 100  # the newest ones are kept
FIRST_PAUSE_S: Final = 0.005  # then twice as long each time, up to `poll_s`

log = logging.getLogger("polybus.pirate")


class Client:
    """One client of one bus. Use it in `async with`, or call `open` and `close`."""

    def __init__(
        self,
        server: str,
        state: Path,
        options: ClientOptions,
        *,
        client_id: bytes | None = None,
        curve: ClientKeys | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self._server = server
        self.options = options
        self._path = state
        self._given_id = client_id
        self._curve = curve
        self._on_notice = on_notice or log.warning
        self._notices: deque[str] = deque(maxlen=MAX_NOTICES)
        self._folder: ClientFolder | None = None
        self._requester: Requester | None = None
        self._closed = False

    # --- opening and closing

    async def open(self) -> None:
        """Take the state folder and a new epoch; `NotConnected` if no bus answers.

        `async with` calls it. Any other client with this id is fenced from now on.
        """
        if self._folder is not None:
            raise UsageError("a client opens once: make another one")
        try:
            folder = await run_to_completion(self._take_folder)
            self._requester = Requester(
                folder, self._server, self.options, self._curve, self._add_notice
            )
            await self._requester.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let go of the folder. A request without an answer stays in it."""
        self._closed = True
        if self._requester is not None:
            self._requester.close()
        if self._folder is not None:
            await run_to_completion(self._folder.close)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- what it knows

    @property
    def server(self) -> str:
        return self._server

    @property
    def folder(self) -> Path:
        """Where its state is."""
        return self._path

    @property
    def id(self) -> bytes:
        return self._require_opened().state.id

    @property
    def counter(self) -> int:
        """The highest counter that was used for this id."""
        return self._require_opened().state.counter

    @property
    def subscriptions(self) -> dict[str, int]:
        """The topics that this folder knows to be subscribed, each with its LAST."""
        return dict(self._require_opened().state.lasts)

    @property
    def pending(self) -> Pending | None:
        """The request whose outcome is not known, if there is one."""
        return self._require_opened().state.pending

    @property
    def outcome(self) -> Outcome | None:
        """How the last counted request ended, also one of an earlier start."""
        return self._require_opened().state.outcome

    @property
    def notices(self) -> tuple[str, ...]:
        """What people should know: an old copy of the state, a bus that was restored, …"""
        return tuple(self._notices)

    # --- counted requests

    async def subscribe(self, topic: str) -> int:
        """Get all that is put from now on; the id after which it begins. Makes the topic.

        A topic that is subscribed stays as it is: what was not read is still to come.
        """
        return await self._require_open().execute(codec.SUB, _name(topic))

    async def unsubscribe(self, topic: str) -> bool:
        """End it; False if there was no subscription. What was not read is gone."""
        return bool(await self._require_open().execute(codec.UNSUB, _name(topic)))

    async def put(self, topic: str, body: bytes | bytearray | memoryview) -> int:
        """Put a message: its id, once it is on the bus's disk. `DoesNotExist`: no such topic."""
        raw = bytes(body)
        if len(raw) > codec.MAX_MESSAGE_BYTES:
            raise TooLarge(f"a message has at most {codec.MAX_MESSAGE_BYTES} bytes, not {len(raw)}")
        return await self._require_open().execute(codec.PUT, _name(topic), raw)

    async def resume(self) -> Outcome | None:
        """Send the request of unknown outcome again: how it ended. None if there is none."""
        return await self._require_open().resume()

    async def forget(self) -> Fate | None:
        """Give it up: what is known of it (`Fate`). None if there is none."""
        return await self._require_open().forget()

    # --- reading

    async def get(
        self, topic: str, *, order: Order | str = Order.RECORD_THEN_DELIVER
    ) -> Message | None:
        """The first message that was not read; None if none is left.

        With deliver-then-record it counts as read once you call `record` with it: until
        then `get` returns it again.
        """
        first = parse_order(order) is Order.RECORD_THEN_DELIVER
        return await self._require_open().fetch(_name(topic), first)

    async def record(self, message: Message) -> None:
        """This message, and all before it in its topic, were read."""
        await self._require_open().record(message)

    async def messages(
        self,
        topic: str,
        *,
        order: Order | str = Order.DELIVER_THEN_RECORD,
        wait: bool = True,
    ) -> AsyncIterator[Message]:
        """All that was not read, and what comes. Without `wait` it ends when none is left.

        With deliver-then-record a message counts as read when the next one is asked for; a
        loop that is left by `break` has not read its last. A bus that is away is waited for.
        """
        name, first = _name(topic), parse_order(order) is Order.RECORD_THEN_DELIVER
        pause_s = FIRST_PAUSE_S
        while True:
            message = await self._fetch(name, first, wait)
            if message is not None:
                pause_s = FIRST_PAUSE_S
                yield message
                if not first:
                    await self.record(message)
            elif not wait:
                return
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self.options.poll_s)

    # --- inside

    async def _fetch(self, topic: str, record: bool, patient: bool) -> Message | None:
        try:
            return await self._require_open().fetch(topic, record)
        except Unavailable as error:
            if not patient or self._closed or isinstance(error, StoreFull):
                raise
            self._add_notice(f"{error}; waiting for it to read on in {topic!r}")
            return None

    def _take_folder(self) -> ClientFolder:
        self._folder = ClientFolder(self._path, self._given_id)
        return self._folder

    def _require_opened(self) -> Requester:
        if self._requester is None:
            raise UsageError("the client is not open: use it in a `with`, or call open()")
        return self._requester

    def _require_open(self) -> Requester:
        asking = self._require_opened()
        if self._closed:
            raise NotConnected("the client is closed")
        return asking

    def _add_notice(self, notice: str) -> None:
        self._notices.append(notice)
        self._on_notice(notice)


def _name(topic: str) -> str:
    topic_name.check_topic_name(topic)
    return topic


def connect(
    server: str = DEFAULT_SERVER,
    *,
    id: str | bytes | None = None,  # noqa: A002 (its name on the command line, too)
    state: str | os.PathLike[str] | None = None,
    curve: bool | str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULTS.timeout_s,
    tries: int = DEFAULTS.tries,
    jitter_s: float = DEFAULTS.jitter_s,
    poll_s: float = DEFAULTS.poll_s,
    reread: bool = DEFAULTS.reread,
    on_notice: Callable[[str], None] | None = None,
) -> Client:
    """A client of the bus at `server` (any ZeroMQ endpoint), to be used in a `with`.

    `state` is its folder, else one for this bus and id in `$XDG_STATE_HOME/polybus-pirate`.
    `id` is a name of its own instead of a random one (`hex:…` for bytes). `curve` is the
    folder of its keys, or True for the usual one; the id is then the key's. `on_notice` is
    called with each line of `Client.notices`; without it they are logged. See
    `ClientOptions` for what each setting does.
    """
    options = ClientOptions(timeout_s, tries, jitter_s, poll_s, reread)
    own = _keys(curve)
    client_id = _chosen_id(id, own)
    path = default_folder(server, client_id, os.environ) if state is None else Path(state)
    return Client(server, path, options, client_id=client_id, curve=own, on_notice=on_notice)


def _keys(curve: bool | str | os.PathLike[str] | None) -> ClientKeys | None:
    if curve is None or curve is False:
        return None
    return client_keys.load_keys(
        client_keys.keys_folder(os.environ) if curve is True else Path(curve)
    )


def _chosen_id(given: str | bytes | None, own: ClientKeys | None) -> bytes | None:
    chosen = identity.parse_client_id(given) if isinstance(given, str) else given
    if chosen is not None:
        identity.check_client_id(chosen)
    if own is None or chosen == own.client_id:
        return chosen
    if chosen is None:
        return own.client_id
    raise UsageError(
        f"with CURVE the id is that of the key, {identity.format_client_id(own.client_id)}:"
        " leave id out"
    )
