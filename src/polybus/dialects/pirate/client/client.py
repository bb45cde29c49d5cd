"""The pirate client for asyncio (any loop, uvloop included).

    async with pirate.connect() as client:
        await client.subscribe("news")
        await client.put("news", b"hello")
        async for message in client.messages("news"):
            print(message.id, message.timestamp_ns, message.body)

Guarantees of the client:

- Its state (id, counters, read positions, the unanswered request) is in its state folder, on
  disk before anything depends on it. The process can be killed at any time and started again.
- PUT, SUB and UNSUB are executed once, however often they had to be sent. A call that raises
  `OutcomeUnknown` or is cancelled may have been executed or not. It is stored and sent again
  before the next one. `resume` sends it now, `forget` abandons it.
- Messages arrive in the order of their ids, each once. `Order` defines what a crash does to the
  message being delivered.
- Another client with the same id fences this one: every later call raises `Fenced`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from polybus.clients.async_client import AsyncClient
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
MAX_NOTICES: Final = 100  # the newest are kept
FIRST_PAUSE_S: Final = 0.005  # doubles up to `poll_s`

log = logging.getLogger("polybus.pirate")


class Client(AsyncClient):
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
        """Lock the state folder and open a new epoch. `async with` calls it.

        Any other client with this id is fenced from now on. Raises `NotConnected` if no bus
        answers.
        """
        if self._folder is not None:
            raise UsageError("a client can be opened once; create another one")
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
        """Send the bus the recorded positions, then release the state folder.

        Waits at most `timeout_s` for the bus. An unanswered request, and positions that the bus
        did not get, stay in the folder.
        """
        was_closed, self._closed = self._closed, True
        try:
            if self._requester is not None and not was_closed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.options.timeout_s):
                        await self._requester.send_lasts()
        finally:
            if self._requester is not None:
                self._requester.close()
            if self._folder is not None:
                await run_to_completion(self._folder.close)

    # --- state

    @property
    def server(self) -> str:
        return self._server

    @property
    def folder(self) -> Path:
        """The state folder."""
        return self._path

    @property
    def id(self) -> bytes:
        return self._require_opened().state.id

    @property
    def counter(self) -> int:
        """The highest counter used with this id."""
        return self._require_opened().state.counter

    @property
    def subscriptions(self) -> dict[str, int]:
        """The subscribed topics in the state folder, each with its LAST."""
        return dict(self._require_opened().state.lasts)

    @property
    def pending(self) -> Pending | None:
        """The request with an unknown outcome, or None."""
        return self._require_opened().state.pending

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the last counted request, also of an earlier start."""
        return self._require_opened().state.outcome

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages for people, for example about a restored bus or an old state folder."""
        return tuple(self._notices)

    # --- counted requests

    async def subscribe(self, topic: str) -> int:
        """Subscribe to all later messages. Creates the topic if it does not exist.

        Returns the id after which reading starts. An existing subscription keeps its position.
        """
        return await self._require_open().execute(codec.SUB, _name(topic))

    async def unsubscribe(self, topic: str) -> bool:
        """End a subscription and drop its unread messages. Returns False if there was none."""
        return bool(await self._require_open().execute(codec.UNSUB, _name(topic)))

    async def put(self, topic: str, body: bytes | bytearray | memoryview) -> int:
        """Put a message. Returns its id once it is on the bus's disk.

        Raises `DoesNotExist` if there is no such topic, and `TooLarge`.
        """
        raw = bytes(body)
        if len(raw) > codec.MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"a message must have at most {codec.MAX_MESSAGE_BYTES} bytes, got {len(raw)}"
            )
        return await self._require_open().execute(codec.PUT, _name(topic), raw)

    async def resume(self) -> Outcome | None:
        """Send the request with an unknown outcome again. Returns its outcome, or None."""
        return await self._require_open().resume()

    async def forget(self) -> Fate | None:
        """Abandon the request with an unknown outcome. Returns its `Fate`, or None."""
        return await self._require_open().forget()

    # --- reading

    async def get(
        self, topic: str, *, order: Order | str = Order.RECORD_THEN_DELIVER
    ) -> Message | None:
        """Return the first unread message, or None.

        With deliver-then-record the message counts as read after `record`; until then `get`
        returns it again.
        """
        first = parse_order(order) is Order.RECORD_THEN_DELIVER
        return await self._require_open().fetch(_name(topic), first)

    async def record(self, message: Message) -> None:
        """Record that this message and all earlier ones of its topic were read."""
        await self._require_open().record(message)

    async def messages(
        self,
        topic: str,
        *,
        order: Order | str = Order.DELIVER_THEN_RECORD,
        wait: bool = True,
    ) -> AsyncIterator[Message]:
        """Iterate over unread and new messages. Without `wait` it ends when none is left.

        With deliver-then-record a message counts as read when the next one is requested, so a
        `break` leaves the last one unread. If the bus is unreachable, the iterator waits for it.
        """
        name, first = _name(topic), parse_order(order) is Order.RECORD_THEN_DELIVER
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                message = await self._require_open().fetch(name, first)
            except Unavailable as error:
                if not wait or self._closed or isinstance(error, StoreFull):
                    raise
                self._add_notice(f"{error}; waiting to continue reading {name!r}")
                message = None
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

    def _take_folder(self) -> ClientFolder:
        self._folder = ClientFolder(self._path, self._given_id)
        return self._folder

    def _require_opened(self) -> Requester:
        if self._requester is None:
            raise UsageError("the client is not open; use it in a `with` or call open()")
        return self._requester

    def _require_open(self) -> Requester:
        requester = self._require_opened()
        if self._closed:
            raise NotConnected("the client is closed")
        return requester

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
    """Return a client of the bus at `server` (any ZeroMQ endpoint). Use it in `async with`.

    `state` is the state folder; default: one per bus and id in `$XDG_STATE_HOME/polybus-pirate`.
    `id` is the client id instead of a random one (`hex:…` for bytes). `curve` is the folder of
    the keys, or True for the default folder; the id is then the key's. `on_notice` is called
    with each line of `Client.notices`; without it they are logged. `ClientOptions` documents
    the other settings.
    """
    options = ClientOptions(timeout_s, tries, jitter_s, poll_s, reread)
    own: ClientKeys | None = None
    if curve is not None and curve is not False:
        folder = client_keys.keys_folder(os.environ) if curve is True else Path(curve)
        own = client_keys.load_keys(folder)
    client_id = _chosen_id(id, own)
    path = default_folder(server, client_id, os.environ) if state is None else Path(state)
    return Client(server, path, options, client_id=client_id, curve=own, on_notice=on_notice)


def _chosen_id(given: str | bytes | None, own: ClientKeys | None) -> bytes | None:
    chosen = identity.parse_client_id(given) if isinstance(given, str) else given
    if chosen is not None:
        identity.check_client_id(chosen)
    if own is None or chosen == own.client_id:
        return chosen
    if chosen is None:
        return own.client_id
    raise UsageError(
        f"with CURVE the id must be that of the key, {identity.format_client_id(own.client_id)};"
        " omit id"
    )
