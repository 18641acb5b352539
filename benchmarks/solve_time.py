"""How good the solver's answers are, how near their proof, and how long both take.

    python -m benchmarks.solve_time FOLDER [--only B,G] [--limit-s 60]

FOLDER holds IOPDDL instances (`*.json`, `*.json.gz`, https://github.com/google/iopddl) and perhaps
a `reference.txt` with lines `name cost`. Time limits are the contest's unless given; they include
reading the file. The table is printed line by line.
"""

import argparse
import math
import pathlib
import time

from autoshard.problem import read
from autoshard.solve import solve

# Seconds for each public instance of the ASPLOS 2025 contest, as its rules state them.
CONTEST_LIMIT_S = {"A": 60, "B": 60, "D": 60, "G": 120, "K": 180}
CONTEST_LIMIT_S |= {"M": 180, "N": 180, "P": 240, "S": 240, "V": 300}
DEFAULT_LIMIT_S = 60.0


def references(folder: pathlib.Path) -> dict[str, float]:
    path = folder / "reference.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return {name: float(cost) for name, cost in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--limit-s", type=float, help="the same time limit for all")
    args = parser.parse_args()
    known = references(args.folder)
    only = [n for n in args.only.split(",") if n]
    print(
        "| instance | nodes | edges | core | cost | reference | ratio | gap | solved | s | limit |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    ratios = []
    for path in sorted(args.folder.glob("*.json*")):
        name = path.name.split(".")[0]
        if only and name not in only:
            continue
        limit_s = args.limit_s or CONTEST_LIMIT_S.get(name, DEFAULT_LIMIT_S)
        start = time.monotonic()
        problem = read(path)
        left_s = limit_s - (time.monotonic() - start)
        solution = solve(problem, time_limit_s=left_s, deterministic=False)
        took_s = time.monotonic() - start
        feasible = bool(solution.choices) and problem.is_feasible(solution.choices)
        ratio = solution.objective_s / known[name] if name in known else math.nan
        ratios.append(ratio)
        core = f"{solution.stats.get('core_nodes', '-')}"
        columns = [
            name,
            f"{len(problem.nodes):,}",
            f"{sum(e.a != e.b for e in problem.edges):,}",
            core,
        ]
        columns += [f"{solution.objective_s:.6g}" if feasible else "none"]
        columns += [f"{known[name]:.6g}" if name in known else "-", f"{ratio:.4f}"]
        columns += [f"{solution.gap:.3%}", solution.status.name.lower()]
        columns += [f"{took_s:.1f}", f"{limit_s:g}"]
        print("| " + " | ".join(columns) + " |", flush=True)
    found = [r for r in ratios if math.isfinite(r) and r > 0]
    if found:
        mean = math.exp(sum(math.log(r) for r in found) / len(found))
        print(f"\ngeometric mean of the ratios: {mean:.4f}")


if __name__ == "__main__":
    main()
