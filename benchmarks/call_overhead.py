"""How much a warm call of a decorated step costs beside the planned jitted function itself.

    python -m benchmarks.call_overhead

A tree of 300 small arrays on 8 CPU devices, so that the call and not the computation is timed; the
three kinds of call take turns and the medians are compared. `jax.jit` is the same function jitted
with the plan's shardings.
"""

import statistics
import time

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

import autoshard  # noqa: E402

ARRAYS = 300
CALLS = 300


def step(tree):
    return jax.tree.map(lambda x: x + 1.0, tree)


def main() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    tree = {f"w{i:03d}": jnp.zeros((8, 8)) for i in range(ARRAYS)}
    decorated = autoshard.jit(step, mesh=mesh)
    planned = decorated.plan(tree).jit(step, mesh)
    tree = decorated(tree)
    planned(tree)
    calls = {"jax.jit": planned._jitted, "Plan.jit": planned, "autoshard.jit": decorated}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(CALLS):
        names = list(calls)
        for name in names[i % 3 :] + names[: i % 3]:  # nobody always comes first
            start = time.perf_counter()
            out = calls[name](tree)
            times[name].append(time.perf_counter() - start)
            jax.block_until_ready(out)
            del out
    base = statistics.median(times["jax.jit"])
    for name, samples in times.items():
        median = statistics.median(samples)
        over = median - base
        print(f"{name:<14} median {median * 1e6:8.1f} us, {over * 1e6:+7.1f} us over jax.jit")


if __name__ == "__main__":
    main()
