"""The table and the plot of `benchmarks.plan_quality`."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]


def write_table(rows: Rows, folder: pathlib.Path) -> None:
    (folder / "plan_quality.md").write_text(table(rows))


def ratio(rows: Rows) -> float | None:
    """Returns the step of our chosen plan over that of the best hand plan, of one workload."""
    mine = [r for r in rows if r["ours"]]
    theirs = [r["compiled"]["step_s"] for r in rows if not r["ours"] and r["compiled"]["step_s"]]
    if not mine or not theirs or not mine[0]["compiled"]["step_s"]:
        return None
    return mine[0]["compiled"]["step_s"] / min(theirs)


def table(rows: Rows) -> str:
    names = list(dict.fromkeys(r["workload"] for r in rows))
    groups = {n: [r for r in rows if r["workload"] == n] for n in names}
    ratios = {n: x for n, g in groups.items() if (x := ratio(g))}
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else math.nan
    lines = [
        "# Our plans beside hand plans, as the TPU compiler sees them",
        "",
        "The step is estimated from the compiled schedule: the compiler's cycles, and collectives",
        "priced by bytes and links. Our first row of a workload is the plan that we choose.",
        "",
        f"Ours over the best hand plan, geometric mean over {len(ratios)} workloads: {mean:.3f}.",
        "",
        "| workload | hand plans | best hand plan | its step, ms | ours, ms | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for n, g in groups.items():
        theirs = [r for r in g if not r["ours"] and r["compiled"]["step_s"]]
        if n not in ratios:
            continue
        best = min(theirs, key=lambda r: r["compiled"]["step_s"])
        mine = next(r for r in g if r["ours"])
        lines.append(
            f"| {n} | {sum(not r['ours'] for r in g)} | {best['plan']}, {best['mesh']} | "
            f"{best['compiled']['step_s'] * 1e3:.2f} | {mine['compiled']['step_s'] * 1e3:.2f} | "
            f"{ratios[n]:.3f} |"
        )
    for n, g in groups.items():
        lines += ["", f"## {n}", "", *_rows(g)]
    return "\n".join(lines) + "\n"


def _rows(group: Rows) -> list[str]:
    steps = [r["compiled"]["step_s"] for r in group if not r["ours"] and r["compiled"]["step_s"]]
    best = min(steps, default=math.nan)
    lines = [
        "| plan | mesh | step, ms | predicted, ms | exposed, ms | peak, GiB | planning, s | "
        "compiling, s | over the best by hand |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in group:
        c = r["compiled"]
        if not c["step_s"]:
            lines.append(f"| {r['plan']} | {r['mesh']} | does not fit | | | | | | |")
            continue
        predicted = f"{r['predicted_s'] * 1e3:.2f}" if r["predicted_s"] else ""
        planning = f"{r['plan_s']:.1f}" if r["plan_s"] else ""
        lines.append(
            f"| {r['plan']} | {r['mesh']} | {c['step_s'] * 1e3:.2f} | {predicted} | "
            f"{c['exposed_s'] * 1e3:.2f} | {c['peak_bytes'] / 2**30:.2f} | {planning} | "
            f"{c['compile_s']:.0f} | {c['step_s'] / best:.3f} |"
        )
    return lines
