"""The admin verb `connections`: the open connections, page by page.

→ {"verb": "connections", "after": "", "limit": 100}
← {"ok": {"connections": [...], "next": "0.517"}}       next is null on the last page
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.errors import UsageError

if TYPE_CHECKING:
    from polybus.bus.connection_list import ConnectionList
    from polybus.model.identity import Identity

DEFAULT_ROWS = 100
MAX_ROWS = 500
# Connections described in one step of the loop, which takes about a millisecond.
STEP_ROWS = 100


def connections_verb(connections: ConnectionList) -> AdminVerb:
    async def answer(request: Request, _identity: Identity) -> dict[str, Any]:
        after, limit = request.get("after") or "", request.get("limit", DEFAULT_ROWS)
        if not isinstance(after, str):
            raise AdminError("bad_request", "after must be a string")
        if type(limit) is not int or not 1 <= limit <= MAX_ROWS:
            raise AdminError("bad_request", f"limit must be 1 to {MAX_ROWS}, got {limit!r:.64}")
        rows: list[dict[str, Any]] = []
        following: str | None = after
        while following is not None and len(rows) < limit:
            if rows:
                await asyncio.sleep(0)  # messages pass between two steps
            try:
                step, following = connections.page(following, min(STEP_ROWS, limit - len(rows)))
            except UsageError as error:
                raise AdminError("bad_request", str(error)) from None
            rows += step
        return {"connections": rows, "next": following}

    return AdminVerb(answer, keys=frozenset({"after", "limit"}))
