"""The registration of the FDQ dialect. It has no listener: its client speaks to the native port."""

from __future__ import annotations

from polybus.bus.dialect import Command, Dialect

DIALECT = Dialect(
    name="fdq",
    client="polybus.dialects.fdq",
    commands=(
        Command("fdq", "polybus.dialects.fdq.cli", "Sharded queues: produce, consume, replay."),
    ),
)
