"""A Freud connection in the fields of `polybus connections`.

The fan-out knows only what is pushed; here messages are those produced and those read.
`outbox_bytes` are answers that the client has not taken. The state is what halts the
connection (session.py), or `ending`: the client is gone, and what it asked for is not
all done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.dialects.freud.server.session import FreudSession


def session_stats(session: FreudSession) -> dict[str, int | str]:
    answers = session.answers
    return {
        "subscriptions": session.subscription_count,
        "received_messages": session.received_messages,
        "received_bytes": session.received_bytes,
        "sent_messages": session.sent_messages + answers.sent_messages,
        "sent_bytes": session.sent_bytes + answers.sent_bytes,
        "outbox_bytes": answers.unsent_bytes,
        "state": session.state,
    }
