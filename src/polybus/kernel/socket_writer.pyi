from asyncio import WriteTransport
from typing import final

@final
class SocketWriter:
    def __init__(self, descriptor: int, transport: WriteTransport) -> None: ...
    def write(self, data: bytes) -> None: ...
