"""What a run of the server is to do: everything decided and checked, nothing opened.

The commands (`polybus serve`, `polybus rqueue`) make a `Program` out of flags,
environment and file; `server.app` runs it; `polybus config check` makes one and
throws it away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polybus.errors import ConfigError
from polybus.model.socket_path import runtime_folder
from polybus.server.config import DEFAULT, Flag, LoadedSettings
from polybus.server.folders import data_folder
from polybus.server.listener_plan import ListenerSpec, plan_listeners

ENGINES = ("memory", "lmdb", "nats")
PIRATE_KEYS = "pirate"  # the folder in the data folder where CURVE keys are
STORE_NAME = "store"  # the folder in the data folder where durable topics are


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
    """The whole bus (`polybus serve`)."""
    _check_engine(loaded)
    uid = os.getuid()
    runtime = runtime_folder(environ, uid)
    data = (loaded.settings.data or data_folder(environ, uid)).absolute()
    engine = loaded.settings.engine or f"lmdb:{data / STORE_NAME}"
    return ServerPlan(loaded, plan_listeners(loaded, runtime), runtime, data, uid, engine)


def locate_curve_keys(loaded: LoadedSettings, environ: Mapping[str, str]) -> Path:
    """The folder of the CURVE keys of a bus."""
    data = loaded.settings.data or data_folder(environ, os.getuid())
    return (loaded.settings.pirate.keys or data / PIRATE_KEYS).absolute()


def plan_without_store(
    loaded: LoadedSettings, environ: Mapping[str, str], admin: bool
) -> ServerPlan:
    """The rqueue server and nothing else (`polybus rqueue`)."""
    uid = os.getuid()
    runtime = runtime_folder(environ, uid)
    return ServerPlan(loaded, plan_listeners(loaded, runtime, admin), runtime, None, uid)


def check_exclusive(data: Flag, engine: Flag) -> None:
    if data.value is not None and engine.value is not None:
        raise ConfigError(f"{data.name} and {engine.name} exclude each other: give one")


def check_files(loaded: LoadedSettings) -> None:
    """What only reading files can tell; for `polybus config check`."""
    from polybus.server import rule_set

    rule_set.load_rule_set(loaded, None)
    rule_set.load_user_quotas(loaded)
    if loaded.settings.tls.certificate is not None:
        from polybus.server.certificates import Certificates

        Certificates(loaded.settings.tls)
    if loaded.settings.pirate.curve:
        from polybus.dialects.pirate.server.curve_key_folder import CurveKeyFolder

        CurveKeyFolder(locate_curve_keys(loaded, os.environ)).allowed()
    if loaded.settings.native.tokens is not None:
        from polybus.transports.flight.authentication import TokenFile

        TokenFile(loaded.settings.native.tokens, time.time)


def _check_engine(loaded: LoadedSettings) -> None:
    url = loaded.settings.engine
    if not url:
        return
    source = loaded.sources.get("engine", DEFAULT)
    scheme = url.partition(":")[0]
    if scheme not in ENGINES:
        known = ", ".join(ENGINES)
        raise ConfigError(f"{source}: unknown engine {url!r}: the engines are {known}")
    if scheme == "nats":
        raise ConfigError(f"{source}: engine {url!r} is still to come")
