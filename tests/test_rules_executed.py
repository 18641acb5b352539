"""Every rule, executed: each strategy on 8 devices gives what one device gives.

It talks as the rule says: pass-through factors not at all, reductions to combine partial results.
"""

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from autoshard.factors import Rule
from autoshard.sharding import MeshShape
from autoshard.strategies import Strategy, strategies
from tests.rule_programs import ruled_equations

MESH = MeshShape.parse("a=2,b=2,c=2")
COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)
# Compiled for the CPU, these become library calls that gather their batch; for the TPU they do not.
GATHERED_ON_CPU = {"fft", "top_k", "tridiagonal_solve", "conv_general_dilated"}
# Iterate until every element has converged: a scalar is reduced each round.
ITERATED = {"igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta", "random_gamma"}


def compiled(eqn, strategy: Strategy, mesh: Mesh):
    """Returns the equation compiled with the strategy's shardings of operands and results."""

    def run(*operands):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return out if eqn.primitive.multiple_results else [out]

    def shardings(of):
        return tuple(NamedSharding(mesh, s.to_spec()) for s in of)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    inner = jax.jit(
        run,
        in_shardings=shardings(strategy.operands),
        out_shardings=list(shardings(strategy.results)),
        keep_unused=True,
    )
    return inner.lower(*avals).compile()


def allowed_collectives(name: str, rule: Rule, strategy: Strategy) -> set[str]:
    if name in ITERATED:
        return {"all-reduce"}
    if not strategy.reduced:
        return set()
    if rule.reduction == "gather":
        return {"all-reduce", "all-gather"}
    # With several axes the devices of index blocks are numbered in another order and swapped back.
    return (
        {"all-reduce", "collective-permute"}
        if name.startswith(("gather", "scatter"))
        else {"all-reduce"}
    )


def unplanned_collectives(eqn, rule: Rule, strategy: Strategy, text: str | None) -> list[str]:
    found = COLLECTIVE.findall(text or "")
    return [c for c in found if c not in allowed_collectives(eqn.primitive.name, rule, strategy)]


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


def assert_same(got, want) -> None:
    tolerance = 1e-5 if want.dtype in (jnp.float32, jnp.complex64) else 2e-2
    a, b = comparable(got), comparable(want)
    if np.issubdtype(a.dtype, np.inexact):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(a, b)


def is_pointwise(rule: Rule) -> bool:
    return all(dims in ((), rule.results[0]) for dims in rule.operands)


def sampled(rule: Rule, count: int) -> list[Strategy]:
    """Returns some strategies, fewer for pointwise rules, which are many and alike.

    How partial results are scattered is not the rule's matter.
    """
    found = [s for s in strategies(rule, MESH) if s.shards > 1 and not s.scattered]
    count = 1 if is_pointwise(rule) else count
    return found if len(found) <= count else random.Random(str(rule)).sample(found, count)


def failures(eqns, count: int) -> list[str]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), MESH.names)
    rng = np.random.default_rng(0)
    found = []
    for eqn, rule in eqns:
        chosen = sampled(rule, count)
        if not chosen:
            continue
        operands = [random_array(v.aval, rng) for v in eqn.invars]
        params = eqn.primitive.get_bind_params(eqn.params)
        want = jax.jit(lambda *a, e=eqn, p=params: e.primitive.bind(*a, **p))(*operands)
        for strategy in chosen:
            label = f"{eqn.primitive.name}: {rule} under {strategy}"
            try:
                program = compiled(eqn, strategy, mesh)
            except jax.errors.JaxRuntimeError as e:
                found.append(f"{label}: does not compile: {e}")
                continue
            unplanned = unplanned_collectives(eqn, rule, strategy, program.as_text())
            if unplanned and eqn.primitive.name not in GATHERED_ON_CPU:
                found.append(f"{label}: {unplanned}")
            try:
                placed = jax.device_put(operands, list(program.input_shardings[0]))
                for a, b in zip(program(*placed), jax.tree.leaves(want), strict=True):
                    assert_same(a, b)
            except AssertionError as e:
                found.append(f"{label}: {e}")
    return found


@pytest.fixture(scope="module")
def eqns():
    return ruled_equations()


def test_programs_cover_many_rules(eqns):
    assert len({eqn.primitive.name for eqn, rule in eqns if not rule.is_replicated}) > 100


def test_every_rule_fits_its_shapes(eqns):
    for eqn, rule in eqns:
        shapes = [[v.aval.shape for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
        assert rule.check(*shapes) is None, eqn.primitive.name


def test_sampled_strategies_equal_one_device(eqns):
    distinct = {
        (eqn.primitive.name, rule): (eqn, rule) for eqn, rule in eqns if not is_pointwise(rule)
    }
    assert failures(list(distinct.values()), count=1) == []


@pytest.mark.nightly
def test_strategies_equal_one_device(eqns):
    assert failures(eqns, count=40) == []


def test_tpu_compiles_to_no_other_collectives(eqns):
    """What the CPU's library calls hide is checked on programs compiled ahead of time for a TPU."""
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), MESH.names)
    names = GATHERED_ON_CPU | {
        "dynamic_update_slice",
        "cumsum",
        "gather",
        "scatter-add",
        "slice",
        "argmax",
        "sort",
    }
    found = []
    for eqn, rule in eqns:
        for strategy in sampled(rule, 1) if eqn.primitive.name in names else ():
            text = compiled(eqn, strategy, mesh).as_text()
            if unplanned_collectives(eqn, rule, strategy, text):
                found.append(f"{eqn.primitive.name}: {rule} under {strategy}")
    assert found == []
