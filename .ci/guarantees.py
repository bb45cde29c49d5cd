"""Writes the table of soak runs into docs/guarantees.md from docs/soak-runs.jsonl.

`--check` writes nothing and exits with 1 if the page does not show the recorded runs.
"""

import json
import sys
from pathlib import Path

PAGE = Path("docs/guarantees.md")
RUNS = Path("docs/soak-runs.jsonl")
START, END = "<!-- soak runs: start -->\n", "<!-- soak runs: end -->\n"


def main() -> int:
    head, _, rest = PAGE.read_text().partition(START)
    _, _, tail = rest.partition(END)
    page = f"{head}{START}{table()}{END}{tail}"
    if page == PAGE.read_text():
        return 0
    if "--check" in sys.argv[1:]:
        sys.exit("docs/guarantees.md does not show docs/soak-runs.jsonl: run .ci/guarantees.py")
    PAGE.write_text(page)
    return 0


def table() -> str:
    sums: dict[str, dict[str, float]] = {}
    totals: dict[str, tuple[int, int, str]] = {}
    for line in RUNS.read_text().splitlines():
        run = json.loads(line)
        runs, seconds, _ = totals.get(run["name"], (0, 0, ""))
        totals[run["name"]] = (runs + 1, seconds + run["seconds"], run["commit"])
        counts = sums.setdefault(run["name"], {})
        for name, count in run["counts"].items():
            known = counts.get(name, 0)
            counts[name] = max(known, count) if name.endswith("_max") else known + count
    rows = ["| test | runs | seconds | last commit | counts |", "|---|---|---|---|---|"]
    for name, (runs, seconds, commit) in sorted(totals.items()):
        counts_text = ", ".join(f"{key} {count:,}" for key, count in sums[name].items())
        rows.append(f"| `{name}` | {runs} | {seconds:,} | {commit} | {counts_text} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
