"""A stage: batches that nobody sees until it is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from polybus.model.arrow import block_of
from polybus.native.client.produce_messages import check_bodies, check_rows, merge_messages

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.inprocess.inprocess_bus import InProcessBus
    from polybus.native.port.native_port import Caller


class InProcessStage:
    """What was put stays until it is published (`Bus.publish`) or its lease ends."""

    def __init__(
        self, core: InProcessBus, caller: Caller, name: str, now_ms: Callable[[], int]
    ) -> None:
        self.name = name
        self._core = core
        self._caller = caller
        self._now_ms = now_ms

    def put(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> None:
        """On disk when this returns."""
        self.put_rows(topic, merge_messages([check_bodies(bodies, keys, self._now_ms())]))

    def put_rows(self, topic: str, rows: pa.RecordBatch) -> None:
        """The same, of a batch in the port's schema."""
        block = block_of(check_rows(rows).batch, self._now_ms())
        self._core.port.produce(self._caller, topic).stage(self.name, block).result()

    def close(self) -> None:
        """There is nothing to end here."""
