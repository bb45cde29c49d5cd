"""The folder of a store: what it is made of, which format it has, what is left of accidents."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from polybus.errors import Damaged, WrongFormat
from polybus.model.topic import Topic
from polybus.store.lmdb import store_files, store_keys, stored_values
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.kit import bodies
from tests.unit.store.lmdb.made import put


def filled(path: Path) -> Topic:
    with LmdbStore(path) as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"a")
        return topic


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "acl.toml").write_text("x")
    topic = filled(tmp_path)
    with LmdbStore(tmp_path) as store:
        assert bodies(store, topic) == [b"a"]
    assert (tmp_path / "acl.toml").read_text() == "x"


@pytest.mark.parametrize("version", [1, stored_values.FORMAT_VERSION + 1])
def test_a_format_of_another_version_is_refused(tmp_path, version):
    filled(tmp_path)
    (tmp_path / "CURRENT").write_text(f"polybus store {version}\n0001\n")
    for read_only in (False, True):
        with pytest.raises(WrongFormat, match=f"format {version}"):
            LmdbStore(tmp_path, read_only=read_only)


@pytest.mark.parametrize(
    "text", ["", "0001", "polybus store 1\n", "polybus store 1\n../x\n", "\xff"]
)
def test_a_foreign_current_is_refused(tmp_path, text):
    filled(tmp_path)
    (tmp_path / "CURRENT").write_bytes(text.encode("latin-1"))
    with pytest.raises(WrongFormat, match="not written by polybus"):
        LmdbStore(tmp_path)


@pytest.mark.parametrize("version", [None, 1, stored_values.FORMAT_VERSION + 1])
def test_the_version_inside_counts_as_well(tmp_path, version):
    filled(tmp_path)
    with lmdb.open(str(tmp_path / "0001")) as opened, opened.begin(write=True) as transaction:
        transaction.delete(store_keys.FORMAT)
        if version:
            transaction.put(store_keys.FORMAT, stored_values.encode_number(version))
    with pytest.raises(WrongFormat, match=f"format {version}"):
        LmdbStore(tmp_path)


def test_what_is_no_lmdb_file_is_refused(tmp_path):
    filled(tmp_path)
    (tmp_path / "0001" / "data.mdb").write_bytes(b"something else" * 1000)
    with pytest.raises(WrongFormat):
        LmdbStore(tmp_path)


def test_a_refused_folder_is_free_again(tmp_path):
    filled(tmp_path)
    text = (tmp_path / "CURRENT").read_text()
    (tmp_path / "CURRENT").write_text("x")
    with pytest.raises(WrongFormat):
        LmdbStore(tmp_path)
    (tmp_path / "CURRENT").write_text(text)
    LmdbStore(tmp_path).close()


def test_left_overs_of_a_compaction_go(tmp_path):
    topic = filled(tmp_path)
    (tmp_path / "0002").mkdir()
    (tmp_path / "0002" / "data.mdb").write_bytes(b"half")
    with LmdbStore(tmp_path) as store:
        assert not (tmp_path / "0002").exists()
        assert bodies(store, topic) == [b"a"]


def test_a_lost_current_is_made_again_if_there_is_no_doubt(tmp_path):
    topic = filled(tmp_path)
    (tmp_path / "CURRENT").unlink()
    with LmdbStore(tmp_path) as store:
        assert bodies(store, topic) == [b"a"]
    (tmp_path / "CURRENT").unlink()
    (tmp_path / "0002").mkdir()
    with pytest.raises(Damaged, match="2 generations"):
        LmdbStore(tmp_path)


def test_a_creation_that_was_cut_short_starts_anew(tmp_path):
    (tmp_path / "0001.new").mkdir()
    (tmp_path / "0001.new" / "data.mdb").write_bytes(b"half")
    assert filled(tmp_path).number == 1
    assert store_files.current_generation(tmp_path) == tmp_path / "0001"
    assert not (tmp_path / "0001.new").exists()
