from typing_extensions import Buffer

from polybus.bus.connection import ConnectionIO
from polybus.dialects.freud.server.answer_queue import AnswerQueue
from polybus.dialects.freud.server.plain_delivery import PlainDelivery
from polybus.dialects.freud.server.request_scanner import (
    GetRun,
    Group,
    ProduceRun,
    RequestScanner,
)
from polybus.dialects.freud.server.unread_queue import UnreadQueue
from polybus.kernel.fanout import Source

OPEN: int
CLOSING: int
ENDING: int
DEPARTED: int
NOT_HALTED: int
RESTING: int
STEP_BYTES: int
MAX_UNSCANNED_BYTES: int

class PlainSession:
    phase: int
    halt: int
    pending: list[Group]
    weight_left: int
    uncommitted: int
    received_messages: int
    received_bytes: int
    def __init__(
        self,
        pipe: ConnectionIO,
        scanner: RequestScanner,
        delivery: PlainDelivery,
        answers: AnswerQueue,
        source: Source,
        account: int | str | None,
    ) -> None: ...
    @property
    def answers(self) -> AnswerQueue: ...
    @property
    def pipe(self) -> ConnectionIO: ...
    @property
    def is_halted(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    def receive(self, buffer: Buffer, start: int, end: int) -> int: ...
    def run(self) -> None: ...
    def answer_produced(self, run: ProduceRun, first_id: int) -> None: ...
    def count_received(self, run: ProduceRun) -> None: ...
    def read(self, run: GetRun, reader: UnreadQueue) -> bool: ...
    def answer_messages(self, run: GetRun, reader: UnreadQueue, most: int) -> int: ...
    def answer_gets(self, run: GetRun, code: int, count: int) -> None: ...
