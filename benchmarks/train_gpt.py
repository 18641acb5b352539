"""Trains a small GPT on English text, sharded over 8 devices, beside the same run on one.

    python -m benchmarks.train_gpt
    python -m benchmarks.train_gpt --mesh data=8 --steps 50

The text is the documentation that every Python installation holds, one token a byte; the devices
are virtual ones on the CPU. Exits with an error if the two runs disagree in losses or parameters.
"""

import argparse
import sys
import time
from pydoc_data import topics

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import autoshard  # noqa: E402 (the number of devices is set before anything asks for it)
from models import gpt  # noqa: E402

TOLERANCE = 1e-5  # relative, float32, over the whole run
SIZES = gpt.SIZES["small"]


def english_tokens() -> np.ndarray:
    """Returns Python's language reference as bytes, int32[N]."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def batches(tokens: np.ndarray, seed: int = 0):
    """Yields random windows of the text: tokens and the ones that follow, both int32[B, S]."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - SIZES.length, (SIZES.batch, 1))
        windows = tokens[starts + np.arange(SIZES.length + 1)]
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def parse_mesh(text: str) -> jax.sharding.Mesh:
    """Reads `data=4,model=2`."""
    names, sizes = zip(*(axis.split("=") for axis in text.split(",")), strict=True)
    return jax.make_mesh(tuple(int(size) for size in sizes), names)


def distance(a, b) -> float:
    """Returns the largest |a - b| / |b|, in the Euclidean norm, over the leaves of two trees."""

    def of_leaf(x, y):
        return np.linalg.norm(np.asarray(x) - np.asarray(y)) / np.linalg.norm(np.asarray(y))

    return float(max(jax.tree.leaves(jax.tree.map(of_leaf, a, b))))


def show_progress(step: int, steps: int, loss: float, elapsed_s: float) -> None:
    """One line, refreshed on a terminal; elsewhere a line every 25 steps."""
    line = f"step {step:4d}/{steps}  loss {loss:.4f}  {elapsed_s:5.1f} s"
    last = step == steps
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if last else "", flush=True)
    elif last or step == 1 or step % 25 == 0:
        print(line, flush=True)


def train(mesh: jax.sharding.Mesh, steps: int) -> bool:
    """Runs both trainings in step; returns whether they agree."""
    donate = gpt.donate_argnums
    sharded_step = autoshard.jit(mesh=mesh, donate_argnums=donate)(gpt.train_step)
    one_device_step = jax.jit(gpt.train_step, donate_argnums=donate)
    data = batches(english_tokens())

    state, example = gpt.init(SIZES)
    one_state, _ = gpt.init(SIZES)
    start_s = time.perf_counter()
    print(sharded_step.plan(state, example).explain())
    print(f"planned in {time.perf_counter() - start_s:.1f} s\n")

    start_s = time.perf_counter()
    losses, one_losses = [], []
    for step in range(1, steps + 1):
        batch = next(data)
        state, loss = sharded_step(state, batch)
        one_state, one_loss = one_device_step(one_state, batch)
        losses.append(float(loss))
        one_losses.append(float(one_loss))
        show_progress(step, steps, losses[-1], time.perf_counter() - start_s)
    return report(losses, one_losses, distance(state.params, one_state.params))


def report(losses: list[float], one_losses: list[float], params_distance: float) -> bool:
    relative = np.abs(np.subtract(losses, one_losses)) / np.abs(one_losses)
    print(f"\nloss            {losses[0]:.4f} -> {losses[-1]:.4f} nats a byte")
    print(f"one device      {one_losses[0]:.4f} -> {one_losses[-1]:.4f}")
    print(f"losses differ   by at most {relative.max():.1e} (relative, {len(losses)} steps)")
    print(f"parameters      by at most {params_distance:.1e} (relative norm, after the last step)")
    agree = bool(relative.max() <= TOLERANCE and params_distance <= TOLERANCE)
    print(f"{'agree' if agree else 'DISAGREE'} within {TOLERANCE:.0e}")
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains a small GPT on 8 devices and on one.")
    parser.add_argument("--mesh", type=parse_mesh, default="data=4,model=2", help="axes and sizes")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    return 0 if train(args.mesh, args.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
