"""When values are alive, in programs small enough to see it by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.fusion import ALIASES, is_matmul, readers_of
from autoshard.graph import Kind
from autoshard.liveness import Liveness, liveness
from autoshard.reductions import differ
from autoshard.sharding import Sharding
from autoshard.trace import trace
from models import gpt


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def live(fn, *args) -> Liveness:
    return liveness(trace(fn, args).graph)


def spans(found: Liveness, primitive: str) -> list[tuple[int, int]]:
    return [(r.start, r.end) for r in found.ranges if r.op.primitive == primitive]


def test_arguments_live_throughout_and_a_chain_leaves_nothing_behind():
    found = live(lambda x: jnp.sin(x) + 1, array(8))
    assert spans(found, "input") == [(0, found.end)]
    assert [r.op.kind for r in found.ranges] == [Kind.INPUT, Kind.OUTPUT]


def test_a_value_lives_until_the_last_kernel_that_computes_from_it():
    def fn(x, w):
        h = x @ w  # read by sin, which the second matmul computes
        return jnp.cos(jnp.sin(h) @ w) + h

    found = live(fn, array(8, 8), array(8, 8))
    (own,) = spans(found, "dot_general")  # the second one is written as the result
    shared = [r for r in found.ranges if r.op.kind is Kind.READ]  # takes h's buffer over
    assert [r.start for r in shared] == [own[1]]
    assert shared[0].end == found.end - 1  # the sum that needs h again stands before the OUTPUT


def test_an_elementwise_kernel_writes_over_what_it_reads_last():
    def fn(x, w):
        h = jnp.sin(x @ w)
        g = jnp.cos(h @ w) * h
        return jnp.sum(g @ w, 0), jnp.sum(g @ w.T, 0)

    found = live(fn, array(8, 8), array(8, 8))
    old, _ = (r for r in found.ranges if r.op.kind is Kind.READ)
    (new,) = (r for r in found.ranges if r.op.primitive == "mul")
    assert old.end == new.start


def test_a_reduction_runs_as_soon_as_it_can():
    def fn(x, w):
        y = x @ w
        z = jnp.sin(y) @ w
        return jnp.cos(z) @ w, jnp.sum(y)

    found = live(fn, array(8, 8), array(8, 8))
    (total,) = [r for r in found.ranges if r.op.primitive == "reduce_sum"]
    first, *_ = spans(found, "dot_general")
    shared = next(r for r in found.ranges if r.op.kind is Kind.READ)
    assert total.start == shared.start + 1 == first[1] + 1


def test_a_stack_lives_as_long_as_its_loop_and_beyond_to_its_readers():
    def fn(x, w):
        def step(c, _):
            c = jnp.sin(c @ w)
            return c, c

        last, all_ = lax.scan(step, x, None, length=4)
        return last, jnp.max(all_)

    found = live(fn, array(8, 8), array(8, 8))
    (stack,) = [r for r in found.ranges if r.op.kind is Kind.STACK]
    (carry,) = [r for r in found.ranges if r.op.kind is Kind.CARRY]
    loop = found.spans[stack.op]
    assert stack.start == loop[0] and stack.end >= loop[1]
    assert carry.end >= loop[1]


def test_a_scanned_weight_is_narrowed_before_the_loop():
    def fn(x, ws):
        return lax.scan(lambda c, w: (jnp.sin(c @ w.astype(jnp.bfloat16)), None), x, ws)[0]

    found = live(fn, array(8, 8, dtype="bfloat16"), array(4, 8, 8))
    (copy,) = [r for r in found.ranges if r.operand is not None]
    assert copy.value.shape == (4, 8, 8) and copy.value.dtype == "bfloat16"
    assert (copy.start, copy.end) == found.spans[copy.op]


def test_what_a_loop_adds_up_keeps_track_of_its_dims():
    """A total sharded like the sum, transposed as it is, is no reason to combine in every trip."""

    def fn(xs, gs):
        def step(total, now):
            x, g = now
            return total + jnp.einsum("bd,bhf->dhf", x, g).transpose(1, 2, 0), None

        return lax.scan(step, jnp.zeros((4, 16, 8)), (xs, gs))[0]

    graph = trace(fn, (array(6, 32, 8), array(6, 32, 4, 16))).graph
    dot = next(op for op in graph.leaves() if op.primitive == "dot_general")
    total = liveness(graph).summed[dot]
    assert tuple(dot.results[0].shape[d] for d in total.dims or ()) == (4, 16, 8)
    result = Sharding(tuple(("x",) if n == 16 else () for n in dot.results[0].shape))
    assert not differ(total, result, Sharding(((), ("x",), ())))
    assert differ(total, result, Sharding((("x",), (), ())))


@pytest.mark.parametrize("scan", [False, True])
def test_the_ends_of_a_whole_model_are_those_that_its_readers_give(scan):
    sizes = dataclasses.replace(gpt.SIZES["tiny"], scan=scan, remat=True)
    graph = trace(gpt.train_step, gpt.example_arguments(sizes)).graph
    found, ops = liveness(graph), tuple(graph.leaves())
    readers = readers_of(ops)

    @functools.cache
    def end(value):
        return max((needed(*read) for read in readers.get(value, ())), default=0)

    def needed(op, k):
        if op.kind in (Kind.INPUT, Kind.OUTPUT):
            return 0
        if op.kind in (Kind.ENTER, Kind.SLICE) or (op.kind is Kind.CARRY and k == 1):
            return found.spans[op][1]
        fused = [v for v in op.results if v not in found.fusion.written and not is_matmul(op)]
        return max([found.runs[op] + (op.kind not in ALIASES), *map(end, fused)])

    assert found.ends == {v: end(v) for op in ops for v in op.results}


@pytest.mark.parametrize("is_read_later", [False, True])
def test_an_update_is_written_over_what_it_updates(is_read_later):
    def fn(x, w, row):
        y = jnp.sort(x, 0)
        z = jax.lax.dynamic_update_slice_in_dim(y, row, 3, 0)
        return z @ w, jnp.cos(y) if is_read_later else row

    found = live(fn, array(64, 128), array(128, 8), array(1, 128)).ranges
    borders = (Kind.INPUT, Kind.OUTPUT)
    alike = [r for r in found if r.value.shape == (64, 128) and r.op.kind not in borders]
    (after,) = [r for r in alike if r.op.primitive == "dynamic_update_slice"]
    end = max(r.end for r in alike if r is not after)
    assert (end <= after.start) == (not is_read_later)
