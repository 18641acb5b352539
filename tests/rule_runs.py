"""Every strategy of every rule, run on 2 x 2 x 2 devices as a plan emits it.

`python -m tests.rule_runs > docs/rules_executed.md` makes the table anew.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh, NamedSharding

from autoshard import emit
from autoshard.apply import Constraints, constrained
from autoshard.factors import Rule
from autoshard.graph import Kind, Op
from autoshard.sharding import MeshShape, Sharding
from autoshard.strategies import Strategy, strategies
from tests.plans import QUICK, mesh_of
from tests.rule_programs import ruled_equations

MESH = MeshShape.parse("a=2,b=2,c=2")
A_PROGRAM = 24  # strategies compiled together
COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)
# Compiled for the CPU, these become library calls that gather their batch; for the TPU they do not.
GATHERED_ON_CPU = {"fft", "top_k", "tridiagonal_solve", "conv_general_dilated"}
# Iterate until every element has converged: a scalar is reduced each round.
ITERATED = {"igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta", "random_gamma"}


@dataclasses.dataclass
class Row:
    """What was run of one primitive."""

    equations: int = 0
    strategies: int = 0
    run: int = 0
    scattered: int = 0
    error: float = 0.0
    passing: set[str] = dataclasses.field(default_factory=set)
    reducing: set[str] = dataclasses.field(default_factory=set)
    failures: list[str] = dataclasses.field(default_factory=list)


def rows(eqns: Sequence[tuple[JaxprEqn, Rule]] | None = None) -> dict[str, Row]:
    """Runs all, and returns what came of it by primitive."""
    found: dict[str, Row] = {}
    for eqn, rule in ruled_equations() if eqns is None else eqns:
        every = [s for s in strategies(rule, MESH) if s.shards > 1]
        if not every:
            continue
        row = found.setdefault(eqn.primitive.name, Row())
        chosen = representatives(every)
        row.equations += 1
        row.strategies += len(every)
        row.run += len(chosen)
        row.scattered += sum(bool(s.scattered) for s in chosen)
        for reduced in (False, True):
            alike = [s for s in chosen if bool(s.reduced) is reduced]
            for part in range(0, len(alike), A_PROGRAM):
                _run(eqn, rule, alike[part : part + A_PROGRAM], row)
    return dict(sorted(found.items()))


def representatives(every: Sequence[Strategy]) -> list[Strategy]:
    """Returns one strategy of each kind: all axes have size 2, so their names may be exchanged."""
    found: dict[str, Strategy] = {}
    for strategy in every:
        names = [dict(zip(MESH.names, p, strict=True)) for p in itertools.permutations(MESH.names)]
        found.setdefault(min(_renamed(strategy, n) for n in names), strategy)
    return list(found.values())


def _renamed(strategy: Strategy, names: dict[str, str]) -> str:
    arrays = [
        Sharding(tuple(tuple(names[a] for a in axes) for axes in s.dims))
        for s in (*strategy.operands, *strategy.results, *strategy.partial)
    ]
    sets = [sorted(names[a] for a in axes) for axes in (strategy.reduced, strategy.scattered)]
    return f"{[str(s.dims) for s in arrays]} {sets}"


def _run(eqn: JaxprEqn, rule: Rule, chosen: Sequence[Strategy], row: Row) -> None:
    operands = [random_array(v.aval, np.random.default_rng(0)) for v in eqn.invars]
    wanted = jax.jit(bind(eqn), compiler_options=QUICK)(*operands)
    try:
        results, text = _together(eqn, chosen, operands)
    except jax.errors.JaxRuntimeError as e:
        row.failures.append(f"{rule} does not compile: {e}")
        return
    seen = set(COLLECTIVE.findall(text))
    (row.reducing if chosen[0].reduced else row.passing).update(seen)
    unplanned = seen - allowed_collectives(eqn.primitive.name, rule, bool(chosen[0].reduced))
    if unplanned and eqn.primitive.name not in GATHERED_ON_CPU:
        row.failures.append(f"{eqn.primitive.name}: {rule} talks by {sorted(unplanned)}")
    for strategy, found in zip(chosen, results, strict=True):
        for a, b in zip(found, wanted, strict=True):
            error = difference(a, b)
            row.error = max(row.error, error)
            if error > tolerance(b):
                row.failures.append(f"{eqn.primitive.name}: {rule} under {strategy}: {error}")


def allowed_collectives(name: str, rule: Rule, reduced: bool) -> set[str]:
    """Returns what a strategy may talk by: pass-through factors not at all."""
    if name in ITERATED:
        return {"all-reduce"}
    if not reduced:
        return set()
    if rule.reduction == "gather":
        return {"all-reduce", "all-gather"}
    # With several axes the devices of index blocks are numbered in another order and swapped back.
    swapped = {"collective-permute"} if name.startswith(("gather", "scatter")) else set()
    return {"all-reduce", "reduce-scatter"} | swapped


def bind(eqn: JaxprEqn) -> Callable[..., list[jax.Array]]:
    """Returns the equation as a function to a list of results."""

    def run(*operands):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return out if eqn.primitive.multiple_results else [out]

    return run


def _together(eqn: JaxprEqn, chosen: Sequence[Strategy], operands) -> tuple[list, str]:
    """Compiles the equation once for each strategy into one program; its results and its text."""
    mesh = mesh_of("2x2x2")
    atoms: list[Any] = [v.aval for v in eqn.invars]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in atoms]
    closed = jax.make_jaxpr(bind(eqn))(*avals)
    op = Op("0", Kind.LEAF, eqn.primitive.name, (), (), "", eqn=eqn)
    runs = [constrained(closed, _emitted(op, strategy), mesh) for strategy in chosen]

    def program(copies):
        return [run(*xs) for run, xs in zip(runs, copies, strict=True)]

    places = [list(_named(mesh, s.operands)) for s in chosen]
    ends = [list(_named(mesh, s.results)) for s in chosen]
    copies = [jax.device_put(operands, place) for place in places]
    jitted = jax.jit(program, out_shardings=ends, keep_unused=True)
    options: Any = QUICK
    compiled = jitted.lower(copies).compile(compiler_options=options)
    return compiled(copies), compiled.as_text() or ""


def _named(mesh: Mesh, shardings: Sequence[Sharding]) -> Iterator[NamedSharding]:
    return (NamedSharding(mesh, s.to_spec()) for s in shardings)


def _emitted(op: Op, strategy: Strategy) -> Constraints:
    by_hand = emit.scatter(op, strategy)
    return Constraints(
        {("0", k): (s,) for k, s in enumerate(strategy.operands) if s.dims},
        {("0", k): emit.reached(op, strategy, k) for k in range(len(strategy.results))},
        {} if by_hand is None else {"0": by_hand},
    )


def random_array(aval, rng: np.random.Generator):
    """Returns an array most functions accept: floats in (0, 1), integers in 0, 1, 2."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        seeds = rng.integers(0, 100, aval.shape, dtype=np.int32)
        return jax.vmap(jax.random.key)(seeds.reshape(-1)).reshape(aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.bool_):
        return jnp.asarray(rng.random(aval.shape) < 0.5)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 3, aval.shape)).astype(aval.dtype)
    x = rng.random(aval.shape) * 0.9 + 0.05
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        x = x + 1j * rng.random(aval.shape)
    if len(aval.shape) > 1 and aval.shape[-1] == aval.shape[-2]:
        x = x + aval.shape[-1] * np.eye(aval.shape[-1])  # well conditioned, for the linear algebra
    return jnp.asarray(x.astype(np.complex64 if np.iscomplexobj(x) else np.float32)).astype(
        aval.dtype
    )


