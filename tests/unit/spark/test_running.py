"""Running a pipeline: what a signal means, and whose errors are whose."""

from __future__ import annotations

import os
import signal

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from polybus.errors import Conflict, Damaged, DoesNotExist, StoreFull, Trimmed, UsageError
from polybus.spark.pipelines.query_run import (
    SourceProgress,
    StopSignal,
    raise_own_errors,
    stop_on_signals,
)
from polybus.spark.pipelines.spark_errors import parse_own_error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_for_an_end_and_what_java_says_then_is_no_error(number):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(10)
        raise Py4JError("SparkContext was shut down")
    assert stop.by == number
    assert signal.getsignal(number) is before


def test_without_a_signal_it_is_an_error():
    with pytest.raises(Py4JError), stop_on_signals():
        raise Py4JError("SparkContext was shut down")


def test_a_second_ctrl_c_waits_for_nothing():
    stop = StopSignal()
    stop.ask(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stop.ask(signal.SIGINT)


def test_an_error_of_ours_comes_out_of_spark_as_what_it_was():
    text = "[STREAM_FAILED] …\npolybus.errors.Trimmed: topic 't': gone; go on\n\tat org.apache"
    with pytest.raises(Trimmed, match=r"topic 't': gone; go on$"), raise_own_errors():
        raise PySparkException(text)
    assert isinstance(parse_own_error("polybus.errors.Conflict: two"), Conflict)
    assert parse_own_error("polybus.errors.NoSuch: x") is None
    with pytest.raises(PySparkException), raise_own_errors():
        raise PySparkException("a worker died")


def test_what_an_option_is_called_on_the_command_line():
    said = "polybus.errors.Trimmed: gone; set failOnDataLoss=false to go on with what is left\n"
    assert str(parse_own_error(said)) == "gone; --accept-loss goes on with what is left"
    said = (
        "polybus.errors.TopicDeleted: use another checkpointLocation, or set failOnDataLoss=false"
    )
    assert str(parse_own_error(said)) == "use another --checkpoint, or give --accept-loss"


def test_a_file_of_the_archive_that_spark_cannot_read_is_named():
    said = (
        "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///a/b.parquet. SQL"
    )
    found = parse_own_error(said)
    assert isinstance(found, Damaged)
    assert str(found) == "/a/b.parquet cannot be read: restore it"


def test_sql_that_fails_for_a_message_is_told_in_one_line():
    said = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: \
[CAST_INVALID_INPUT] The value '1,50' cannot be cast. Use `try_cast`. SQLSTATE: 22018
== SQL (line 1, position 1) ==
cast(body AS string) >= 100
 SQLSTATE: XXKST"""
    found = parse_own_error(said)
    assert isinstance(found, UsageError)
    assert str(found).endswith("for a message: The value '1,50' cannot be cast. Use `try_cast`")


def test_also_if_spark_does_not_show_it():
    said = "… exception: [USER_RAISED_EXCEPTION] no country SQLSTATE: P0001 SQLSTATE: XXKST\n=== …"
    found = parse_own_error(said)
    assert isinstance(found, UsageError)
    assert str(found).endswith("for a message: no country")
    ours = parse_own_error(
        "[USER_RAISED_EXCEPTION] polybus.errors.UsageError: so SQLSTATE: P0001 SQLSTATE: X"
    )
    assert str(ours) == "so"
    assert (
        parse_own_error("[STREAM_FAILED] Query [id = 1] terminated: gone SQLSTATE: XXKST") is None
    )


def test_a_disk_without_room_for_what_spark_keeps_is_told_as_such():
    with pytest.raises(StoreFull, match="the disk of the checkpoint"), raise_own_errors():
        raise Py4JError("o1.start: java.io.IOException: No space left on device\n\tat java.base")


def test_errors_of_ours_pass_as_they_are():
    with pytest.raises(DoesNotExist), raise_own_errors():
        raise DoesNotExist("x")


def test_rows_are_counted_by_offsets():
    reading = SourceProgress({"t": {"0": 5}}, {"t": {"0": 9}})
    reading.note({"t": {"0": 20}}, {"t": {"0": 25}})
    assert (reading.rows, reading.lag) == (15, 5)
    reading.note({"t": {"0": 25, "1": 4}, "_since": {"t": {"1": 1}}}, {"t": {"0": 25, "1": 4}})
    assert (reading.rows, reading.lag) == (23, 0)


def test_a_source_of_another_kind_is_not_counted():
    reading = SourceProgress('{"logOffset": 3}', '{"logOffset": 4}')
    reading.note("4", None)
    assert (reading.rows, reading.lag) == (0, None)
