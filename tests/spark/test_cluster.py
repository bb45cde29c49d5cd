"""Reading and writing on a cluster: a master and two workers, through a running bus."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.native_bus import NativeBus
from tests.rig.spark.cluster import Cluster

JOB = Path(__file__).with_name("cluster_job.py")
ROWS = 20_000


@pytest.mark.timeout(600)
def test_two_workers_write_and_read_through_the_bus(tmp_path):
    with NativeBus() as bus, Cluster(tmp_path / "cluster") as cluster, bus.client() as client:
        job = [sys.executable, str(JOB), cluster.url, bus.url, str(tmp_path / "checkpoint")]
        done = subprocess.run(job, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"read {sum(range(ROWS))}" in done.stdout
        places = set()
        for topic in ("written", "copied"):
            messages = [row for batch in client.read(topic) for row in batch.to_pylist()]
            assert sorted(int(row["body"]) for row in messages) == list(range(ROWS))
            places |= {row["shard_key"] for row in messages}
        for folder in cluster.folders:
            assert any(Path(place).is_relative_to(folder) for place in places), f"{folder} is idle"
