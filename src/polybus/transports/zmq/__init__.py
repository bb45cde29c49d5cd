"""ZeroMQ: a ROUTER socket drained from the loop, its connections watched and bounded."""
