"""The plan of one run of the server: everything is decided and checked, nothing is opened.

The commands build a `ServerPlan` from flags, environment and file, and `server.app` runs it.
`polybus config check` only builds it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polybus.bus.dialect_registry import installed_dialects
from polybus.errors import ConfigError
from polybus.model.socket_path import runtime_folder
from polybus.server.config import DEFAULT, Flag, LoadedSettings
from polybus.server.folders import data_folder
from polybus.server.listener_plan import ListenerSpec, plan_listeners
from polybus.store.engine_registry import default_url, schemes


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One run: settings, listeners, folders. `data` is None where nothing is kept.

    `engine` is the URL of the store; None: a bus without durable topics.
    """

    loaded: LoadedSettings
    listeners: tuple[ListenerSpec, ...]
    runtime: Path
    data: Path | None
    uid: int
    engine: str | None = None


def plan_serve(loaded: LoadedSettings, environ: Mapping[str, str]) -> ServerPlan:
    """Return the plan of the whole bus (`polybus serve`)."""
    _check_engine(loaded)
    uid = os.getuid()
    runtime = runtime_folder(environ, uid)
    data = (loaded.settings.data or data_folder(environ, uid)).absolute()
    engine = loaded.settings.engine or default_url(data)
    return ServerPlan(loaded, plan_listeners(loaded, runtime), runtime, data, uid, engine)


def plan_without_store(
    loaded: LoadedSettings, environ: Mapping[str, str], admin: bool
) -> ServerPlan:
    """Return the plan of listeners without a store and a data folder (`polybus rqueue`)."""
    uid = os.getuid()
    runtime = runtime_folder(environ, uid)
    return ServerPlan(loaded, plan_listeners(loaded, runtime, admin), runtime, None, uid)


def check_exclusive(data: Flag, engine: Flag) -> None:
    if data.value is not None and engine.value is not None:
        raise ConfigError(f"{data.name} and {engine.name} exclude each other: give one")


def check_files(loaded: LoadedSettings) -> None:
    """Check the files that settings name, for `polybus config check`."""
    from polybus.server import rule_set

    rule_set.load_rule_set(loaded, None)
    rule_set.load_user_quotas(loaded)
    if loaded.settings.tls.certificate is not None:
        from polybus.server.certificates import Certificates

        Certificates(loaded.settings.tls)
    data = (loaded.settings.data or data_folder(os.environ, os.getuid())).absolute()
    for dialect in installed_dialects():
        if dialect.check_files is not None:
            dialect.check_files(loaded.settings.section(dialect.name), data)


def _check_engine(loaded: LoadedSettings) -> None:
    url = loaded.settings.engine
    if not url:
        return
    source = loaded.sources.get("engine", DEFAULT)
    scheme = url.partition(":")[0]
    if scheme == "nats":
        raise ConfigError(f"{source}: engine {url!r} is still to come")
    if scheme not in schemes():
        known = ", ".join(schemes())
        raise ConfigError(f"{source}: unknown engine {url!r}: the engines are {known}")
