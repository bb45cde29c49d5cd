"""The registration of the native port, as a dialect among others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.bus.dialect import Dialect
from polybus.errors import ConfigError
from polybus.native.limits import BOUNDS, NativeSettings

if TYPE_CHECKING:
    from pathlib import Path

    from polybus.bus.dialect import DialectServer, ServerContext


async def open_server(context: ServerContext) -> DialectServer:
    from polybus.native.port.port_server import PortServer

    check_token_settings(context.section)
    return PortServer(context)


def check_token_settings(section: NativeSettings) -> None:
    if section.require_token and section.tokens is None:
        raise ConfigError("[native] require_token needs a file of tokens: set tokens")


def check_files(section: NativeSettings, _data: Path) -> None:
    check_token_settings(section)
    if section.tokens is not None:
        import time

        from polybus.transports.flight.authentication import TokenFile

        TokenFile(section.tokens, time.time)


DIALECT = Dialect(
    name="native",
    default_addresses=("grpc://127.0.0.1:6570",),
    schemes=("grpc", "grpc+tls"),
    limits=NativeSettings,
    bounds=BOUNDS,
    client="polybus.native",
    # The client's and both ends of the one to gRPC; with TLS two more.
    descriptors_per_connection=(3, 5),
    open_server=open_server,
    check_files=check_files,
)
