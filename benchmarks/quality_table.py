"""The table and the plot of `benchmarks.plan_quality`."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]
AUTOSHARDING = "XLA AutoSharding"  # its plan's name


def write_table(rows: Rows, folder: pathlib.Path) -> None:
    (folder / "plan_quality.md").write_text(table(rows))
    (folder / "plan_quality.svg").write_text(plot(rows))


def ratios(rows: Rows) -> tuple[float, float] | None:
    """Returns our step over that of the best hand plan, of one workload: chosen, and refined.

    Refined is the fastest of our plans for the three meshes once compiled, which is what
    `autoshard.plan(refine=...)` starts with.
    """
    mine = [r["compiled"]["step_s"] or math.inf for r in rows if r["ours"]]
    theirs = _steps(rows)
    if not mine or not theirs:
        return None
    return mine[0] / min(theirs), min(mine) / min(theirs)


def _by_hand(row: dict[str, Any]) -> bool:
    return not row["ours"] and row["plan"] != AUTOSHARDING


def _steps(rows: Rows) -> list[float]:
    """Seconds of the hand plans that fit."""
    return [r["compiled"]["step_s"] for r in rows if _by_hand(r) and r["compiled"]["step_s"]]


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def table(rows: Rows) -> str:
    names = list(dict.fromkeys(r["workload"] for r in rows))
    groups = {n: [r for r in rows if r["workload"] == n] for n in names}
    found = {n: x for n, g in groups.items() if (x := ratios(g))}
    chosen, refined = (mean([x[k] for x in found.values()]) for k in (0, 1))
    xla = {n: x for n, g in groups.items() if (x := over_xla(g))}
    lines = [
        "# Our plans beside hand plans, as the TPU compiler sees them",
        "",
        "The step is estimated from the compiled schedule: the compiler's cycles, and collectives",
        "priced by bytes and links. Chosen is the plan for the mesh that we predict to be best,",
        "refined the fastest of ours once compiled (of as many meshes as are listed below), as",
        "`plan(refine=)` finds it.",
        "",
        "Seconds of planning and compiling are those of two cores that others shared.",
        "",
        f"Ours over the best hand plan, geometric mean over {len(found)} workloads: "
        f"{chosen:.3f} chosen, {refined:.3f} refined.",
    ]
    if xla:
        lines += [
            "XLA AutoSharding, told to keep to all, half or a quarter of the memory, whichever",
            f"serves it best, over ours, geometric mean over {len(xla)} workloads: "
            f"{mean(list(xla.values())):.2f}.",
        ]
    lines += [
        "",
        "| workload | hand plans | their meshes | best hand plan | its step, ms | chosen | refined "
        "| XLA AutoSharding over ours |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_summary(n, g, found.get(n), xla.get(n)) for n, g in groups.items()]
    for n, g in groups.items():
        lines += ["", f"## {n}", "", *_rows(g)]
    return "\n".join(lines) + "\n"


def over_xla(rows: Rows) -> float | None:
    """Returns AutoSharding's step over that of the plan that we choose, of one workload."""
    mine = [r["compiled"]["step_s"] for r in rows if r["ours"]]
    theirs = [r["compiled"]["step_s"] for r in rows if r["plan"] == AUTOSHARDING]
    return theirs[0] / mine[0] if mine and theirs and mine[0] and theirs[0] else None


def _summary(name: str, group: Rows, ratio: tuple[float, float] | None, xla: float | None) -> str:
    by_hand = [r for r in group if _by_hand(r)]
    answered = [r for r in by_hand if not r["compiled"]["refused"].startswith("not compiled")]
    cells = [name, str(len(answered)), str(len({r["mesh"] for r in answered}))]
    if ratio is None:
        cells += ["none of them compiled or fits" if by_hand else "none tried", "", "", ""]
    else:
        made = [r for r in by_hand if r["compiled"]["step_s"]]
        best = min(made, key=lambda r: r["compiled"]["step_s"])
        cells += [f"{best['plan']}, {best['mesh']}", f"{best['compiled']['step_s'] * 1e3:.2f}"]
        cells += [f"{x:.3f} x" for x in ratio]
    tried = [r for r in group if r["plan"] == AUTOSHARDING]
    why = _refused(tried[0]["compiled"]) if tried else "not tried"
    cells.append(f"{xla:.2f} x" if xla else why)
    return f"| {' | '.join(cells)} |"


def _refused(compiled: dict[str, Any]) -> str:
    return compiled["refused"] if len(compiled["refused"]) < 60 else "does not fit"


def _rows(group: Rows) -> list[str]:
    best = min(_steps(group), default=math.nan)
    lines = [
        "| plan | mesh | step, ms | predicted, ms | exposed, ms | peak, GiB | planning, s | "
        "compiling, s | over the best by hand |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in group:
        c = r["compiled"]
        if not c["step_s"]:
            cells = (r["plan"], r["mesh"], _refused(c), "", "", "", "", f"{c['compile_s']:.0f}", "")
            lines.append(f"| {' | '.join(cells)} |")
            continue
        predicted = f"{r['predicted_s'] * 1e3:.2f}" if r["predicted_s"] else ""
        planning = f"{r['plan_s']:.1f}" if r["plan_s"] else ""
        ratio = "" if math.isnan(best) else f"{c['step_s'] / best:.3f}"
        lines.append(
            f"| {r['plan']} | {r['mesh']} | {c['step_s'] * 1e3:.2f} | {predicted} | "
            f"{c['exposed_s'] * 1e3:.2f} | {c['peak_bytes'] / 2**30:.2f} | {planning} | "
            f"{c['compile_s']:.0f} | {ratio} |"
        )
    return lines


def plot(rows: Rows) -> str:
    """Returns an SVG: for each workload our steps (filled) and the hand plans' (rings), over the
    best hand plan's, on a logarithmic axis from 0.5 to 8."""
    names = list(dict.fromkeys(r["workload"] for r in rows))
    width, row, left = 640, 26, 150
    height = row * (len(names) + 2)

    def x(ratio: float) -> float:
        return left + (width - left - 20) * (math.log2(min(max(ratio, 0.5), 8.0)) + 1) / 4

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in (0.5, 1, 2, 4, 8):
        parts.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{row}" y2="{height - row}" '
            f'stroke="{"black" if tick == 1 else "#ccc"}"/>'
            f'<text x="{x(tick):.1f}" y="{height - 8}" text-anchor="middle">{tick} x</text>'
        )
    for k, name in enumerate(names):
        y = row * (k + 1.5)
        group = [r for r in rows if r["workload"] == name and r["compiled"]["step_s"]]
        best = min(_steps(group), default=math.nan)
        parts.append(f'<text x="8" y="{y + 4:.0f}">{name}</text>')
        for r in group if best == best else ():
            style = 'fill="#c00"' if r["ours"] else 'fill="none" stroke="#036"'
            at = x(r["compiled"]["step_s"] / best)
            parts.append(f'<circle cx="{at:.1f}" cy="{y:.0f}" r="4" {style}/>')
    legend = "step over the best hand plan's: ours filled, by hand rings"
    return "\n".join([*parts, f'<text x="{left}" y="16">{legend}</text>', "</svg>"]) + "\n"
