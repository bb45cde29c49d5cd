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
    # Resets of all clients are passed on to gRPC as they come.
    Patch(
        "resets-unpaced",
        "transports/flight/front_listener.py",
        "        self._relay = Http2Relay(max_resets_per_s, RESETS_PER_S, RESET_THREADS)\n",
        "        self._relay = Http2Relay(1 << 30, 1e9, 1 << 20)\n",
    ),
    # A client may reset any number of calls.
    Patch(
        "resets-uncounted",
        "transports/flight/flight_listener.py",
        "            options, self._grpc, self._limits.max_resets_per_s, self._report_cut\n",
        "            options, self._grpc, 1 << 30, self._report_cut\n",
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
