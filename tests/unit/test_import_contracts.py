"""Each contract on imports can fail: a forbidden import, planted in a copy, is named."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "imports.py"

# Contract → (file, an import it must never have). One run of the linter for all.
PLANTED = {
    "Layers, from the top down": [
        ("errors.py", "polybus.model.topic_name"),
        ("kernel/framing.pyx", "polybus.errors"),
        ("kernel/subscriber_table.pxd", "polybus.model.topic_name"),
        ("model/topic_name.py", "polybus.bus.broker"),
        ("model/topic.py", "polybus.store.contract"),
        ("store/contract.py", "polybus.bus.broker"),
        ("bus/broker.py", "polybus.transports.stream_listener"),
        ("bus/broker.py", "polybus.durable.durable_bus"),
        ("bus/overview.py", "polybus.dialects.freud.server.ephemeral_topics"),
        ("durable/push_readers.py", "polybus.dialects.gsb.server.sender_tracker"),
        ("durable/query_progress.py", "polybus.native.protocol.fields"),
        ("native/port/topic_statistics.py", "polybus.dialects.pirate.server.subscriber_records"),
        ("server/app.py", "polybus.dialects.pirate.pirate_dialect"),
        ("server/settings.py", "polybus.dialects.rqueue.limits"),
        ("cli/main.py", "polybus.dialects.fdq.cli"),
        ("transports/stream_listener.py", "polybus.dialects.rqueue.server.session"),
        ("transports/stream_listener.py", "polybus.server.config"),
        ("spark/spark_session.py", "polybus.cli.main"),
        ("durable/topic_registry.py", "polybus.groups.coordinator"),
        ("transports/stream_listener.py", "polybus.clients.reconnector"),
    ],
    "No module imports server.app": [
        ("cli/main.py", "polybus.server.app"),
        ("testing/bus_process.py", "polybus.server.app"),
    ],
    "Dialects never import each other": [
        ("dialects/sixth.py", "polybus.dialects.rqueue.codec"),
    ],
    "Codecs know bytes and values": [
        ("dialects/rqueue/codec.py", "asyncio"),
        ("dialects/rqueue/codec.py", "time"),
        ("dialects/rqueue/codec.py", "polybus.bus.broker"),
    ],
    "Sessions turn values": [
        ("dialects/rqueue/server/session.py", "socket"),
        ("dialects/rqueue/server/session.py", "polybus.dialects.rqueue.client.client"),
    ],
    "Clients know their codec": [
        ("dialects/rqueue/client/client.py", "polybus.bus.broker"),
    ],
    "The log under the store": [
        ("store/log/file_log.py", "polybus.store.lmdb.lmdb_errors"),
    ],
    "The bus has no sockets": [
        ("bus/delivery.py", "time"),
        ("bus/delivery.py", "asyncio"),
    ],
    "The bus knows the store by its contract alone": [
        ("bus/broker.py", "polybus.store.memory.memory_store"),
        ("durable/topic_names.py", "polybus.store.lmdb"),
        ("bus/delivery.py", "polybus.store.engine_registry"),
    ],
    "The store's contract is values": [
        ("store/contract.py", "polybus.kernel.blocks"),
        ("store/contract.py", "polybus.store.memory.memory_store"),
    ],
    "Engines never import each other": [
        ("store/memory/memory_store.py", "polybus.store.lmdb.store_keys"),
        ("store/lmdb/store_keys.py", "polybus.store.memory.memory_log"),
    ],
    "Engines do not import their users": [
        ("store/memory/memory_store.py", "polybus.store.engine_registry"),
        ("store/lmdb/store_keys.py", "polybus.store.engine_registry"),
        ("store/request_checks.py", "polybus.bus.broker"),
    ],
    "Spark knows a bus by its client": [
        ("spark/source/log_access.py", "polybus.store.lmdb.lmdb_store"),
        ("spark/sink/sink_writers.py", "polybus.bus.broker"),
        ("spark/source/batch_reader.py", "polybus.native.inprocess"),
    ],
    "Transports move bytes": [
        ("transports/stream_listener.py", "polybus.kernel.fanout"),
        ("transports/stream_listener.py", "polybus.bus.broker"),
    ],
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("imports", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plant(script: ModuleType, shadow: Path, file: str, module: str) -> None:
    """Add the import to the file, and to the Python that stands for a compiled one."""
    path = shadow / "polybus" / file
    with path.open("a") as source:
        source.write(f"\nimport {module}\n")
    compiled = path.with_suffix(".pyx")
    if compiled.exists():
        path.with_suffix(".py").write_text(script.imports_of(compiled))


def dotted(file: str) -> str:
    return "polybus." + file.rpartition(".")[0].replace("/", ".")


@pytest.fixture(scope="module")
def reports(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the report of each broken contract, with all those imports and a new part planted."""
    shadow = tmp_path_factory.mktemp("planted") / "shadow"
    script.build_shadow(shadow)
    for planted in PLANTED.values():
        for file, module in planted:
            plant(script, shadow, file, module)
    (shadow / "polybus" / "annex.py").write_text("")
    broken = script.lint(shadow).stdout.partition("Broken contracts")[2]
    _, *found = re.split(r"^(.+)\n-{5,}\n", broken, flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def test_the_tree_as_it_is_keeps_every_contract(script: ModuleType, tmp_path: Path) -> None:
    script.build_shadow(tmp_path / "shadow")
    done = script.lint(tmp_path / "shadow")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("contract", PLANTED)
def test_forbidden_imports_are_found(reports: dict[str, str], contract: str) -> None:
    """Each edge breaks this contract by itself, not as a step of a longer path."""
    (found,) = (text for title, text in reports.items() if title.startswith(contract))
    for file, module in PLANTED[contract]:
        direct = re.escape(f"{dotted(file)} -> {module} (l.")
        assert re.search(rf"^ *- +{direct}", found, re.MULTILINE), found


def test_a_new_part_must_be_given_its_place(reports: dict[str, str]) -> None:
    assert "annex" in reports["Layers, from the top down"]
