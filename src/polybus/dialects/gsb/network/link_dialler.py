"""Dials the buses to which this one is linked, and dials again when a link ends.

    [gsb.links]
    office = "tls+tcp://bus.example:6569#0x…"

The part after `#` is the id that the other node must have. Without it any node that answers there
is accepted. The pause between two tries grows from 0.2 to 10 seconds, with jitter, and starts again
after a link that was up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polybus.errors import AddressError, Conflict, DoesNotExist
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
        self._dialler: DialectDialler = streams.dialler(self._open_session)
        self.link: Link | None = None
        self.error = ""
        self.task = asyncio.get_running_loop().create_task(self._run())

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
                    self.error = ""
                except (OSError, UnicodeError) as error:
                    self._set_error(error)
                if self.link is not None and self.link.is_up:
                    pause_s = FIRST_PAUSE_S
                self.link = None
                await asyncio.sleep(pause_s * (0.5 + random.random() / 2))
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        finally:
            await self._dialler.drain(0)

    def _set_error(self, error: Exception) -> None:
        text = getattr(error, "strerror", None) or str(error) or "no answer"
        if text != self.error:
            self._log.warning("link failed", address=self.target.text, reason=text)
        self.error = text


class LinkDialler:
    def __init__(
        self, server: GsbServer, streams: StreamDialectServer, links: Mapping[str, str], log: Any
    ) -> None:
        """Dial all links of the config. Raises `AddressError` for an invalid one."""
        self._server = server
        self._streams = streams
        self._log = log
        self._links: dict[str, DialledLink] = {}
        for text in links.values():
            self.add(text)

    def add(self, text: str) -> None:
        """Dial one more address. Raises `AddressError` or `Conflict`."""
        target = LinkTarget(text)
        if text in self._links:
            raise Conflict(f"{text} is dialled already")
        self._links[text] = DialledLink(self._server, self._streams, target, self._log)

    def remove(self, text: str) -> None:
        """Dial an address no longer, and end its link. Raises `DoesNotExist`."""
        found = self._links.pop(text, None)
        if found is None:
            raise DoesNotExist(f"{text} is not dialled")
        found.task.cancel()

    def stop(self) -> None:
        for link in self._links.values():
            link.task.cancel()
        self._links.clear()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "address": text,
                "node": one.link.node_id if one.link is not None else "",
                "state": "up" if one.link is not None and one.link.is_up else "down",
                "peer": "",
                "error": one.error,
            }
            for text, one in sorted(self._links.items())
        ]
