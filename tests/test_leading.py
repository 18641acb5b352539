"""A matmul with one dim of its result first is the same matmul."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.leading import leading

CASES = (
    "ab,bc->ac",
    "abc,cd->abd",
    "abc,cde->abde",
    "abcd,abed->abce",
    "bka,kbc->bkac",
    "ab,cab->c",
)
SIZES = dict(zip("abcdek", (2, 3, 4, 5, 6, 7), strict=True))


@pytest.mark.parametrize("text", CASES)
def test_the_dim_comes_first_and_nothing_else_changes(text):
    (lhs, rhs), _ = text.split("->")[0].split(","), None
    keys = jax.random.split(jax.random.key(0), 2)
    xs = [
        jax.random.normal(key, [SIZES[c] for c in dims])
        for key, dims in zip(keys, (lhs, rhs), strict=True)
    ]
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.einsum(text, x, y))(*xs)
    (eqn, *_) = [e for e in jaxpr.eqns[-1].params.get("jaxpr", jaxpr).eqns if "dot" in str(e)]
    args = xs if eqn.invars[0].aval.shape == xs[0].shape else xs[::-1]
    bind = lambda params, args: eqn.primitive.bind(*args, **params)  # noqa: E731
    whole = bind(eqn.params, args)
    (_, (batch, _)) = eqn.params["dimension_numbers"]
    for d in range(whole.ndim):
        found = leading(eqn.params, args, d)
        if found is None:
            assert batch and d >= len(batch)
            continue
        params, moved, order = found
        assert order[0] == d
        np.testing.assert_allclose(
            bind(params, moved), jnp.transpose(whole, order), rtol=1e-5, atol=1e-5
        )


def test_precisions_follow_their_operands():
    pair = (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)
    params = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": pair}
    x, y = jnp.ones((2, 3)), jnp.ones((3, 4))
    for d, kept in itertools.zip_longest((0, 1), (pair, pair[::-1])):
        found = leading(params, (x, y), d)
        assert found is not None and found[0]["precision"] == kept
