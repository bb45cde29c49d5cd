"""Spark sessions with the settings that polybus needs: this Python in tasks, a quiet terminal.

The master is checked before Spark starts. Spark would try to reach a missing master for a minute
and then report an unrelated error, and would wait without any message for a master whose workers
have no free cores.
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

from pyspark.sql import SparkSession

from polybus.errors import ConfigError, NotConnected
from polybus.spark.source import column_pruning
from polybus.spark.stderr_filter import hold_stderr

OLDEST_JAVA = 17
QUIET = "OFF"  # errors are raised; a copy in the log is noise
# Rows reach Spark in Arrow buffers. Java checks each access to them by default, and they become
# garbage at once, which the parallel collector handles best: together a third faster.
JAVA = (
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false "
    "-XX:+UseParallelGC"
)
DRIVERS_JAVA = "spark.driver.extraJavaOptions"
SETTINGS = {
    DRIVERS_JAVA: JAVA,
    "spark.executor.extraJavaOptions": JAVA,
    # The buffer between Java and its Python workers: fewer, larger reads.
    "spark.buffer.size": "262144",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Tasks that read and write topics are few and short; Spark's default is 200.
    "spark.sql.shuffle.partitions": "8",
}
LOCAL = {
    # Spark renames the files of a query's log into place. The default class for that runs programs
    # (stat, readlink, chmod) for local files: a fork each, 50 ms for each of the two logs.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming"
    ".checkpointing.FileSystemBasedCheckpointFileManager",
}
# Over TCP each task waits 40 ms: Nagle's algorithm delays Java's second small write until the
# other side acknowledges the first, and that acknowledgement is delayed.
SOCKETS = "spark.python.unix.domain.socket"
LONGEST_FOLDER = 60  # a socket's path has at most 107 bytes; Spark appends 42
# Spark loads about twenty thousand classes before its first query is done, and Java parses and
# verifies each of them in every process: five to eight seconds of CPU time. `make setup` writes an
# archive of the parsed classes of a typical query, which halves the start of a session. Java
# compares its version and class path with the archive, and ignores one that does not match.
CLASS_ARCHIVE = Path(sys.prefix) / "share" / "polybus" / "spark.jsa"
SILENTLY = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
# First on the path of workers; they start in a third of the time with it.
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
    """Return the active session, or create one: local unless `master` is given.

    Spark's log is off unless `log_level` (WARN, INFO…) is given. Its output during the start is
    shown only if the start fails.

    Raises `ConfigError` if `master` is not a master URL or Java is missing or too old, and
    `NotConnected` if no standalone master answers.
    """
    if master is not None:
        check_master(master)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    is_local = master is None or master.startswith("local")
    values = {**SETTINGS, **(LOCAL if is_local else {}), "spark.log.level": log_level}
    if is_local and _has_own_workers():
        values.update(socket_settings())
    values.update(settings or {})
    values[DRIVERS_JAVA] = f"{values[DRIVERS_JAVA]} {class_archive_flags()}".strip()
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name).master(master or "local[*]")
    for key, value in values.items():
        builder = builder.config(key, value)
    try:
        with hold_stderr(is_quiet=log_level.upper() == QUIET), _startup_folder_on_path(STARTUP):
            spark: SparkSession = builder.getOrCreate()
    except Exception:
        check_java()
        raise
    column_pruning.install(spark)
    return spark


def class_archive_flags(archive: Path = CLASS_ARCHIVE) -> str:
    """Return Java options that use the class archive; empty if it does not exist."""
    return f"-XX:SharedArchiveFile={archive} {SILENTLY}" if archive.is_file() else ""


def _has_own_workers() -> bool:
    """Return whether workers import the same PySpark as this process."""
    return os.environ["PYSPARK_PYTHON"] == sys.executable and "SPARK_HOME" not in os.environ


def socket_settings() -> dict[str, str]:
    """Return settings that connect workers by Unix sockets; empty if that is not safe or possible.

    A worker executes the commands of any client that connects, so the folder must belong to this
    user and must not be accessible to others.
    """
    folder = Path(tempfile.gettempdir()) / f"polybus-spark-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return {}
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o77
    if not is_private or status.st_uid != os.getuid() or len(bytes(folder)) > LONGEST_FOLDER:
        return {}
    return {f"{SOCKETS}.enabled": "true", f"{SOCKETS}.dir": str(folder)}


@contextmanager
def _startup_folder_on_path(folder: Path) -> Iterator[None]:
    """Put `folder` first on PYTHONPATH, for workers of a Java process that is started meanwhile."""
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
    """Raise `ConfigError` if no Java that Spark supports is installed."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    remedy = f"install Java {OLDEST_JAVA} or newer (apt-get install default-jre-headless)"
    remedy += f", or correct JAVA_HOME={home}" if home else ", or set JAVA_HOME"
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        raise ConfigError(f"Spark needs Java, which is not installed: {remedy}") from None
    version = VERSION.search(output.stderr + output.stdout)
    if version is None or int(version[1]) < OLDEST_JAVA:
        found = f"Java {version[1]}" if version else "of unknown version"
        raise ConfigError(
            f"Spark needs Java {OLDEST_JAVA} or newer, and {java} is {found}: {remedy}"
        )


def check_master(master: str) -> None:
    """Raise `ConfigError` for an invalid master, `NotConnected` if no standalone master answers."""
    if FORM.fullmatch(master) is None:
        raise ConfigError(f"invalid Spark master {master!r}: expected {FORMS}")
    if not master.startswith(STANDALONE):
        return
    # One of several standby masters is enough.
    cause: Exception | None = None
    for place in master.removeprefix(STANDALONE).split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            return
        except (OSError, OverflowError) as error:
            cause = error
    raise NotConnected(
        f"no Spark master answers at {master} ({cause}): start it, or correct the URL"
    )


def lacks_executors(spark: SparkSession) -> bool:
    """Return whether a standalone master started no executor within EXECUTOR_S."""
    context = spark.sparkContext
    has_dynamic_executors = (
        context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true"
    )
    if has_dynamic_executors or not str(context.master).startswith(STANDALONE):
        return False
    ends_s = time.monotonic() + EXECUTOR_S
    while time.monotonic() < ends_s:
        if context._jsc.sc().getExecutorMemoryStatus().size() > 1:  # the driver counts as one
            return False
        time.sleep(LOOK_EVERY_S)
    return True
