"""What is left to the partitioner between reshapes, and that it does there what the plan says."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import autoshard


def normalized(x, w):
    """GroupNorm of [B, X, C] with 4 groups, then a product."""
    grouped = x.reshape(*x.shape[:2], 4, -1)
    centred = grouped - grouped.mean((1, 3), keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean((1, 3), keepdims=True) + 1e-6)
    return jnp.sum((scaled.reshape(x.shape) @ w) ** 2)


def heads(x, w):
    """[B, X, C] -> [B, X, 4, C/4], multiplied as it is."""
    return jnp.einsum("bxkh,khd->bxd", x.reshape(*x.shape[:2], 4, -1), w)


def ranks(plan):
    return {len(chain[-1].dims) for chain in plan.constraints.results.values()}


def test_group_norm_has_no_constraints_between_its_reshapes():
    x, w = jax.random.normal(jax.random.key(0), (64, 128, 256)), jnp.eye(256)
    step = jax.value_and_grad(normalized, argnums=(0, 1))
    plan = autoshard.plan(
        step, x, w, mesh="data=8", hardware="v5e", in_shardings=(P("data"), P()),
    )  # fmt: skip
    assert 4 not in ranks(plan) and 3 in ranks(plan)
    mesh = jax.make_mesh((8,), ("data",))
    jitted = plan.jit(step, mesh)
    (found, gradients), (wanted, grads) = jitted(x, w), step(x, w)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for a, b in zip(gradients, grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    text = jitted.lower(x, w).compile().as_text()
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    assert sum(text.count(f" {kind}(") for kind in kinds) == len(plan.collectives)


def test_what_a_matmul_reads_is_constrained():
    x, w = jnp.ones((16, 8, 32)), jnp.ones((4, 8, 32))
    plan = autoshard.plan(
        heads, x, w, mesh="data=8", hardware="v5e", in_shardings=(P("data"), P()),
    )  # fmt: skip
    assert 4 in ranks(plan)
