"""The checkpoint folder of a pipeline is checked before Spark starts."""

from __future__ import annotations

import pytest

from polybus.errors import UsageError
from polybus.spark.pipelines import preflight


def test_checkpoint_folder_is_created_and_must_be_writable(tmp_path):
    assert preflight.check_checkpoint(str(tmp_path / "a" / "b")) == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(UsageError, match="--checkpoint /proc/here is not writable"):
        preflight.check_checkpoint("/proc/here")
    with pytest.raises(UsageError, match="--checkpoint FOLDER is missing: why"):
        preflight.check_checkpoint(None, "why")


def test_checkpoint_url_is_passed_to_spark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert preflight.check_checkpoint("hdfs://host/place") == "hdfs://host/place"
    assert list(tmp_path.iterdir()) == []
