"""Engines by URL scheme, and stores by URL or folder."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polybus.errors import AddressError, NotSupported, UsageError
from polybus.model.commit import Commit
from polybus.store import engine_registry
from polybus.store.engine_registry import find_store, is_store_url, open_store
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.memory.memory_store import MemoryStore

TOY_ENGINE = """
from polybus.store.engine import StoreEngine
from polybus.store.memory.memory_store import open_named

class ToyEngine(StoreEngine):
    def open(self, place, options):
        return open_named("toy " + place)
"""

TOY_PROGRAM = """
from polybus.native.inprocess import open_bus
from polybus.store.engine_registry import is_store_url, open_store, schemes

assert schemes() == ("lmdb", "memory", "toy"), schemes()
assert is_store_url("toy:x")
with open_store("toy:x") as store, open_bus("toy:x") as bus:
    bus.act("topic.create", topic="t")
    print([topic.name for topic in store.topics()])
"""


def run_with_toy(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.fixture
def toy_folder(tmp_path: Path) -> Path:
    """Return a folder with a distribution that registers the engine `toy`."""
    folder = tmp_path / "elsewhere"
    metadata = folder / "toy_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "toy_engine.py").write_text(TOY_ENGINE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[polybus.engines]\ntoy = toy_engine:ToyEngine\n")
    return folder


# --- open_store


def test_memory_without_a_name_is_private() -> None:
    with open_store("memory:") as store, open_store("memory:") as other:
        assert isinstance(store, MemoryStore)
        store.create("t", 1, {})
        assert other.topics() == []


def test_memory_with_a_name_is_shared() -> None:
    with open_store("memory:a") as store, open_store("memory:a") as same:
        with open_store("memory:b") as other:
            topic = store.create("t", 1, {})
            assert same.topics() == [topic]
            assert other.topics() == []
        store.close()
        assert same.topics() == [topic]


def test_memory_with_a_name_is_dropped_by_the_last_close() -> None:
    with open_store("memory:a") as first:
        first.create("t", 1, {})
    with open_store("memory:a") as later:
        assert later.topics() == []


def test_lmdb_is_a_folder(tmp_path: Path) -> None:
    with open_store(f"lmdb:{tmp_path / 'data'}") as store:
        assert isinstance(store, LmdbStore)
        topic = store.create("t", 1, {})
        with open_store(f"lmdb:{tmp_path / 'data'}", read_only=True) as reader:
            assert reader.topics() == [topic]


def test_wall_clock_is_passed_to_the_engine(tmp_path: Path) -> None:
    for url in ("memory:", f"lmdb:{tmp_path / 'data'}"):
        with open_store(url, wall_ns=lambda: 77) as store:
            assert store.commit(Commit()).result(30).timestamp_ns == 77


@pytest.mark.parametrize("url", ["", "memory", "redis:x", "lmdb:", "nats://h", "/path", ":x"])
def test_url_without_an_engine_is_refused(url: str) -> None:
    with pytest.raises(AddressError):
        open_store(url)


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'data'}"
    with pytest.raises(UsageError, match="durability must be"):
        open_store(url, durability="never")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="commit_interval_ms must be"):
        open_store(url, commit_interval_ms=0)
    with pytest.raises(UsageError, match="memory"):
        open_store("memory:", read_only=True)
    assert not (tmp_path / "data").exists()


def test_memory_does_not_load_lmdb() -> None:
    program = (
        "import sys; from polybus.store.engine_registry import open_store;"
        "open_store('memory:').close();"
        "print([name for name in ('lmdb', 'pyarrow', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_memory_has_no_files_to_maintain(tmp_path: Path) -> None:
    with open_store("memory:") as store:
        store.yield_to(int)
        with pytest.raises(NotSupported):
            store.compact()
        with pytest.raises(NotSupported):
            store.backup(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


# --- the registry


def test_built_in_engines_come_from_the_entry_point_group() -> None:
    assert {"lmdb", "memory"} <= set(engine_registry.schemes())
    assert is_store_url("memory:")
    assert is_store_url("lmdb:x")
    for text in ("polybus://127.0.0.1:6570", "redis:x", "/path", "lmdb", ""):
        assert not is_store_url(text)


def test_default_store_is_in_the_data_folder(tmp_path: Path) -> None:
    assert engine_registry.default_url(tmp_path) == f"lmdb:{tmp_path / 'store'}"


def test_engine_of_another_distribution_needs_only_an_entry_point(toy_folder: Path) -> None:
    done = run_with_toy(toy_folder, TOY_PROGRAM)
    assert (done.returncode, done.stdout) == (0, "['t']\n"), done.stderr


def test_engine_that_cannot_be_loaded_is_skipped_with_a_log_line(toy_folder: Path) -> None:
    (toy_folder / "toy_engine.py").unlink()
    program = (
        "from polybus.store.engine_registry import default_url, open_store\n"
        "from pathlib import Path\n"
        "print(default_url(Path('/data')))\n"
        "open_store('toy:x')\n"
    )
    done = run_with_toy(toy_folder, program)
    assert (done.returncode, done.stdout) == (1, "lmdb:/data/store\n")
    assert "engine toy: cannot load toy_engine:ToyEngine: " in done.stderr
    assert "AddressError: no engine for 'toy:x'" in done.stderr


def test_other_distributions_cannot_replace_a_built_in_engine(toy_folder: Path) -> None:
    points = toy_folder / "toy_engine-1.0.dist-info" / "entry_points.txt"
    points.write_text("[polybus.engines]\nmemory = toy_engine:ToyEngine\n")
    program = (
        "from polybus.store.engine_registry import open_store\n"
        "print(type(open_store('memory:')).__name__)\n"
    )
    done = run_with_toy(toy_folder, program)
    assert done.stdout == "MemoryStore\n"
    assert "ignored toy_engine:ToyEngine: registered twice" in done.stderr


# --- find_store


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return the data folder of a bus with an empty store."""
    open_store(f"lmdb:{tmp_path / 'data' / 'store'}").close()
    return tmp_path / "data"


def test_store_is_found_by_url_folder_and_data_folder(data: Path) -> None:
    store = data / "store"
    for text in (f"lmdb:{store}", str(store), f"lmdb:{data}", str(data)):
        found = find_store(text)
        assert (found.url, found.folder) == (f"lmdb:{store}", store)


def test_damaged_store_is_found_by_its_data_file(data: Path) -> None:
    (data / "store" / "CURRENT").unlink()
    with pytest.raises(UsageError, match="no store in"):
        find_store(str(data))
    assert find_store(str(data), damaged=True).folder == data / "store"


def test_all_urls_of_a_store_have_one_canonical_form(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data.parent / "link").symlink_to(data)
    monkeypatch.chdir(data.parent)
    for place in (data, data / "store", data.parent / "link", "data", "./data/store"):
        assert engine_registry.canonical_url(f"lmdb:{place}") == f"lmdb:{data / 'store'}"
    assert engine_registry.canonical_url("lmdb:new") == f"lmdb:{data.parent / 'new'}"
    assert engine_registry.absolute_url("lmdb:data") == f"lmdb:{data}"
    assert engine_registry.canonical_url("memory:a") == "memory:a"


# --- the engines stay behind the registry


def test_only_the_lmdb_package_names_lmdb_in_code() -> None:
    package = Path(engine_registry.__file__).parents[1]
    own = package / "store" / "lmdb"
    naming = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if own not in path.parents and "lmdb" in code_without_docstrings(path)
    ]
    assert naming == []


def code_without_docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body[0] = ast.Pass()
    return ast.unparse(tree)
