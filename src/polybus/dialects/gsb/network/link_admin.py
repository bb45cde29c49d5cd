"""Admin actions for links: list them, dial one more, and end one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.errors import AddressError, Conflict, DoesNotExist, PolybusError

if TYPE_CHECKING:
    from polybus.bus.dialect import ServerContext
    from polybus.dialects.gsb.network.link_dialler import LinkDialler
    from polybus.dialects.gsb.server.session import GsbServer
    from polybus.model.identity import Identity

# Codes of errors that the admin socket names otherwise.
CODES = {
    AddressError.code: "bad_request",
    Conflict.code: "refused",
    DoesNotExist.code: "not_found",
}


class LinkAdmin:
    """The verbs. The server exists once GSB listens."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def verbs(self) -> Mapping[str, AdminVerb]:
        keys = frozenset({"address"})
        return {
            "gsb_links": AdminVerb(self._list),
            "gsb_link_add": AdminVerb(self._add, keys=keys),
            "gsb_link_rm": AdminVerb(self._remove, keys=keys),
        }

    def _list(self, _request: Request, _caller: Identity) -> dict[str, Any]:
        server, dialler = self._server()
        dialled = dialler.describe()
        accepted = [
            {
                "address": "",
                "node": link.node_id,
                "state": "up",
                "peer": link.session.connection.pipe.peer,
                "error": "",
            }
            for link in server.network.links.values()
            if not link.is_dialled
        ]
        return {"links": [*dialled, *accepted]}

    def _add(self, request: Request, _caller: Identity) -> dict[str, Any]:
        _, dialler = self._server()
        return self._change(dialler.add, request)

    def _remove(self, request: Request, _caller: Identity) -> dict[str, Any]:
        _, dialler = self._server()
        return self._change(dialler.remove, request)

    def _change(self, change: Any, request: Request) -> dict[str, Any]:
        address = request.get("address")
        if not isinstance(address, str):
            raise AdminError("bad_request", f"address must be a string, got {address!r:.64}")
        try:
            change(address)
        except PolybusError as error:
            raise AdminError(CODES.get(error.code, error.code), str(error)) from None
        return {"address": address}

    def _server(self) -> tuple[GsbServer, LinkDialler]:
        server: GsbServer | None = self._context.attached
        if server is None or server.dialler is None:
            raise AdminError("not_found", "the bus has no listener of gsb")
        return server, server.dialler
