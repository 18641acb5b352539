import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import graph
from autoshard.errors import ArgumentError
from autoshard.graph import Kind
from autoshard.trace import trace

S = jax.ShapeDtypeStruct


def layer(x, w):
    return jax.nn.relu(x @ w), None


def loss(params, batch):
    y, _ = jax.lax.scan(jax.checkpoint(layer), batch, params["w"])
    return jnp.sum(y)


def step(state, batch, rate=0.1):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    return {"params": jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)}, value


STATE = {"params": {"w": S((3, 8, 8), "float32")}}
BATCH = S((4, 8), "float32")


def test_arguments_have_paths_and_the_state_is_carried():
    program = trace(step, (STATE, BATCH), {"rate": 0.5}, donate_argnums=(0,))
    graph.check(program.graph)
    assert [v.name for v in program.inputs] == ["state['params']['w']", "batch", "rate"]
    assert program.carried == (0, None, None)
    assert program.donated == (True, False, False)
    assert program.output_names == ("result[0]['params']['w']", "result[1]")


def test_an_undonated_single_array_is_not_carried():
    program = trace(lambda x: x + 1, (BATCH,))
    assert program.carried == (None,)
    assert trace(lambda x: x + 1, (BATCH,), donate_argnums=(0,)).carried == (0,)


def test_loops_and_checkpoints_keep_their_bodies():
    program = trace(step, (STATE, BATCH))
    kinds = {op.primitive: op.kind for op in program.graph.walk()}
    assert kinds["scan"] is Kind.LOOP and kinds["remat2"] is Kind.CALL
    dots = [op for op in program.graph.leaves() if op.primitive == "dot_general"]
    assert len(dots) == 4 and all(op.trips == 3 for op in dots)
    assert all("test_trace.py" in op.source and "(layer)" in op.source for op in dots)


def test_borders_of_a_scan():
    program = trace(
        lambda xs, c: jax.lax.scan(lambda c, x: (c + x, c * 2.0), c, xs),
        (S((5, 4), "float32"), S((4,), "float32")),
    )
    text = str(program.graph)
    assert "carry(c, " in text and "slice(xs)" in text and "stack(" in text and "exit(" in text
    graph.check(program.graph)


def test_branches_join_and_whiles_carry():
    def fn(x):
        y = jax.lax.cond(x[0] > 0, lambda a: a + 1, lambda a: a - 1, x)
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * y), (0, y))

    program = trace(fn, (S((4,), "float32"),))
    graph.check(program.graph)
    assert sum(op.kind is Kind.JOIN for op in program.graph.leaves()) == 1
    assert sum(op.kind is Kind.CARRY for op in program.graph.leaves()) == 2


def test_dead_code_is_not_planned():
    program = trace(lambda x: (x @ x.T, x + 1)[1], (BATCH,))
    assert not any(op.primitive == "dot_general" for op in program.graph.leaves())


def test_readers_share_one_read():
    program = trace(lambda x: (jnp.sin(x) + jnp.cos(x), x * 2.0), (BATCH,))
    reads = [op for op in program.graph.leaves() if op.kind is Kind.READ]
    assert [op.path for op in reads] == ["in0.read0"]


def test_an_argument_that_is_no_array_is_named():
    with pytest.raises(ArgumentError, match=r"state\['a'\] is 'text' of type str"):
        trace(lambda state: state, ({"a": "text"},))


def test_numpy_and_scalars_are_arrays():
    program = trace(lambda a, b, c: (a, b, c), (np.zeros((2, 3), np.float32), 1.5, 2))
    assert [v.shape for v in program.inputs] == [(2, 3), (), ()]


def test_fingerprint_ignores_donation_and_sees_the_program():
    a = trace(step, (STATE, BATCH)).fingerprint
    assert a == trace(step, (STATE, BATCH), donate_argnums=(0,)).fingerprint
    assert a != trace(step, (STATE, S((8, 8), "float32"))).fingerprint
    assert a != trace(lambda s, b: (s, loss(s["params"], b)), (STATE, BATCH)).fingerprint
