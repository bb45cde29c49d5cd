"""A session of Spark as polybus likes it: this Python in its tasks, and a quiet terminal.

A master of Spark is looked at before Spark is: it tries one that nobody answers on for a
minute, and then tells of something else. And one whose workers have no room is waited for
without a word.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from polybus.errors import ConfigError, NotConnected
from polybus.spark import class_data_sharing
from polybus.spark.source import column_pruning
from polybus.spark.stderr_filter import hold_stderr

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_JAVA = 17
QUIET = "OFF"  # what fails is raised: the same in the log is noise
# Rows reach Spark through Arrow's memory, of which Java checks every access unless told not
# to, and as garbage that the collector for throughput handles best: together a third faster.
JAVA = (
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false "
    "-XX:+UseParallelGC"
)
DRIVERS_JAVA = "spark.driver.extraJavaOptions"
SETTINGS = {
    DRIVERS_JAVA: JAVA,
    "spark.executor.extraJavaOptions": JAVA,
    # Between Java and its Python workers: fewer, larger reads.
    "spark.buffer.size": "262144",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Tasks that read and write topics are few and short; 200 shuffle partitions are many.
    "spark.sql.shuffle.partitions": "8",
}
LOCAL = {
    # Spark's logs of a query are renamed into place. The way it does so by default asks programs
    # (stat, readlink, chmod) about local files: a fork each, 50 ms for each of the two logs.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming"
    ".checkpointing.FileSystemBasedCheckpointFileManager",
}
# Over TCP each task waits 40 ms: Java's second small write for the first to be acknowledged, which
# the other side puts off.
SOCKETS = "spark.python.unix.domain.socket"
LONGEST_FOLDER = 60  # the name of a socket has at most 107 bytes, and Spark's part of it 42
# What a worker runs first: it then starts in a third of the time.
STARTUP = Path(__file__).with_name("startup")
VERSION = re.compile(r'version "(?:1\.)?(\d+)')
STANDALONE = "spark://"
FORMS = "local[*], spark://HOST:PORT, yarn, or k8s://…"
PLACE = r"(?:\[[^\]]+\]|[^:,/\[\]]+):\d+"
FORM = re.compile(rf"local(-cluster)?(\[[*\d, ]+\])?|yarn|k8s://.+|spark://{PLACE}(,{PLACE})*")
CONNECT_S = 5.0
EXECUTOR_S, LOOK_EVERY_S = 20.0, 0.2


def session(
    master: str | None = None,
    *,
    name: str = "polybus",
    log_level: str = QUIET,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """The session that is there, or a new one: local unless `master` says where.

    Nothing of Spark's own comes to the terminal, unless `log_level` (WARN, INFO…) asks
    for it; what kept it from starting does.
    """
    from pyspark.sql import SparkSession

    if master is not None:
        check_master(master)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    is_local = master is None or master.startswith("local")
    given = {**SETTINGS, **(LOCAL if is_local else {}), "spark.log.level": log_level}
    if is_local and _has_own_workers():
        given.update(socket_settings())
    given.update(settings or {})
    given[DRIVERS_JAVA] = f"{given[DRIVERS_JAVA]} {class_data_sharing.load_flags()}".strip()
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name).master(master or "local[*]")
    for key, value in given.items():
        builder = builder.config(key, value)
    try:
        with hold_stderr(is_quiet=log_level.upper() == QUIET), _startup_folder_on_path(STARTUP):
            found: SparkSession = builder.getOrCreate()
    except Exception:
        check_java()
        raise
    column_pruning.install(found)
    return found


def _has_own_workers() -> bool:
    """Whether they have the PySpark of this Python."""
    return os.environ["PYSPARK_PYTHON"] == sys.executable and "SPARK_HOME" not in os.environ


def socket_settings() -> dict[str, str]:
    """In a folder of this user alone: a worker does what it is told by whoever gets through."""
    folder = Path(tempfile.gettempdir()) / f"polybus-spark-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        there = folder.lstat()
    except OSError:
        return {}
    is_private = stat.S_ISDIR(there.st_mode) and not there.st_mode & 0o77
    if not is_private or there.st_uid != os.getuid() or len(bytes(folder)) > LONGEST_FOLDER:
        return {}
    return {f"{SOCKETS}.enabled": "true", f"{SOCKETS}.dir": str(folder)}


@contextmanager
def _startup_folder_on_path(folder: Path) -> Iterator[None]:
    """Java that is started meanwhile passes it on."""
    before = os.environ.get("PYTHONPATH")
    if not _has_own_workers():
        yield
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def check_java() -> None:
    """`ConfigError` if there is no Java that Spark runs on; it says what to do."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    remedy = f"install Java {OLDEST_JAVA} or newer (apt-get install default-jre-headless)"
    remedy += f", or correct JAVA_HOME={home}" if home else ", or set JAVA_HOME"
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        raise ConfigError(f"Spark needs Java, and there is none: {remedy}") from None
    version = VERSION.search(told.stderr + told.stdout)
    if version is None or int(version[1]) < OLDEST_JAVA:
        found = f"Java {version[1]}" if version else "something else"
        raise ConfigError(f"Spark needs a newer Java than {java}, which is {found}: {remedy}")


def check_master(master: str) -> None:
    """`ConfigError` if it is none, `NotConnected` if no standalone master answers there."""
    if FORM.fullmatch(master) is None:
        raise ConfigError(f"{master!r} is no master of Spark: give {FORMS}")
    if master.startswith(STANDALONE):
        _check_answers(master)


def _check_answers(master: str) -> None:
    """One of several is enough: the others stand by."""
    why: Exception | None = None
    for place in master.removeprefix(STANDALONE).split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            return
        except (OSError, OverflowError) as error:
            why = error
    raise NotConnected(f"no master of Spark answers at {master} ({why}): start it, or correct it")


def lacks_executors(spark: SparkSession) -> bool:
    """Whether a standalone master has started none, though it had time to."""
    context = spark.sparkContext
    is_asked_later = context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true"
    if is_asked_later or not str(context.master).startswith(STANDALONE):
        return False
    ends_s = time.monotonic() + EXECUTOR_S
    while time.monotonic() < ends_s:
        if context._jsc.sc().getExecutorMemoryStatus().size() > 1:  # the driver is one of them
            return False
        time.sleep(LOOK_EVERY_S)
    return True
