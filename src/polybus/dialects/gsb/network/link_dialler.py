"""Dials the buses to which this one is linked, and dials again when a link ends.

    [gsb.links]
    office = "tls+tcp://bus.example:6569#0x…"

The part after `#` is the id that the other node must have. Without it any node that answers there
is accepted. The pause between two tries grows from 0.2 to 10 seconds, with jitter, and starts again
after a link that was up.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polybus.errors import AddressError, Conflict, DoesNotExist, LimitReached
from polybus.model.address import Address
from polybus.model.identity import is_node_id

if TYPE_CHECKING:
    from polybus.bus.connection import ConnectionIO
    from polybus.bus.dialect import DialectDialler, StreamDialectServer
    from polybus.dialects.gsb.network.link import Link
    from polybus.dialects.gsb.server.session import GsbServer, GsbSession

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 10.0
SCHEMES = ("tls+tcp", "tcp")


class LinkTarget:
    """An address to dial, and the id that its node must have, or an empty one."""

    def __init__(self, text: str) -> None:
        """Raises `AddressError`."""
        place, _, node_id = text.partition("#")
        if node_id and not is_node_id(node_id):
            raise AddressError(f"{text}: a node id must be 0x and 40 hex digits, got {node_id!r}")
        self.text = text
        self.node_id = node_id
        self.address = Address.parse(place)
        if self.address.scheme not in SCHEMES:
            raise AddressError(f"{text}: a link must be {' or '.join(SCHEMES)}")
        if not self.address.port:
            raise AddressError(f"{text}: a link must name the port of the other bus")
        if not (self.address.is_encrypted or self.address.is_loopback):
            raise AddressError(f"{text}: a link to another machine must be tls+tcp")


class DialledLink:
    """One address that is dialled, and again after each end of its link."""

    def __init__(
        self, server: GsbServer, streams: StreamDialectServer, target: LinkTarget, log: Any
    ) -> None:
        self.target = target
        self._log = log
        self._server = server
        self._streams = streams
        self._dialler: DialectDialler = streams.dialler(self._open_session)
        self.link: Link | None = None
        self.error = ""
        self._is_stopping = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Dial no longer. A link that is up ends with all connections of the bus."""
        self._is_stopping = True
        if self.link is None:
            self._task.cancel()

    async def close(self) -> None:
        """End the link, if there is one, and wait for its end."""
        if not self._task.cancelling():  # a second cancel would end its clean-up
            self._task.cancel()
        await asyncio.wait([self._task])

    def _open_session(self, pipe: ConnectionIO) -> GsbSession:
        session = self._server(pipe)
        network, target = self._server.network, self.target
        self.link = network.open_link(session, target.text, target.node_id)
        return session

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                try:
                    await self._dialler.dial(self.target.address)
                    await self._dialler.wait_ended()
                except (OSError, UnicodeError) as error:
                    self._set_error(_text_of(error))
                else:
                    self._on_ended()
                if self._is_stopping:
                    return
                if self.link is not None and self.link.is_up:
                    pause_s = FIRST_PAUSE_S
                self.link = None
                await asyncio.sleep(pause_s * (0.5 + random.random() / 2))
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        finally:
            await self._dialler.drain(0)
            self._streams.forget(self._dialler)

    def _on_ended(self) -> None:
        if self.link is None:
            self._set_error("the TLS handshake failed; is it a tls+tcp listener of GSB?")
        elif self.link.end_reason:
            node = self.link.node_id or "an unproved node"
            self._set_error(f"this bus ended the link with {node}: {self.link.end_reason}")
        elif not self.link.is_up:
            self._set_error("the other end refused the link; the log of that bus has the reason")
        else:
            self.error = ""

    def _set_error(self, text: str) -> None:
        if text != self.error:
            self._log.warning("link failed", address=self.target.text, reason=text)
        self.error = text


def _text_of(error: OSError | UnicodeError) -> str:
    # The event loop replaces the kernel's text of a failed connect by one without the reason.
    number = error.errno if isinstance(error, OSError) else None
    known = os.strerror(number) if number is not None and number > 0 else ""
    return known or getattr(error, "strerror", None) or str(error) or "no answer"


class LinkDialler:
    def __init__(
        self, server: GsbServer, streams: StreamDialectServer, links: Mapping[str, str], log: Any
    ) -> None:
        """Dial all links of the config. Raises `AddressError` for an invalid one."""
        self._server = server
        self._streams = streams
        self._log = log
        self._links: dict[str, DialledLink] = {}
        self._ending: set[asyncio.Task[None]] = set()
        for text in links.values():
            self.add(text)

    def add(self, text: str) -> None:
        """Dial one more address. Raises `AddressError`, `Conflict` or `LimitReached`."""
        target, network = LinkTarget(text), self._server.network
        if text in self._links:
            raise Conflict(f"{text} is dialled already")
        if not network.has_room():
            raise LimitReached("max_links", "max_links is reached; remove a link or raise it")
        network.dialled[text] = target.node_id
        self._links[text] = DialledLink(self._server, self._streams, target, self._log)

    def remove(self, text: str) -> None:
        """Dial an address no longer, and end its link. Raises `DoesNotExist`."""
        found = self._links.pop(text, None)
        if found is None:
            raise DoesNotExist(f"{text} is not dialled")
        self._server.network.dialled.pop(text, None)
        ending = asyncio.get_running_loop().create_task(found.close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def stop(self) -> None:
        """Dial no address again. Links end with the other connections."""
        for link in self._links.values():
            link.stop()

    async def close(self) -> None:
        """End all links, and wait until they have ended."""
        await asyncio.gather(*self._ending, *(link.close() for link in self._links.values()))

    def describe(self) -> list[dict[str, Any]]:
        network = self._server.network
        rows = []
        for text, one in sorted(self._links.items()):
            node = network.dialled[text]
            is_up = node in network.links  # if both buses dial, the link may be the other's
            error = "" if is_up else one.error
            state = "up" if is_up else "down"
            row = {"address": text, "node": node, "state": state, "peer": "", "error": error}
            rows.append(row)
        return rows
