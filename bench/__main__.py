"""`python -m bench [NAME] [--short] [--check] [--only CASE …] [--rounds N] …`; names are below.

Without a name every benchmark runs in its short form; with one it runs in full, or `--short`.
`store --soak` is another: what becomes of a store that has grown. So are `rqueue --threads N`, our
server with N threads beside one, and `rqueue --threads-table`, CPU time by thread. Four more
commands have options of their own: `compare REF` measures two checkouts in turn, `walks` counts the
functions that a message enters, `retention` measures other clients while a large topic is trimmed,
`scaling` shows the cost of one step against the size of what it should not depend on. None imports
the benchmarks, which may need another layout of the package.
"""

import argparse
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol, cast

from bench.harness.load import LoadFailed
from bench.harness.options import Options
from bench.harness.places import OUTPUT, Unavailable
from bench.harness.programs import DidNotStart
from bench.harness.report import Outcome

BENCHMARKS = (
    "rqueue",
    "freud",
    "store",
    "native",
    "fdq",
    "gsb",
    "pirate",
    "spark",
    "pipelines",
)
SOAKS = {"store": "bench.store.soak"}
THREADS, THREADS_TABLE = "bench.rqueue.threads", "bench.rqueue.threads_table"
COMMANDS = ("compare", "walks", "retention", "scaling")
LOOPBACK = ("127.0.0.1", "localhost")
MISSED, FAILED = 1, 2  # exit codes


class Benchmark(Protocol):
    NAMES: tuple[str, ...]  # of its cases

    def run(self, options: Options) -> Outcome:
        """Measure the cases that the options name."""


class Command(Protocol):
    def main(self, arguments: list[str]) -> int:
        """Returns the exit code."""


def _benchmark(name: str) -> Benchmark:
    return cast(Benchmark, import_module(f"bench.{name}.run"))


def _chosen_benchmark(name: str, chosen: argparse.Namespace) -> Benchmark:
    """The benchmark, or what the options put in its place."""
    other = SOAKS[name] if chosen.soak else THREADS if chosen.threads else None
    other = THREADS_TABLE if chosen.threads_table else other
    return cast(Benchmark, import_module(other)) if other else _benchmark(name)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"a number of threads >= 1, not {text}")
    return int(text)


def _cpus(text: str) -> frozenset[int]:
    """As taskset takes them: `4-7,9`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise argparse.ArgumentTypeError(f"cores such as 4-7 or 4,6, not {text}")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _loopback_port(text: str) -> int:
    host, _, port = text.rpartition(":")
    if host not in LOOPBACK or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"a loopback address such as 127.0.0.1:6567, not {text}")
    return int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure, beside peers.")
    parser.add_argument("benchmark", nargs="?", choices=BENCHMARKS, help="all, short, if left out")
    parser.add_argument("--short", action="store_true", help="in under three minutes")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="repeatable")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds a case")
    parser.add_argument(
        "--server", type=_loopback_port, metavar="HOST:PORT", help="rqueue: already running"
    )
    parser.add_argument(
        "--soak", action="store_true", help="store: grown to 100 M messages; 20 GB of disk"
    )
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="rqueue: our server with N threads beside one"
    )
    parser.add_argument(
        "--threads-table", action="store_true", help="rqueue: CPU time by thread at 1 to 8 threads"
    )
    parser.add_argument(
        "--server-cpus",
        type=_cpus,
        default=frozenset(),
        metavar="LIST",
        help="cores of our server, with --threads and --threads-table",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON; build/bench/NAME.json")
    return parser


def _chosen(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """What was asked for, and the benchmarks to run: those that have one of the wanted cases."""
    chosen = parser.parse_args()
    names = [chosen.benchmark] if chosen.benchmark else list(BENCHMARKS)
    _check_threads(parser, chosen)
    known = [case for name in names for case in _names(name, chosen)]
    unknown = set(chosen.only) - set(known)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if chosen.output and not chosen.benchmark:
        parser.error("--output is one file: name one benchmark")
    if chosen.server and chosen.benchmark not in (None, "rqueue"):
        parser.error(f"--server is for rqueue; {chosen.benchmark} starts its own")
    if chosen.soak and (chosen.benchmark not in SOAKS or chosen.only):
        parser.error(f"--soak is all of {', '.join(SOAKS)}: name that, without --only")
    wanted = set(chosen.only or known)
    return chosen, [name for name in names if wanted & set(_names(name, chosen))]


def _check_threads(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    forms = bool(chosen.threads) + chosen.threads_table
    if forms and chosen.benchmark != "rqueue":
        parser.error("--threads and --threads-table are forms of rqueue: name that")
    if forms > 1:
        parser.error("--threads and --threads-table are two runs")
    if forms and chosen.server:
        parser.error("--server is one server; --threads and --threads-table start several")
    if chosen.server_cpus and not forms:
        parser.error("--server-cpus is for --threads and --threads-table")


def _names(name: str, chosen: argparse.Namespace) -> tuple[str, ...]:
    """Of the cases. A soak has no choice of them, and counts as its benchmark."""
    return (_benchmark(name) if chosen.soak else _chosen_benchmark(name, chosen)).NAMES


def _form(chosen: argparse.Namespace) -> str:
    """The end of the report's name."""
    if chosen.threads:
        return f"-threads-{chosen.threads}"
    return "-threads-table" if chosen.threads_table else "-soak" if chosen.soak else ""


def _options(name: str, chosen: argparse.Namespace) -> Options:
    return Options(
        short=chosen.short or chosen.benchmark is None,
        only=tuple(chosen.only),
        rounds=chosen.rounds,
        port=chosen.server,
        output=chosen.output or OUTPUT / f"{name}{_form(chosen)}.json",
        threads=chosen.threads,
        server_cpus=chosen.server_cpus,
    )


def _run(name: str, chosen: argparse.Namespace) -> int:
    """Runs one benchmark, tells its outcome, and returns the exit code."""
    outcome = _chosen_benchmark(name, chosen).run(_options(name, chosen))
    print(outcome.text())
    outcome.write()
    if outcome.failures:
        return FAILED
    return MISSED if chosen.check and not outcome.holds else 0


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have us ignore SIGINT
        signal.signal(number, _stop)
    started_s = time.monotonic()
    try:
        if sys.argv[1:2] and sys.argv[1] in COMMANDS:
            command = cast(Command, import_module(f"bench.{sys.argv[1]}.run"))
            return command.main(sys.argv[2:])
        chosen, names = _chosen(_parser())
        codes = [_run(name, chosen) for name in names]
    except (DidNotStart, LoadFailed, Unavailable) as error:
        print(f"bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("bench: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"\ntook {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
