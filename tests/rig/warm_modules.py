"""The code of buses and commands. The fork server of `warm_bus` imports this module once.

Loading it here saves each forked process up to 0.2 s. A dialect whose folder was removed is left
out (tests/unit/test_dialect_removal.py).
"""

from __future__ import annotations

from importlib import import_module

from polybus.bus.dialect_registry import installed_dialects
from polybus.cli.main import NOUNS
from tests.rig.installed_dialects import has_dialect

# Those that the other modules import within functions.
MODULES = (
    "polybus.server.app",
    "polybus.bus.framing_listeners",
    "polybus.store.lmdb.lmdb_engine",
    "polybus.store.lmdb.lmdb_store",
    "polybus.store.lmdb.verification",
    "polybus.store.memory.memory_engine",
    "polybus.store.memory.memory_store",
    "polybus.transports.flight.flight_listener",
    "polybus.native.port.port_server",
    "polybus.native.bus_client",
    "polybus.native.client.client",
    "cryptography.hazmat.backends.openssl",
    "email.parser",
    "encodings.idna",
    "pydantic.plugin._loader",
    "typer._adapters",
    "typer._click.decorators",
)
DIALECT_MODULES = {
    "rqueue": ("server.session", "client.client"),
    "freud": ("server.session", "server.subscription_admin", "client.client"),
    "gsb": ("network.link_admin", "network.link_dialler", "ya.session", "client.client"),
    "pirate": ("server.pirate_server", "server.client_admin", "server.subscriber_admin"),
    "fdq": ("client.producer", "client.consumer"),
}

for _module in MODULES:
    import_module(_module)
for _module, _ in NOUNS.values():
    import_module(_module)
for _command in installed_dialects().commands:
    import_module(_command.module)
for _dialect, _modules in DIALECT_MODULES.items():
    for _module in _modules if has_dialect(_dialect) else ():
        import_module(f"polybus.dialects.{_dialect}.{_module}")
