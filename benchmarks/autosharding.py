"""Compiles a workload under XLA's own AutoSharding, in an environment of its own.

The last jax that offers it to Python is 0.9: `pip install 'jax[tpu]==0.9.1' flax optax`. So this
module imports nothing of autoshard; `benchmarks.plan_quality --autosharding PYTHON` runs it with
that environment's interpreter and reads what it prints to a file:

    PYTHON -m benchmarks.autosharding WORKLOAD data=4,model=4 0,1,2,... OUTPUT
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.workloads import WORKLOADS, Workload

PACKED = "xla_tpu_buffer_assignment_enable_fast_merge_fallback"  # see autoshard.compiling
BUDGET = "--xla_tpu_auto_spmd_partitioning_memory_budget_gb="


def found_by(
    python: str,
    workload: Workload,
    mesh: str,
    ids: Sequence[int],
    budget_gib: int,
    patience_s: float,
) -> dict[str, Any]:
    """Runs this module with another interpreter, under a memory budget per device.

    Returns:
      As `benchmarks.compiled` keeps it: the text of the program and its memory, or why there is
      none.
    """
    output = pathlib.Path(f"{workload.name}.{os.getpid()}.json".replace(" ", "-")).resolve()
    environment = {**os.environ, "LIBTPU_INIT_ARGS": f"{BUDGET}{budget_gib}"}
    command = [
        python, "-m", "benchmarks.autosharding", workload.name, mesh, ",".join(map(str, ids)),
        str(output),
    ]  # fmt: skip
    start = time.perf_counter()
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=patience_s
        )
        if run.returncode == 0:
            return json.loads(output.read_text())
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        refused = next((x for x in reversed(lines) if "Error" in x), lines[-1] if lines else "")
        refused = refused or f"ended with {run.returncode}"
        return {"refused": refused[:400], "compile_s": time.perf_counter() - start}
    except subprocess.TimeoutExpired:
        refused = f"not compiled within {patience_s:.0f} s"
        return {"refused": refused, "compile_s": patience_s, "patience_s": patience_s}
    finally:
        output.unlink(missing_ok=True)


def _mesh(workload: Workload, mesh: str, ids: Sequence[int]) -> Mesh:
    """`ids` of the devices in the order of the mesh, as `autoshard.aot` lays them out."""
    name, _, slices = workload.target.partition("*")
    several = {"num_slices": int(slices)} if slices else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, **several)
    devices = {d.id: d for d in described.devices}
    axes = [axis.partition("=") for axis in mesh.split(",")]
    shape = [int(size) for _, _, size in axes]
    return Mesh(np.array([devices[i] for i in ids]).reshape(shape), [a for a, _, _ in axes])


def _compiled(lowered: Any) -> Any:
    """Compiles as our plans are, if this compiler knows the option."""
    try:
        return lowered.compile(compiler_options={PACKED: False})
    except jax.errors.JaxRuntimeError as e:
        if PACKED not in str(e):
            raise
        return lowered.compile()


def main(name: str, shape: str, ids: str, output: str) -> None:
    from jax._src.named_sharding import AUTO  # pyright: ignore[reportAttributeAccessIssue]

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_use_shardy_partitioner", False)
    workload = next(w for w in WORKLOADS if w.name == name)
    mesh = _mesh(workload, shape, [int(i) for i in ids.split(",")])
    start = time.perf_counter()
    jitted = jax.jit(
        workload.step, in_shardings=AUTO(mesh), out_shardings=AUTO(mesh),
        donate_argnums=workload.donate_argnums,
    )  # fmt: skip
    made = _compiled(jitted.lower(*workload.arguments()))
    stats = made.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    found = {
        "text": made.as_text(),
        "memory": {f"{n}_bytes": getattr(stats, f"{n}_size_in_bytes") for n in names},
        "positions": list(range(mesh.size)),
        "compile_s": time.perf_counter() - start,
    }
    pathlib.Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
