"""How long planning takes, stage by stage: by depth, and for large models from abstract arguments.

    python -m benchmarks.planning_time depth     # GPT 8B of 4 to 128 unrolled layers, mesh 16 x 4
    python -m benchmarks.planning_time models    # Llama-3-like 8B, 70B, 405B, scanned and unrolled

Every plan is made in a process of its own, one at a time. The table is printed line by line and
written to `benchmarks/results/planning_time_<which>.md`. `planned` is all but tracing; `variables`
counts the strategies of what is solved first, after folding; `gap` is between cost and bound.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import subprocess
import sys

import autoshard
from autoshard.coarsen import folded
from models import gpt

RESULTS = pathlib.Path(__file__).parent / "results"
COLUMNS = (
    "model", "mesh", "nodes", "folded", "variables", "trace s", "planned s", "solve s",
    "step ms", "gap", "peak GiB", "host GiB",
)  # fmt: skip
CASES = {
    "depth": [("8b", layers, "a=16,b=4") for layers in (4, 8, 16, 32, 64, 128)],
    "models": [
        (size, layers, mesh)
        for size, mesh in (("8b", "a=16,b=4"), ("70b", "a=16,b=16"), ("405b", "a=16,b=16,c=4"))
        for layers in (0, gpt.SIZES[size].layers)
    ],
}


def measure(size: str, layers: int, mesh: str) -> dict:
    """Plans a GPT on v5p: scanned as it is, or of so many unrolled layers."""
    sizes = gpt.SIZES[size]
    if layers:
        sizes = dataclasses.replace(sizes, layers=layers, scan=False)
    arguments = gpt.example_arguments(sizes)
    where = {"mesh": mesh, "hardware": "v5p", "donate_argnums": gpt.donate_argnums}
    plan = autoshard.plan(gpt.train_step, *arguments, **where)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stages = dict(plan.stages)
    problem = autoshard.sharding_problem(gpt.train_step, *arguments, **where)
    count = len(problem.nodes)
    folds = folded(problem)
    solved = problem if folds is None else folds.problem(problem)
    return {
        "model": f"{size}, {layers} unrolled" if layers else f"{size}, {sizes.layers} scanned",
        "mesh": mesh,
        "nodes": f"{count:,}",
        "folded": f"{len(solved.nodes):,}" if folds else "-",
        "variables": f"{sum(len(n.costs_s) for n in solved.nodes):,}",
        "trace s": f"{stages['trace']:.1f}",
        "planned s": f"{sum(s for name, s in stages.items() if name != 'trace'):.1f}",
        "solve s": f"{stages['solve']:.1f}",
        "step ms": f"{plan.objective_s * 1e3:.6g}",
        "gap": f"{1 - plan.bound_s / plan.objective_s:.2%}",
        "peak GiB": f"{plan.peak_bytes / 2**30:.1f}",
        "host GiB": f"{host / 2**30:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=sorted(CASES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for case in CASES[args.which]:
        command = [sys.executable, "-m", "benchmarks.planning_time", args.which]
        run = subprocess.run(
            [*command, "--one", json.dumps(case)], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise SystemExit(f"{case}: {run.stderr}")
        row = json.loads(run.stdout.splitlines()[-1])
        lines.append("| " + " | ".join(row[c] for c in COLUMNS) + " |")
        print(lines[-1], flush=True)
    path = RESULTS / f"planning_time_{args.which}.md"
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
