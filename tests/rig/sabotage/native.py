"""Sabotages of the native port."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # gRPC accepts any number of streams of a connection.
    Patch(
        "grpc-unbounded",
        "transports/flight/flight_handler.py",
        "            max_streams=limits.max_streams,\n",
        "            max_streams=1 << 30,\n",
    ),
    # gRPC accepts many streams of a connection, but not so many that the host has no thread left.
    Patch(
        "grpc-many-streams",
        "transports/flight/flight_handler.py",
        "            max_streams=limits.max_streams,\n",
        "            max_streams=2000,\n",
    ),
    # A client may cancel any number of calls.
    Patch(
        "resets-uncounted",
        "transports/flight/flight_listener.py",
        "            limits.max_resets_per_s,\n",
        "            1 << 30,\n",
    ),
    # Compressed batches are unpacked, whatever their size.
    Patch(
        "unpacked-unbounded",
        "transports/flight/flight_listener.py",
        "            limits.max_unpacked_bytes,\n            limits.max_user_unpacked_bytes,\n",
        "            1 << 60,\n            1 << 60,\n",
    ),
    # Tokens are checked at the start of a call only.
    Patch(
        "tokens-checked-once",
        "transports/flight/authentication.py",
        '            raise Unauthenticated("this token was removed")\n        self._check_expiry(current)\n',
        "            return\n",
    ),
]
