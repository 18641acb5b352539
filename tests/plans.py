"""Plans that no solver would choose: a random strategy for every operation of a program.

Any choice of strategies is a legal plan, since every sharding can be brought into every other.
Running random ones executes the rules, the strategies, the chains of resharding, the
reduce-scatters and `apply` at once; each must compute what one device computes.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autoshard import emit, planning
from autoshard.cost import Choices
from autoshard.graph import Op
from autoshard.jitted import PlannedFunction, planned_function
from autoshard.liveness import Liveness, liveness
from autoshard.problem import ShardingProblem, Solution, Status
from autoshard.reads import Reads
from autoshard.resharding import table
from autoshard.rules import rules_for
from autoshard.stages import Stages
from autoshard.strategies import Strategy
from autoshard.topology import Topology
from autoshard.trace import Program, trace

# Devices of one CPU exchange about a thousand arrays a second.
MOST_COLLECTIVES = 20_000
LONG = 100  # steps of a loop
SIZES = {"8": (8,), "4x2": (4, 2), "2x2x2": (2, 2, 2)}
# Programs this small are not worth XLA's time; its newer code generator takes most of it.
QUICK: dict[str, bool | str | int] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}


@functools.cache
def mesh_of(name: str) -> Mesh:
    sizes = SIZES[name]
    return Mesh(np.array(jax.devices()).reshape(sizes), ("a", "b", "c")[: len(sizes)])


def random_plan(
    fn: Callable,
    args: Sequence[Any],
    mesh: Mesh,
    seed: int,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> PlannedFunction:
    """Returns `fn` under a random plan; `options` as of `autoshard.plan`."""
    given = planning.Options(hardware="cpu", **options)
    program = trace(fn, args, dict(kwargs or {}), given.static_argnums, given.donate_argnums)
    target = planning.target(mesh, given)
    program, pins = planning.pinned(program, target, given)
    rules = rules_for([op.eqn for op in planning.leaf_ops(program)])
    strategies = tuple(planning.strategies(program, rules, target, pins))
    choices = _unpriced(program, strategies, target.topology)
    picked = _affordable(choices, random.Random(seed))
    solution = Solution(picked, 0.0, 0.0, Status.FEASIBLE, 0.0)
    constraints = emit.constraints(choices, solution.choices)
    priced = planning.Priced(program, target, choices, ())
    plan = planning.assemble(priced, solution, constraints, (), Stages("random plan"))
    return planned_function(plan, fn, mesh, given.static_argnums, program)


def _unpriced(program: Program, strategies, topology: Topology) -> Choices:
    """Returns the choices without the costs that a random plan has no use for."""
    ops = tuple(program.graph.leaves())
    producer = {v: (i, k) for i, op in enumerate(ops) for k, v in enumerate(op.results)}
    live = liveness(program.graph)
    return Choices(
        ops=ops,
        strategies=strategies,
        producer=producer,
        live=live,
        topology=topology,
        problem=ShardingProblem((), (), (), None),
        node_ties=(),
        edge_ties=(),
        donated=program.donated,
        reads=_reads(ops, strategies, producer, live, topology),
    )


def _reads(ops: Sequence[Op], strategies, producer, live: Liveness, topology: Topology) -> Reads:
    found = Reads()
    for i, op in enumerate(ops):
        for k, value in enumerate(op.operands):
            if value is None or not value.shape or value in live.fusion.free:
                continue
            a, r = producer[value]
            index = table(value.shape, value.itemsize, topology).index
            have = np.array([index(s.results[r]) for s in strategies[a]])
            want = np.array([index(s.operands[k]) for s in strategies[i]])
            found.add(i, k, a, found.offset(have), found.offset(want))
    return found


def _affordable(choices: Choices, rng: random.Random) -> tuple[int, ...]:
    """Returns a random pick, with the long loops left whole if they would run for minutes.

    A scan over thousands of steps with a reshard at every operation of its body takes hours.
    """
    picked = _pick(choices, rng)
    if collectives_run(choices, picked) <= MOST_COLLECTIVES:
        return picked
    return tuple(
        _whole(strategies, k) if op.trips >= LONG else k
        for op, strategies, k in zip(choices.ops, choices.strategies, picked, strict=True)
    )


def _whole(strategies: Sequence[Strategy], otherwise: int) -> int:
    """Returns the strategy that shards nothing, if a pin leaves one."""
    for k, s in enumerate(strategies):
        if not s.reduced and all(x.is_replicated for x in (*s.operands, *s.results)):
            return k
    return otherwise


def collectives_run(choices: Choices, picked: Sequence[int]) -> int:
    """Returns how many collectives a step runs, each as often as its loop goes round."""
    if not any(op.trips > 1 for op in choices.ops):
        return 0
    return sum(c.trips for c in emit.planned_collectives(choices, picked))


def _pick(choices: Choices, rng: random.Random) -> tuple[int, ...]:
    """Returns a strategy for each operation: any, or one that takes its operands as they are."""
    follow = rng.choice((0.0, 0.5, 0.9))
    picked: list[int] = []
    for i, op in enumerate(choices.ops):
        strategies = choices.strategies[i]
        positions = range(len(strategies))
        known = [
            (k, choices.sharding_of(v, picked))
            for k, v in enumerate(op.operands)
            if v is not None and choices.producer[v][0] < i
        ]
        if known and rng.random() < follow:
            kept = [_kept(s, known) for s in strategies]
            positions = [p for p in positions if kept[p] == max(kept)]
        # Few of all strategies reduce, and fewer scatter: take them as often as the others.
        kind = rng.choice(sorted({_kind(strategies[p]) for p in positions}))
        picked.append(rng.choice([p for p in positions if _kind(strategies[p]) == kind]))
    return tuple(picked)


def _kept(strategy: Strategy, known: Sequence[tuple[int, Any]]) -> int:
    return sum(strategy.operands[k] == sharding for k, sharding in known)


def _kind(strategy: Strategy) -> tuple[bool, bool]:
    return bool(strategy.reduced), bool(strategy.scattered)


def on_one_device(fn: Callable, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
    return jax.jit(fn, compiler_options=QUICK)(*args, **(kwargs or {}))


def run(planned: PlannedFunction, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
    """Runs without the optimizations that a small program would not repay."""
    kwargs = dict(kwargs or {})
    compiled = planned.lower(*args, **kwargs).compile(compiler_options=QUICK)
    flat = planned._flat_arguments(tuple(args), kwargs)
    return compiled(*jax.device_put(flat, planned._shardings))


def check_random_plans(
    fn: Callable,
    args: Sequence[Any],
    seeds: Sequence[int] = (0, 1),
    mesh: str | None = None,
    tolerance: float = 1e-5,
    kwargs: Mapping[str, Any] | None = None,
    reference: Callable | None = None,
    **options: Any,
) -> None:
    """Asserts that `fn` under random plans computes what it, or `reference`, does on one device."""
    wanted = on_one_device(reference or fn, args, kwargs)
    for seed in seeds:
        where = mesh_of(mesh or ("2x2x2", "4x2")[seed % 2])
        planned = random_plan(fn, args, where, seed, kwargs, **options)
        try:
            found = run(planned, args, kwargs)
            assert_same(found, wanted, tolerance)
        except Exception as e:
            e.add_note(f"under random plan {seed} on {where.shape}")
            raise


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Compares trees leaf by leaf; floats relative to the largest element of the leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        where = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), where
        assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False), where
        a, b = _numbers(x), _numbers(y)
        if not np.issubdtype(b.dtype, np.inexact):
            np.testing.assert_array_equal(a, b, err_msg=where)
            continue
        scale = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * scale + 1e-7, err_msg=where
        )


def _numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4:
        x = x.astype(jnp.float32)
    if x.dtype in (jnp.int4, jnp.uint4):
        x = x.astype(jnp.int32)
    return np.asarray(x)
