"""Running a pipeline: signals, and polybus errors inside Spark errors."""

from __future__ import annotations

import os
import signal

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from polybus.errors import Conflict, Damaged, DoesNotExist, StoreFull, Trimmed, UsageError
from polybus.spark.pipelines.query_run import SourceProgress, StopSignal, stop_on_signals
from polybus.spark.pipelines.spark_errors import parse_own_error, raise_own_errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_sets_the_flag_and_later_spark_errors_are_ignored(number):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(10)
        raise Py4JError("SparkContext was shut down")
    assert stop.by == number
    assert signal.getsignal(number) is before


def test_spark_error_without_a_signal_is_raised():
    with pytest.raises(Py4JError), stop_on_signals():
        raise Py4JError("SparkContext was shut down")


def test_second_ctrl_c_raises_keyboard_interrupt():
    stop = StopSignal()
    stop.ask(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stop.ask(signal.SIGINT)


def test_polybus_error_is_raised_from_the_text_of_a_spark_error():
    text = "[STREAM_FAILED] …\npolybus.errors.Trimmed: topic 't': gone; go on\n\tat org.apache"
    with pytest.raises(Trimmed, match=r"topic 't': gone; go on$"), raise_own_errors():
        raise PySparkException(text)
    assert isinstance(parse_own_error("polybus.errors.Conflict: two"), Conflict)
    assert parse_own_error("polybus.errors.NoSuch: x") is None
    with pytest.raises(PySparkException), raise_own_errors():
        raise PySparkException("a worker died")


def test_options_in_error_texts_become_flags():
    text = "polybus.errors.Trimmed: gone; set failOnDataLoss=false to go on with what is left\n"
    assert str(parse_own_error(text)) == "gone; --accept-loss goes on with what is left"
    text = (
        "polybus.errors.TopicDeleted: use another checkpointLocation, or set failOnDataLoss=false"
    )
    assert str(parse_own_error(text)) == "use another --checkpoint, or give --accept-loss"


def test_unreadable_archive_file_is_named():
    text = (
        "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///a/b.parquet. SQL"
    )
    found = parse_own_error(text)
    assert isinstance(found, Damaged)
    assert str(found) == "/a/b.parquet cannot be read: restore it"


def test_failing_sql_is_reported_in_one_line():
    text = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: \
[CAST_INVALID_INPUT] The value '1,50' cannot be cast. Use `try_cast`. SQLSTATE: 22018
== SQL (line 1, position 1) ==
cast(body AS string) >= 100
 SQLSTATE: XXKST"""
    found = parse_own_error(text)
    assert isinstance(found, UsageError)
    assert str(found).endswith("for a message: The value '1,50' cannot be cast. Use `try_cast`")


def test_failing_sql_is_reported_if_spark_does_not_print_it():
    text = "… exception: [USER_RAISED_EXCEPTION] no country SQLSTATE: P0001 SQLSTATE: XXKST\n=== …"
    found = parse_own_error(text)
    assert isinstance(found, UsageError)
    assert str(found).endswith("for a message: no country")
    ours = parse_own_error(
        "[USER_RAISED_EXCEPTION] polybus.errors.UsageError: so SQLSTATE: P0001 SQLSTATE: X"
    )
    assert str(ours) == "so"
    assert (
        parse_own_error("[STREAM_FAILED] Query [id = 1] terminated: gone SQLSTATE: XXKST") is None
    )


def test_full_disk_of_spark_is_reported_as_store_full():
    with pytest.raises(StoreFull, match="the disk of the checkpoint"), raise_own_errors():
        raise Py4JError("o1.start: java.io.IOException: No space left on device\n\tat java.base")


def test_polybus_errors_pass_unchanged():
    with pytest.raises(DoesNotExist), raise_own_errors():
        raise DoesNotExist("x")


def test_rows_and_lag_are_computed_from_offsets():
    progress = SourceProgress({"t": {"0": 5}}, {"t": {"0": 9}})
    progress.note({"t": {"0": 20}}, {"t": {"0": 25}})
    assert (progress.rows, progress.lag) == (15, 5)
    progress.note({"t": {"0": 25, "1": 4}, "_since": {"t": {"1": 1}}}, {"t": {"0": 25, "1": 4}})
    assert (progress.rows, progress.lag) == (23, 0)


def test_source_of_another_format_is_not_counted():
    progress = SourceProgress('{"logOffset": 3}', '{"logOffset": 4}')
    progress.note("4", None)
    assert (progress.rows, progress.lag) == (0, None)
