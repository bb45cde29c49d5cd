"""`python -m bench walks [NAME …] [--json FILE]`: one message on each walk, counted.

For each walk a bus and a client run in processes of their own, with the recorder (recorder.c) in
both. One message is sent several times. A function counts if every one of these runs entered it and
not every idle run did, which leaves out timers and heartbeats. Comprehensions and generator
expressions are part of the function around them. Compiled modules are not counted.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polybus
from bench.harness.places import C_FLAGS, REPOSITORY, installed, output_folder
from bench.harness.programs import DidNotStart, Program
from bench.harness.report import table
from bench.walks.client import IDLE_RUNS, WALKS, Addresses, Walk

HERE = Path(__file__).parent
PACKAGE = Path(polybus.__path__[0]).resolve()
SERVER, CLIENT = "server", "client"
LISTEN = {
    "rqueue": "tcp://127.0.0.1:0",
    "native": "grpc://127.0.0.1:0",
    "pirate": "tcp://127.0.0.1:0",
    "gsb": "tcp://127.0.0.1:0",
    "freud": "unix:{folder}/freud.sock",
    "admin": "unix:{folder}/admin.sock",
}
CLIENT_TIMEOUT_S = 300.0
FAILED = 2  # exit code

Function = tuple[str, str]  # file, qualified name


@dataclass(frozen=True)
class Entered:
    """Functions that every run of a walk has entered, by role."""

    name: str
    title: str
    by_role: dict[str, frozenset[Function]]

    @property
    def total(self) -> frozenset[Function]:
        return frozenset().union(*self.by_role.values())

    def row(self) -> list[str]:
        parts = (self.by_role[SERVER], self.by_role[CLIENT], self.total)
        return [self.title, *(f"{len(part)} in {len(_files(part))}" for part in parts)]

    def to_json(self) -> dict[str, object]:
        roles = {
            role: {"functions": len(part), "files": len(_files(part)), "entered": sorted(part)}
            for role, part in self.by_role.items()
        }
        total = {"functions": len(self.total), "files": len(_files(self.total))}
        return {"name": self.name, "title": self.title, **roles, "total": total}


def _files(functions: Iterable[Function]) -> set[str]:
    return {file for file, _name in functions}


def _compile_recorder() -> Path:
    """Returns the folder of the compiled module, for PYTHONPATH."""
    source, folder = HERE / "recorder.c", output_folder() / "walks"
    target = folder / f"walk_recorder{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(exist_ok=True)
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        compiler = os.environ.get("CC") or str(installed("gcc", "apt-get install gcc"))
        include = f"-I{sysconfig.get_path('include')}"
        flags = (*C_FLAGS, "-shared", "-fPIC", include)
        subprocess.run([compiler, *flags, "-o", str(target), str(source)], check=True)
    return folder


def _environment(role: str, folder: Path, recorder: Path) -> dict[str, str]:
    path = (HERE / "hook", recorder, PACKAGE.parent, REPOSITORY)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "WALK_FOLDER": str(folder),
        "WALK_PACKAGE": str(PACKAGE),
        "WALK_ROLE": role,
    }


@contextmanager
def _serving(walk: Walk, folder: Path, recorder: Path) -> Iterator[Addresses]:
    command = [sys.executable, "-m", "polybus", "serve", "--data", str(folder / "data")]
    for dialect in (*walk.dialects, "admin"):
        command += ["--listen", f"{dialect}={LISTEN[dialect].format(folder=folder)}"]
    environment = _environment(SERVER, folder, recorder)
    with Program("walks-server", command, environment) as program:
        addresses: Addresses = {}
        while (line := program.line()) != "ready":
            if listening := re.fullmatch(r"listening (\w+) (\S+)", line):
                addresses[listening[1]] = listening[2]
        yield addresses


def _measure(name: str, walk: Walk, recorder: Path) -> Entered:
    # The path of a Unix socket has at most 107 bytes, so the folder is not below build/.
    with tempfile.TemporaryDirectory(prefix="walks-") as text:
        folder = Path(text)
        (folder / "run").write_bytes(b"\0")
        with _serving(walk, folder, recorder) as addresses:
            command = (sys.executable, "-m", "bench.walks.client", name, text)
            log = output_folder() / "walks-client.log"
            with log.open("wb") as output:
                ended = subprocess.run(
                    [*command, json.dumps(addresses)],
                    env=_environment(CLIENT, folder, recorder),
                    cwd=folder,
                    stdout=output,
                    stderr=output,
                    timeout=CLIENT_TIMEOUT_S,
                    check=False,
                )
            if ended.returncode:
                raise DidNotStart(f"the client of {name} exited with {ended.returncode}; see {log}")
        return Entered(name, walk.title, _entered(folder, walk.runs))


def _entered(folder: Path, runs: int) -> dict[str, frozenset[Function]]:
    """By role, the functions of every run with a message, without those of every idle run."""
    entered: dict[tuple[str, int], set[Function]] = defaultdict(set)
    for path in folder.glob("*.entered"):
        for line in path.read_text().splitlines():
            run, role, file, name = line.split("\t")
            function = (str(Path(file).relative_to(PACKAGE)), _function(name))
            entered[role, int(run)].add(function)
    counted = {}
    for role in (SERVER, CLIENT):
        messages = set.intersection(*(entered[role, run] for run in range(1, runs + 1)))
        timers = set.intersection(*(entered[role, run] for run in IDLE_RUNS))
        counted[role] = frozenset(one for one in messages - timers if one[1] != "<module>")
    return counted


def _function(qualified: str) -> str:
    """The name without comprehensions, which Python 3.11 compiles as functions of their own."""
    return re.sub(r"(\.<locals>)?\.<(listcomp|setcomp|dictcomp|genexpr)>", "", qualified)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench walks",
        description="Count the functions and files that one message enters.",
    )
    parser.add_argument("walks", nargs="*", metavar="NAME", help=f"of {', '.join(WALKS)}")
    parser.add_argument("--list", action="store_true", help="also print the functions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the functions to FILE")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.walks) - set(WALKS):
        parser.error(f"no such walk: {', '.join(sorted(unknown))}")
    return chosen


def _print_functions(entered: Entered) -> None:
    for role, functions in entered.by_role.items():
        print(f"\n{entered.title}, {role}")
        for file, name in sorted(functions):
            print(f"  {file}  {name}")


def main(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    recorder, results, failures = _compile_recorder(), [], []
    for name in chosen.walks or WALKS:
        print(f"… {WALKS[name].title}", file=sys.stderr, flush=True)
        try:
            results.append(_measure(name, WALKS[name], recorder))
        except (DidNotStart, subprocess.TimeoutExpired) as error:
            failures.append(f"bench: {error}")
    print(f"functions in files of {PACKAGE}, entered by one message\n")
    print(table([["walk", SERVER, CLIENT, "total"], *(entered.row() for entered in results)]))
    if chosen.list:
        for entered in results:
            _print_functions(entered)
    if chosen.json:
        content = {"package": str(PACKAGE), "walks": [entered.to_json() for entered in results]}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    for failure in failures:
        print(failure, file=sys.stderr)
    return FAILED if failures else 0
