"""Breaks the kernel on purpose, in many small ways, and demands that its tests notice each.

    python tests/mutants/run.py [part of a mutant's name ...]

Each mutant of kernel.py is applied to a copy of the tree in build/mutants, which is then
compiled (unoptimized, because it runs once) and tested until the first failure. The unchanged
copy is tested first and must pass. A mutant that survives shows a missing test. That one, and
one that was not tested at all (verdicts.py), fail the run.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.kernel import ALL  # noqa: E402
from tests.mutants.verdicts import GREEN, STALE, is_caught, verdict  # noqa: E402
from tests.rig.patching import DoesNotApply, Patch  # noqa: E402

TREE = ROOT / "build" / "mutants"
PACKAGE = TREE / "src" / "polybus"
COPIED = ("src", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
# The quick ones first: most mutants get no further.
TESTS = (
    *(f"tests/unit/kernel/test_{name}.py" for name in ("rqueue_framing", "rqueue_encoding")),
    *(f"tests/unit/kernel/test_{name}.py" for name in ("registry", "judging", "fanout", "memory")),
    *(f"tests/property/kernel/test_{name}.py" for name in ("encoding", "framing", "tables")),
    *(f"tests/property/kernel/test_{name}.py" for name in ("fanout_programs", "fuzz_targets")),
    *(f"tests/property/kernel/test_{name}.py" for name in ("accounts", "inbox", "unread")),
    *(f"tests/unit/kernel/test_{name}.py" for name in ("pump", "pump_outbox", "pump_threads")),
    *("tests/unit/bus/test_outbox.py", "tests/unit/bus/test_delivery.py"),
    "tests/unit/transports/test_inbox.py",
    *(f"tests/unit/freud/test_{name}.py" for name in ("plain_requests", "ephemeral_topics")),
    *(
        f"tests/unit/freud/test_{name}.py"
        for name in ("session", "session_stats", "fair_scheduler")
    ),
    "tests/property/bus/test_freud_model.py",
)
PYTEST = ("-x", "-q", "--tb=line", "--timeout=0")
HANG_CPU_S = 60  # all tests take some 20 s; of CPU, so that a busy machine proves nothing


def copy_tree() -> None:
    """Copy the sources as new files, so that the modules built by the last run are stale."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    TREE.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, copy = ROOT / name, TREE / name
        if source.is_dir():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy, ignore=skipped, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, copy)


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{TREE / 'src'}{os.pathsep}{TREE}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "POLYBUS_CFLAGS": "-O0 -w",
    }


def build() -> str | None:
    """Compiles the copy; the compiler's words if it does not."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=TREE, env=environment(), capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else done.stdout + done.stderr


def test() -> str:
    """Run the tests. Returns GREEN or the first failure."""
    command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "tests.mutants.profile"]
    command += ["--hypothesis-profile", "mutants", *TESTS]
    done = subprocess.run(
        command,
        cwd=TREE,
        env=environment(),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=limit_cpu,
    )
    return verdict(done.returncode, done.stdout + done.stderr)


def limit_cpu() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (HANG_CPU_S, HANG_CPU_S + 1))


def trial(mutant: Patch) -> str:
    path = PACKAGE / mutant.file
    original = path.read_text()
    try:
        mutant.apply(PACKAGE)
    except DoesNotApply as error:
        return f"{STALE}: {error}"
    try:
        complaint = build()
        return f"{STALE}: {complaint[-300:]}" if complaint else test()
    finally:
        path.write_text(original)


def prepare() -> None:
    copy_tree()
    complaint = build()
    if complaint:
        sys.exit(f"the kernel does not compile: {complaint}")
    said = test()
    if said != GREEN:
        sys.exit(f"the tests fail without any mutant: {said}")


def wanted(every: list[Patch], words: list[str]) -> list[Patch]:
    return [one for one in every if not words or any(word in one.name for word in words)]


def main(every: list[Patch] = ALL) -> int:
    prepare()
    missed: list[str] = []
    chosen = wanted(every, sys.argv[1:])
    for mutant in chosen:
        start_s = time.monotonic()
        said = trial(mutant)
        took_s = time.monotonic() - start_s
        if not is_caught(said):
            missed.append(mutant.name)
        line = f"{mutant.file:<20} {mutant.name:<42} {took_s:5.1f} s  {said}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    total = len(chosen)
    sys.stdout.write(f"{total - len(missed)} of {total} mutants caught\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
