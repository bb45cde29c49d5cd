"""Sabotages of stream connections and of the admin socket."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # Each connection has a receive buffer of its own, instead of one for all.
    Patch(
        "buffer-per-connection",
        "transports/stream_connection.py",
        "        self._open_session = open_session\n",
        '        self._open_session = open_session\n        self._buffer = b"x" * (1 << 20)\n',
    ),
    # A session does not end with its connection.
    Patch(
        "lost-connections-stay",
        "transports/stream_connection.py",
        "        if self._session is not None:\n            self._session.on_ended()\n",
        "",
    ),
    # A line of the admin socket that is not JSON is an unexpected error.
    Patch(
        "bad-lines-raise",
        "server/admin.py",
        "    except (ValueError, RecursionError) as error:\n",
        "    except RecursionError as error:\n",
    ),
]
