"""A coverage-guided fuzz driver that needs only gcc.

    python -m tests.rig.fuzz.driver tests/fuzz/rqueue.py --seconds 60

A target is a Python file that states an invariant:

    SEEDS = [b"...", b"..."]         inputs to start from
    WORDS = [b"...", b"..."]         optional: words of the format
    def target(data: bytes) -> None  raises when the invariant is broken

The driver changes inputs a little (mutation.py), and keeps those that made the
compiled code take a branch it had not taken before (coverage.c), and learns the
constants that the code compares with: step by step it climbs where chance alone
would not get. The same --seed gives the same run again.

Two processes. The child loads the target and runs it; before each run it puts the
input into a shared file. The parent waits: when the child dies (a segmentation
fault, a sanitizer's abort) or hangs, the shared file still has the input. The driver saves
an input that broke the invariant to a file; `--replay FILE` runs it again.

Exit codes: 0 nothing found, 1 found something, 2 could not fuzz.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from random import Random

from tests.rig.fuzz.coverage import LIBRARY_VARIABLE, build_library, preload
from tests.rig.fuzz.loop import (
    Budget,
    CurrentInput,
    Fuzzer,
    NotInstrumented,
    digest,
    keeper,
    load_target,
    saved_inputs,
)

FOUND_NOTHING, FOUND, CANNOT = 0, 1, 2
DEFAULT_MAX_BYTES = 4096  # larger inputs are slower, and rarely say more
DEFAULT_HANG_S = 10.0  # one run takes microseconds; the sanitizers cost a factor of ten


def fuzz(options: argparse.Namespace) -> int:
    """Run the child. The shared file has the input that it ran last."""
    fuzzer = Fuzzer(
        load_target(options.target),
        CurrentInput(options.current_input, options.max_bytes),
        options.max_bytes,
    )
    try:
        fuzzer.start(saved_inputs(options.corpus))
        budget = Budget(options.runs, options.seconds, fuzzer)
        fuzzer.climb(Random(options.seed), budget, keeper(options.corpus))
    except NotInstrumented:
        print(f"{fuzzer.target.name}: no branch is watched: build with trace-pc", file=sys.stderr)
        return CANNOT
    except Exception:
        traceback.print_exc()
        print(f"{fuzzer.target.name}: {fuzzer.summary()}", flush=True)
        return FOUND
    print(f"{fuzzer.target.name}: {fuzzer.summary()} found nothing", flush=True)
    return FOUND_NOTHING


def supervise(options: argparse.Namespace) -> int:
    """Run the child, and save its current input when it finds something, dies or hangs."""
    with tempfile.NamedTemporaryFile(prefix="polybus-fuzz-") as shared:
        current = CurrentInput(Path(shared.name), options.max_bytes)
        library = build_library(options.build)
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.rig.fuzz.driver",
                *sys.argv[1:],
                "--current-input",
                shared.name,
            ],
            env={**preload(library), "PYTHONHASHSEED": "0"},
        )
        try:
            how = watch(child, current, options.hang_seconds)
        finally:
            child.kill()
            child.wait()
        if how is None:
            return FOUND_NOTHING if child.returncode == 0 else CANNOT
        path = save(options, current.data())
        print(f"{options.target.stem}: {how}, input in {path}", file=sys.stderr)
        return FOUND


def watch(child: subprocess.Popen[bytes], current: CurrentInput, hang_s: float) -> str | None:
    """Return how the child failed, or None if no input is the cause."""
    last_run = -1
    while True:
        try:
            code = child.wait(hang_s)
        except subprocess.TimeoutExpired:
            if current.run() == last_run > 0:
                return f"hangs (over {hang_s:g} s)"
            last_run = current.run()
            continue
        if code in (FOUND_NOTHING, CANNOT) or current.run() == 0:
            return None
        return "broke the invariant" if code == FOUND else f"died with {code}"


def save(options: argparse.Namespace, data: bytes) -> Path:
    options.crashes.mkdir(parents=True, exist_ok=True)
    path: Path = options.crashes / f"{options.target.stem}-{digest(data)}.crash"
    path.write_bytes(data)
    return path


def replay(options: argparse.Namespace) -> int:
    load_target(options.target).run(options.replay.read_bytes())
    print(f"{options.replay}: the invariant holds")
    return FOUND_NOTHING


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.rig.fuzz.driver")
    parser.add_argument("target", type=Path, help="a Python file with SEEDS and target()")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--runs", type=int, default=sys.maxsize)
    parser.add_argument("--max-bytes", type=int, default=DEFAULT_MAX_BYTES)
    parser.add_argument("--hang-seconds", type=float, default=DEFAULT_HANG_S)
    parser.add_argument("--corpus", type=Path, help="folder to load inputs from and keep them in")
    parser.add_argument("--crashes", type=Path, default=Path(), help="folder for what was found")
    parser.add_argument("--build", type=Path, default=Path("build/fuzz"), help="compiled parts")
    parser.add_argument("--replay", type=Path, help="run one input, and nothing else")
    parser.add_argument("--current-input", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.replay:
        return replay(options)
    if options.current_input and LIBRARY_VARIABLE in os.environ:
        return fuzz(options)
    return supervise(options)


if __name__ == "__main__":
    sys.exit(main())