def comparable(x) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return np.asarray(x if x.dtype.itemsize >= 4 else x.astype(jnp.float32))
    return np.asarray(x.astype(jnp.int32) if x.dtype in (jnp.int4, jnp.uint4) else x)


def tolerance(x) -> float:
    """Returns the largest relative difference allowed; none for integers."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return 0.0
    return 1e-5 if x.dtype in (jnp.float32, jnp.complex64) else 2e-2


def difference(found, wanted) -> float:
    """Returns the largest difference, relative where elements are larger than one."""
    a, b = comparable(found), comparable(wanted)
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not np.issubdtype(a.dtype, np.inexact):
        return float(np.any(a != b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    off = np.abs(np.where(same, 0, a - b)) / np.maximum(1, np.abs(np.where(same, 1, b)))
    worst = float(np.max(off, initial=0.0))
    return worst if np.isfinite(worst) else float("inf")


def error_text(error: float) -> str:
    """Returns a class of errors, which no machine's order of sums moves."""
    if error == 0:
        return "0"
    return next(f"< {bound:g}" for bound in (1e-6, 1e-5, 2e-2, float("inf")) if error < bound)


def table_text(found: dict[str, Row]) -> str:
    """Returns docs/rules_executed.md."""
    total = Row()
    for row in found.values():
        for field in ("equations", "strategies", "run", "scattered"):
            setattr(total, field, getattr(total, field) + getattr(row, field))
    lines = [
        "# Rules, executed",
        "",
        "Made by `python -m tests.rule_runs > docs/rules_executed.md`; a slow test compares.",
        "",
        "Every strategy of every rule of the [table of primitives](primitives.md) on a mesh of",
        "2 x 2 x 2 CPU devices, as a plan emits it (constraints, or `shard_map` where partial sums",
        "are scattered by hand), against the operation on one device. The three axes have the",
        "same size, so strategies that differ in the names of axes only count as one, and one of",
        "them is run. Strategies that split pass-through factors only must not talk, those that",
        "reduce by what combines partial results; where the CPU calls a library that gathers its",
        "operands (" + ", ".join(sorted(GATHERED_ON_CPU)) + ") a TPU compile is checked instead.",
        "The error is the largest of all elements, relative to those larger than one.",
        "",
        f"{len(found)} primitives, {total.equations} operations, {total.strategies} strategies, of "
        f"which {total.run} differ in more than names and were run ({total.scattered} scatter).",
        "",
        "| primitive | operations | strategies | run | of which scatter | talk, passing | "
        "talk, reducing | largest error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {r.equations} | {r.strategies} | {r.run} | {r.scattered} | "
        f"{', '.join(sorted(r.passing)) or '-'} | {', '.join(sorted(r.reducing)) or '-'} | "
        f"{error_text(r.error)} |"
        for name, r in found.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    import tests.conftest  # noqa: F401  the devices

    done = rows()
    for row in done.values():
        print("\n".join(row.failures), file=sys.stderr, end="")
    print(table_text(done), end="")
