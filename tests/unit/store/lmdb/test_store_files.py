"""Files of a store: layout, format version, and recovery from interrupted changes."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from polybus.errors import Damaged, WrongFormat
from polybus.model.topic import Topic
from polybus.store.lmdb import store_files, store_keys, stored_values
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.kit import bodies
from tests.unit.store.lmdb.store_helpers import put


def filled(path: Path) -> Topic:
    with LmdbStore(path) as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"a")
        return topic


def test_foreign_files_are_not_touched(tmp_path):
    (tmp_path / "acl.toml").write_text("x")
    topic = filled(tmp_path)
    with LmdbStore(tmp_path) as store:
        assert bodies(store, topic) == [b"a"]
    assert (tmp_path / "acl.toml").read_text() == "x"


@pytest.mark.parametrize("version", [1, stored_values.FORMAT_VERSION + 1])
def test_other_format_version_is_refused(tmp_path, version):
    filled(tmp_path)
    (tmp_path / "CURRENT").write_text(f"polybus store {version}\n0001\n")
    for read_only in (False, True):
        with pytest.raises(WrongFormat, match=f"format {version}"):
            LmdbStore(tmp_path, read_only=read_only)


@pytest.mark.parametrize(
    "text", ["", "0001", "polybus store 1\n", "polybus store 1\n../x\n", "\xff"]
)
def test_foreign_current_file_is_refused(tmp_path, text):
    filled(tmp_path)
    (tmp_path / "CURRENT").write_bytes(text.encode("latin-1"))
    with pytest.raises(WrongFormat, match="not written by polybus"):
        LmdbStore(tmp_path)


@pytest.mark.parametrize("version", [None, 1, stored_values.FORMAT_VERSION + 1])
def test_format_version_in_the_data_is_checked(tmp_path, version):
    filled(tmp_path)
    with lmdb.open(str(tmp_path / "0001")) as opened, opened.begin(write=True) as transaction:
        transaction.delete(store_keys.FORMAT)
        if version:
            transaction.put(store_keys.FORMAT, stored_values.encode_number(version))
    with pytest.raises(WrongFormat, match=f"format {version}"):
        LmdbStore(tmp_path)


def test_data_file_of_another_format_is_refused(tmp_path):
    filled(tmp_path)
    (tmp_path / "0001" / "data.mdb").write_bytes(b"something else" * 1000)
    with pytest.raises(WrongFormat):
        LmdbStore(tmp_path)


def test_refused_folder_is_not_locked(tmp_path):
    filled(tmp_path)
    text = (tmp_path / "CURRENT").read_text()
    (tmp_path / "CURRENT").write_text("x")
    with pytest.raises(WrongFormat):
        LmdbStore(tmp_path)
    (tmp_path / "CURRENT").write_text(text)
    LmdbStore(tmp_path).close()


def test_owner_removes_unfinished_compactions(tmp_path):
    topic = filled(tmp_path)
    (tmp_path / "0002").mkdir()
    (tmp_path / "0002" / "data.mdb").write_bytes(b"half")
    with LmdbStore(tmp_path) as store:
        assert not (tmp_path / "0002").exists()
        assert bodies(store, topic) == [b"a"]


def test_missing_current_is_written_again_if_unambiguous(tmp_path):
    topic = filled(tmp_path)
    (tmp_path / "CURRENT").unlink()
    with LmdbStore(tmp_path) as store:
        assert bodies(store, topic) == [b"a"]
    (tmp_path / "CURRENT").unlink()
    (tmp_path / "0002").mkdir()
    with pytest.raises(Damaged, match="2 generations"):
        LmdbStore(tmp_path)


def test_interrupted_creation_starts_again(tmp_path):
    (tmp_path / "0001.new").mkdir()
    (tmp_path / "0001.new" / "data.mdb").write_bytes(b"half")
    assert filled(tmp_path).number == 1
    assert store_files.current_generation(tmp_path) == tmp_path / "0001"
    assert not (tmp_path / "0001.new").exists()
