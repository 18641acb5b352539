"""Our plans against those of experts, judged by what the TPU compiler makes of them.

    python -m benchmarks.plan_quality                       all workloads: hours; resumes
    python -m benchmarks.plan_quality --only 'GPT 1B,DLRM'  some of them
    python -m benchmarks.plan_quality --hand 4 --ours 1     the likeliest four hand plans, and ours
                                                            for the mesh that we would choose

Each workload is planned for every mesh shape and compiled ahead of time; so are hand plans
(`benchmarks.baselines`). A program that is not compiled within `--patience` seconds is left out,
and the table says so. Programs compiled before are read from `--cache`; finished rows stand in
`results/plan_quality.json`, the table in `results/plan_quality.md`.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

from jax.sharding import Mesh  # noqa: E402 (after the platform is set)
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

import autoshard  # noqa: E402
from autoshard import aot  # noqa: E402
from autoshard.compiling import compiler_options  # noqa: E402
from autoshard.hardware import preset  # noqa: E402
from autoshard.sharding import MeshShape  # noqa: E402
from autoshard.trace import Program, trace  # noqa: E402
from benchmarks import autosharding  # noqa: E402
from benchmarks.baselines import hand_plans  # noqa: E402
from benchmarks.compiled import Compiled, compiled, text_of  # noqa: E402
from benchmarks.hand import HandJit, HandPlan  # noqa: E402
from benchmarks.quality_table import AUTOSHARDING, write_table  # noqa: E402
from benchmarks.workloads import GIB, WORKLOADS, Workload  # noqa: E402

HERE = pathlib.Path(__file__).parent
CACHE = pathlib.Path.home() / ".cache" / "autoshard" / "plan_quality"
RESULTS = HERE / "results"


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan of a workload, predicted (ours only) and compiled; not `ours`: by hand, or by
    AUTOSHARDING."""

    workload: str
    plan: str
    mesh: str
    ours: bool
    compiled: Compiled
    predicted_s: float | None = None
    predicted_bytes: float | None = None
    plan_s: float | None = None
    file: str = ""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles for a workload: out of the cache, or within some seconds."""

    workload: Workload
    cache: pathlib.Path
    patience_s: float

    def program(
        self, lowered: Any, devices: Mesh, options: dict[str, Any], whose: dict[str, Any]
    ) -> tuple[Compiled, str]:
        """Compiles a lowered program, known again by its text and all it is compiled with: the
        `options` given here, and `whose`, which it has by itself."""
        text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        ids = [d.id for d in devices.devices.flat]
        versions = f"{jax.__version__} {importlib.metadata.version('libtpu')}"
        what = f"{versions} {devices.shape} {ids} {sorted((options | whose).items())} {text}"
        return self(what, devices, functools.partial(text_of, devices, lowered, options))

    def __call__(
        self,
        what: str,
        devices: Mesh,
        make: Callable[[], dict[str, Any]],
        patience_s: float | None = None,
    ) -> tuple[Compiled, str]:
        w = self.workload
        key = f"{w.model} {w.base} {w.sizes} {w.target} {what}"
        patience_s = patience_s or self.patience_s
        found, path = compiled(key, devices, chip_of(w), make, self.cache, patience_s)
        limit, peak = w.memory_limit_bytes, found.peak_bytes
        if limit is not None and peak is not None and peak > limit:
            refused = f"takes {peak / GIB:.2f} of {limit / GIB:.2f} GiB"
            found = Compiled(compile_s=found.compile_s, refused=refused)
        return found, path.name


def ours(workload: Workload, compiler: Compiler, count: int) -> Iterator[Row]:
    """Yields our plan on every mesh shape, the one we would choose first."""
    args = workload.arguments()
    plans = []
    for mesh in workload.meshes:
        devices = aot.mesh(workload.target, MeshShape.parse(mesh))
        start = time.perf_counter()
        plan = autoshard.plan(
            workload.step,
            *args,
            mesh=devices,
            hardware=chip_of(workload),
            memory_limit_bytes=workload.memory_limit_bytes,
            donate_argnums=workload.donate_argnums,
        )
        plans.append((plan, devices, time.perf_counter() - start))
    plans.sort(key=lambda p: p[0].objective_s)
    for plan, devices, plan_s in plans[:count]:
        lowered = plan.jit(workload.step, devices).lower(*args)
        found, file = compiler.program(lowered, devices, {}, compiler_options(devices))
        yield Row(
            workload.name, "ours", str(plan.mesh), True, found, plan.step_time_s, plan.peak_bytes,
            plan_s, file,
        )  # fmt: skip


def by_hand(workload: Workload, plan: HandPlan, program: Program, compiler: Compiler) -> Row:
    devices = aot.mesh(workload.target, MeshShape.parse(plan.mesh))
    lowered = HandJit(program, workload.model, plan, devices).lower()
    options = compiler_options(devices, plan.compiler_options)
    found, file = compiler.program(lowered, devices, options, {})
    return Row(workload.name, plan.name, plan.mesh, False, found, file=file)


def by_xla(workload: Workload, mesh: str, compiler: Compiler, python: str) -> Row:
    """XLA's AutoSharding on a mesh, at the memory budget that serves it best.

    It counts communication only, so that with room for everything it shards nothing.
    """
    devices = aot.mesh(workload.target, MeshShape.parse(mesh))
    memory = workload.memory_limit_bytes or preset(chip_of(workload)).chip.usable_hbm_bytes
    ids = [d.id for d in devices.devices.flat]
    made = []
    for share in (1, 2, 4):
        budget = max(int(memory / GIB / share), 1)
        make = functools.partial(
            autosharding.found_by, python, workload, mesh, ids, budget, compiler.patience_s
        )
        made.append(compiler(f"{AUTOSHARDING} {mesh} {budget}", devices, make, math.inf))
    found, file = min(made, key=lambda m: m[0].step_s or math.inf)
    return Row(workload.name, AUTOSHARDING, mesh, False, found, file=file)


def chip_of(workload: Workload) -> str:
    return workload.target.partition(":")[0]


def rows_of(
    workload: Workload, compiler: Compiler, mine: int, hand: int, python: str = ""
) -> Iterator[Row]:
    best = ""
    for row in ours(workload, compiler, mine):
        best = best or row.mesh
        yield row
    if python:
        yield by_xla(workload, best or workload.meshes[-1], compiler, python)
    args = workload.arguments()
    program = trace(workload.step, args, donate_argnums=workload.donate_argnums)
    for plan in hand_plans(workload)[:hand]:
        yield by_hand(workload, plan, program, compiler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="workloads, comma-separated")
    parser.add_argument("--ours", type=int, default=3, help="plans of ours, a mesh each")
    parser.add_argument("--hand", type=int, default=100, help="hand plans a workload")
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds a compilation")
    parser.add_argument(
        "--autosharding", default="", metavar="PYTHON",
        help="of an environment with jax 0.9.1: XLA's AutoSharding too, on the mesh that we choose",
    )  # fmt: skip
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    wanted = [name.strip() for name in args.only.split(",") if name.strip()]
    named = {w.name: w for w in WORKLOADS}
    chosen = [named[name] for name in wanted or named]
    store = RESULTS / "plan_quality.json"
    console = Console(soft_wrap=True)
    with Progress(console=console) as progress:
        task = progress.add_task(
            "plans",
            total=sum(
                args.ours + bool(args.autosharding) + len(hand_plans(w)[: args.hand])
                for w in chosen
            ),
        )
        for workload in chosen:
            rows = []
            compiler = Compiler(workload, args.cache, args.patience)
            for row in rows_of(workload, compiler, args.ours, args.hand, args.autosharding):
                rows.append(row)
                progress.advance(task)
                console.print(line(row))
                save(store, workload.name, rows)
                write_table(json.loads(store.read_text()), RESULTS)


def line(row: Row) -> str:
    c = row.compiled
    if c.refused or c.step_s is None:
        return f"{row.workload} | {row.plan} | {row.mesh} | {c.refused[:120]}"
    predicted = f", predicted {row.predicted_s * 1e3:.2f} ms" if row.predicted_s else ""
    return (
        f"{row.workload} | {row.plan} | {row.mesh} | {c.step_s * 1e3:.2f} ms (exposed "
        f"{(c.exposed_s or 0) * 1e3:.2f}), {(c.peak_bytes or 0) / 2**30:.2f} GiB{predicted}, "
        f"compiled in {c.compile_s:.0f} s {row.file}"
    )


def save(store: pathlib.Path, workload: str, rows: list[Row]) -> None:
    """Replaces the rows of a workload that are made anew, keeps the others; ours stand first."""
    kept = json.loads(store.read_text()) if store.exists() else []
    made = {(r.plan, r.mesh) for r in rows}
    kept = [r for r in kept if r["workload"] != workload or (r["plan"], r["mesh"]) not in made]
    order = [w.name for w in WORKLOADS]
    found = [dataclasses.asdict(r) for r in rows] + kept
    found.sort(key=lambda r: (order.index(r["workload"]), not r["ours"]))
    store.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
