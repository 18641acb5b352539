"""What was compiled, read back: programs with known collectives on CPU, TPU and GPU compilers."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import aot
from autoshard.errors import AutoshardError, MeshError
from autoshard.inspect import CompiledStep, from_text, inspect
from autoshard.sharding import MeshShape

CPU, V5E, V5E_16, H100 = "cpu", "v5e:2x4", "v5e:4x4", "h100:8"
ALL = (CPU, V5E, H100)
NEEDS = {"v": "libtpu", "h": "jax_cuda12_plugin"}


@functools.cache
def mesh_of(target: str, axes: str = "data=4,model=2") -> Mesh:
    shape = MeshShape.parse(axes)
    if target == CPU:
        devices = np.array(jax.devices()[: shape.device_count])
        sizes = tuple(size for _, size in shape.axes)
        return Mesh(devices.reshape(sizes), shape.names, axis_types=(AxisType.Auto,) * len(sizes))
    if importlib.util.find_spec(NEEDS[target[0]]) is None:
        pytest.skip(f"no compiler for {target}: {NEEDS[target[0]]} is not installed")
    return aot.mesh(target, shape)


def array(mesh, shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def pin(x, mesh, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def step_of(fn, *args, mesh, out=None, donate=(), **options) -> CompiledStep:
    shardings = None if out is None else jax.tree.map(lambda s: NamedSharding(mesh, s), out)
    jitted = jax.jit(fn, out_shardings=shardings, donate_argnums=donate)
    compiled = jitted.lower(*args).compile(compiler_options=options or None)
    return inspect(compiled, mesh)


def line_of(mark: str) -> int:
    """Returns the number of the line of this file that ends with the comment `mark`."""
    with open(__file__) as f:
        return next(n for n, line in enumerate(f, 1) if line.rstrip().endswith(f"# {mark}"))


def named(step: CompiledStep, kind: str):
    return [c for c in step.collectives if c.kind == kind and c.bytes > 64]


def itemsize(c) -> float:
    return {"f32": 4, "bf16": 2, "s4": 0.5}[c.dtype]


@pytest.mark.parametrize("target", ALL)
def test_data_parallel_gradients_are_one_all_reduce(target):
    mesh = mesh_of(target)

    def step(w1, w2, x):
        def loss(w1, w2):
            return jnp.mean(jnp.square(jax.nn.relu(x @ w1) @ w2))

        g1, g2 = jax.grad(loss, (0, 1))(w1, w2)
        return w1 - g1, w2 - g2

    weights = array(mesh, (512, 1024), "float32"), array(mesh, (1024, 512), "float32")
    x = array(mesh, (64, 512), "float32", ("data", "model"))
    found = step_of(step, *weights, x, mesh=mesh, out=(P(), P())).collectives
    assert {c.kind for c in found} == {"all-reduce"}
    assert sum(c.total_bytes for c in found) == 2 * 512 * 1024 * 4
    assert all(c.axes == ("data", "model") and c.group_size == 8 for c in found)
    assert all(c.trips == 1 and c.dtype == "f32" for c in found)
    assert sum(c.wire_bytes for c in found) == 2 * (2 * 512 * 1024 * 4) * 7 / 8


LAYERS, WIDTH = 6, 1024


def fsdp(mesh, axis):
    def step(ws, x):
        def loss(ws):
            def body(x, w):
                w = pin(w.astype(jnp.bfloat16), mesh)  # weight gather
                return pin(jnp.tanh(x @ w), mesh, axis), None  # layer

            y, _ = jax.lax.scan(jax.checkpoint(body), x, ws)
            return jnp.sum(y.astype(jnp.float32))

        return ws - jax.grad(loss)(ws)

    ws = array(mesh, (LAYERS, WIDTH, WIDTH), "float32", None, axis)
    return step, ws, array(mesh, (512, WIDTH), "bfloat16", axis)


@pytest.mark.parametrize("target", ALL)
def test_scanned_fsdp_gathers_and_scatters_each_layer(target):
    mesh = mesh_of(target, "data=8")
    fn, ws, x = fsdp(mesh, "data")
    step = step_of(fn, ws, x, mesh=mesh, out=P(None, "data"), donate=0)
    gathers = named(step, "all-gather")
    assert sum(c.trips for c in gathers) == 2 * LAYERS  # forward, and again in the backward pass
    assert all(c.bytes == WIDTH * WIDTH * itemsize(c) for c in gathers)
    assert all(c.axes == ("data",) and c.group_size == 8 for c in gathers)
    assert {c.source for c in gathers} == {f"test_inspect.py:{line_of('weight gather')} (body)"}
    # The CPU compiler knows no reduce-scatter; the TPU's hides it in a fusion that says all-reduce.
    scatters = named(step, "all-reduce" if target == CPU else "reduce-scatter")
    assert sum(c.trips for c in scatters) == LAYERS
    assert all(c.bytes == WIDTH * WIDTH * itemsize(c) for c in scatters)
    lines = {line_of("layer"), line_of("weight gather")}
    assert {int(re.findall(r":(\d+)", c.source)[0]) for c in scatters} <= lines
    assert len(gathers) + len(scatters) == len([c for c in step.collectives if c.bytes > 64])
    assert step.memory is not None
    assert step.memory.argument_bytes == (LAYERS * WIDTH * WIDTH * 4 + 512 * WIDTH * 2) / 8
    assert step.memory.alias_bytes == LAYERS * WIDTH * WIDTH * 4 / 8


def test_gathers_spread_over_three_fusions_count_once():
    """The TPU compiler starts, carries and ends an asynchronous gather in fusions of their own."""
    mesh, width, inner = mesh_of(V5E, "data=8"), 1024, 4096

    def f(ws, vs, x):
        def body(x, wv):
            w, v = (pin(t.astype(jnp.bfloat16), mesh) for t in wv)
            return pin(x + jnp.tanh(x @ w) @ v, mesh, "data"), None

        return jax.lax.scan(body, x, (ws, vs))[0]

    ws = array(mesh, (LAYERS, width, inner), "float32", None, "data")
    vs = array(mesh, (LAYERS, inner, width), "float32", None, "data")
    x = array(mesh, (16384, width), "bfloat16", "data")
    found = step_of(f, ws, vs, x, mesh=mesh, out=P("data"))
    assert {(c.kind, c.bytes) for c in found.collectives} == {("all-gather", width * inner * 2)}
    assert sum(c.trips for c in found.collectives) == 2 * LAYERS
    hidden = sum(c.trips for c in found.collectives if c.asynchronous)
    assert hidden >= LAYERS  # one of the two matmuls hides the gather of the other's weight

    exposed_s = found.exposed_comm_s(lambda c: 1e-6 if c.asynchronous else 1e-5)
    assert exposed_s is not None  # the hidden ones take less than the compute beside them
    assert (2 * LAYERS - hidden) * 1e-5 <= exposed_s <= (2 * LAYERS - hidden) * 1e-5 + 1e-6


@pytest.mark.parametrize("target", ALL)
def test_tensor_parallel_pair_reduces_the_activation(target):
    mesh = mesh_of(target)

    def f(x, w1, w2):
        h = pin(jax.nn.relu(x @ w1), mesh, "data", "model")
        return h @ w2  # second matmul

    x = array(mesh, (1024, 512), "bfloat16", "data")
    w1 = array(mesh, (512, 2048), "bfloat16", None, "model")
    w2 = array(mesh, (2048, 512), "bfloat16", "model")
    (c,) = step_of(f, x, w1, w2, mesh=mesh, out=P("data")).collectives
    assert (c.kind, c.axes, c.group_size, c.trips) == ("all-reduce", ("model",), 2, 1)
    assert c.bytes == 256 * 512 * itemsize(c)
    assert c.source == f"test_inspect.py:{line_of('second matmul')} (f)"
    assert "dot_general" in c.op_name


@pytest.mark.parametrize("target", ALL)
def test_embedding_sharded_by_row_reduces_what_it_finds(target):
    mesh = mesh_of(target)
    table = array(mesh, (32000, 256), "float32", "model")
    tokens = array(mesh, (64, 128), "int32", "data")
    found = step_of(lambda t, i: t[i], table, tokens, mesh=mesh, out=P("data")).collectives
    assert [(c.kind, c.axes, c.bytes) for c in found] == [
        ("all-reduce", ("model",), 64 // 4 * 128 * 256 * 4)
    ]


@pytest.mark.parametrize("target", ALL)
def test_moving_a_dim_is_an_all_to_all_of_what_is_held(target):
    mesh = mesh_of(target)
    x = array(mesh, (16, 64, 512), "float32", "data", "model")
    step = step_of(lambda x: pin(jnp.cos(x), mesh, "data", None, "model"), x, mesh=mesh)
    (c,) = step.collectives
    assert (c.kind, c.axes, c.bytes) == ("all-to-all", ("model",), 4 * 32 * 512 * 4)
    assert c.wire_bytes == c.bytes / 2


@pytest.mark.parametrize("target", (CPU, V5E_16, H100))
def test_spatial_convolution_permutes_its_borders(target):
    mesh = mesh_of(target, "data=4,model=4" if target == V5E_16 else "data=2,model=4")
    n = mesh.shape["data"]

    def conv(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)

    x = array(mesh, (2 * n, 64, 64, 32), "float32", "data", "model")
    k = array(mesh, (5, 5, 32, 32), "float32")
    found = step_of(conv, x, k, mesh=mesh, out=P("data", "model")).collectives
    assert {(c.kind, c.axes, c.group_size) for c in found} == {
        ("collective-permute", ("model",), 4)
    }
    # A window of 5 reads 2 rows on each side. The TPU sends them as bf16.
    assert [c.bytes for c in found] == [2 * 2 * 64 * 32 * itemsize(found[0])] * 2


@pytest.mark.parametrize("target", ALL)
def test_trips_of_nested_loops_multiply(target):
    mesh = mesh_of(target)

    def f(x, ws):
        def outer(x, w):
            def inner(x, _):
                return pin(jnp.tanh(x @ w), mesh, "data"), None

            return jax.lax.scan(inner, x, None, length=5)[0], None

        return jax.lax.scan(outer, x, ws)[0]

    x = array(mesh, (256, 256), "float32", "data")
    ws = array(mesh, (3, 256, 256), "float32", None, "model")
    step = step_of(f, x, ws, mesh=mesh, out=P("data"))
    reduced = named(step, "all-reduce") + named(step, "reduce-scatter")
    assert {c.trips for c in reduced} == {15}
    assert step.notes == ()


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize(
    ("first", "condition", "stride", "trips"),
    [
        (0, lambda i: i < 10, 2, 5),
        (1, lambda i: i <= 10, 3, 4),
        (20, lambda i: i > 5, -4, 4),
        (7, lambda i: i != 0, -1, 7),
        (0, lambda i: 9 >= i, 4, 3),
    ],
)
def test_trips_of_counted_loops(target, first, condition, stride, trips):
    mesh = mesh_of(target)

    def f(x, w):
        def body(c):
            return c[0] + stride, pin(jnp.tanh(c[1] @ w), mesh, "data")

        return jax.lax.while_loop(lambda c: condition(c[0]), body, (first, x))[1]

    x = array(mesh, (256, 256), "float32", "data")
    step = step_of(f, x, array(mesh, (256, 256), "float32", "model"), mesh=mesh, out=P("data"))
    reduced = named(step, "all-reduce") + named(step, "reduce-scatter")
    assert {c.trips for c in reduced} == {trips} and step.notes == ()


@pytest.mark.parametrize("target", ALL)
def test_a_loop_nobody_can_count_is_counted_once_and_said(target):
    mesh = mesh_of(target)

    def f(x, w):
        def body(c):
            return pin(jnp.tanh(c @ w), mesh, "data")

        return jax.lax.while_loop(lambda c: jnp.sum(c) < 0, body, x)

    x = array(mesh, (256, 256), "float32", "data")
    step = step_of(f, x, array(mesh, (256, 256), "float32", "model"), mesh=mesh, out=P("data"))
    assert {c.trips for c in step.collectives} == {1}
    assert {c.bytes for c in step.collectives if c.bytes < 64} == {4}  # the condition's sum
    assert len(step.notes) == 1 and "no constant trip count" in step.notes[0]
    assert "test_inspect.py" in step.notes[0] and step.notes[0] in str(step)


@pytest.mark.parametrize("target", ALL)
def test_branches_are_all_counted_and_that_is_said(target):
    mesh = mesh_of(target)

    def f(p, x, w):
        y = jax.lax.cond(p, lambda x: x @ w, lambda x: jnp.sin(x) @ (w * w), x)
        return pin(y, mesh, "data")

    p = array(mesh, (), "bool")
    x = array(mesh, (256, 256), "float32", "data", "model")
    w = array(mesh, (256, 256), "float32", "model")
    step = step_of(f, p, x, w, mesh=mesh, out=P("data"))
    reduced = named(step, "all-reduce") + named(step, "reduce-scatter")
    assert sum(c.trips for c in reduced) == 2
    assert len(step.notes) == 1 and "all 2 branches are counted" in step.notes[0]


@pytest.mark.parametrize("target", (V5E_16,))
def test_windowed_matmul_is_a_loop_of_permutes(target):
    mesh = mesh_of(target, "data=16")
    x = array(mesh, (16 * 512, 2048), "bfloat16", "data")
    w = array(mesh, (2048, 4096), "bfloat16", "data")
    option = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"}
    step = step_of(lambda x, w: x @ w, x, w, mesh=mesh, out=P("data"), **option)
    assert {(c.kind, c.axes) for c in step.collectives} == {("collective-permute", ("data",))}
    assert {c.bytes for c in step.collectives} == {2048 * 4096 * 2 / 16}
    # 15 steps of a ring see every block; rounds of two or four may send one block too many.
    assert 15 <= sum(c.trips for c in step.collectives) <= 17


@pytest.mark.parametrize("axes", ["slice=2,data=4,model=2", "data=8,model=2"])
def test_collectives_across_slices_are_seen(axes):
    mesh = mesh_of("v5e:2x4*2", axes)
    batch = tuple(a for a in mesh.axis_names if a != "model")

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    w = array(mesh, (1024, 1024), "float32", None, "model")
    x = array(mesh, (1024, 1024), "float32", batch)
    found = step_of(step, w, x, mesh=mesh, out=P(None, "model")).collectives
    local = 1024 * 1024 * 4 / 2
    across = [c for c in found if c.axes == batch[:1] and c.group_size == 2]
    inside = [c for c in found if c not in across]
    assert across and inside and all("model" not in c.axes for c in found)
    # Four devices of a slice share the sum, then each exchanges at most all of it.
    assert local / 4 <= sum(c.total_bytes for c in across) <= local
    assert all(c.group_size == 4 for c in inside)


def test_devices_in_another_order_keep_their_axes():
    devices = np.array(jax.devices()[:8])
    auto = (AxisType.Auto, AxisType.Auto)
    mesh = Mesh(devices.reshape(4, 2), ("data", "model"), axis_types=auto)
    turned = Mesh(devices.reshape(4, 2).T, ("model", "data"), axis_types=auto)
    x = array(turned, (64, 64), "float32", None, "data")
    w = array(turned, (64, 64), "float32", "data")
    compiled = jax.jit(lambda x, w: x @ w).lower(x, w).compile()
    for given in (mesh, turned):
        (c,) = [c for c in inspect(compiled, given).collectives]
        assert (c.axes, c.group_size) == (("data",), 4)


def test_a_mesh_of_other_devices_is_refused():
    mesh = mesh_of(CPU)
    compiled = jax.jit(lambda x: x + 1).lower(array(mesh, (8, 8), "float32", "data")).compile()
    with pytest.raises(MeshError, match="pass the mesh that it was compiled for"):
        inspect(compiled, mesh_of(CPU, "data=4"))
    with pytest.raises(MeshError, match="compiled for 8 devices, the mesh data=3 has 3"):
        from_text(compiled.as_text() or "", MeshShape.parse("data=3"))
    with pytest.raises(AutoshardError, match="no ENTRY computation"):
        from_text("not a module", MeshShape.parse("data=8"))


@pytest.mark.parametrize(
    ("target", "peak_flop_per_s"), [("v5e:2x4", 197e12), ("v5p:2x2x2", 459e12), ("v6e:2x4", 918e12)]
)
def test_compute_is_near_the_peak_for_a_large_matmul(target, peak_flop_per_s):
    mesh, n = mesh_of(target, "data=8"), 4096
    x, w = array(mesh, (8 * n, n), "bfloat16", "data"), array(mesh, (n, n), "bfloat16")
    step = step_of(lambda x, w: x @ w, x, w, mesh=mesh)
    assert step.collectives == () and step.compute_s is not None
    # The compiler's own estimate is a little below the peak; v6e's is the furthest.
    assert 1 <= step.compute_s / (2 * n**3 / peak_flop_per_s) <= 1.7


def test_compute_in_a_loop_is_weighted_by_its_trips():
    mesh, n = mesh_of(V5E, "data=8"), 2048
    x, w = array(mesh, (8 * n, n), "bfloat16", "data"), array(mesh, (n, n), "bfloat16")

    def compute_s(trips):
        def f(x, w):
            return jax.lax.fori_loop(0, trips, lambda _, x: x @ w, x)

        return step_of(f, x, w, mesh=mesh, out=P("data")).compute_s or 0.0

    six, twelve, thirty = map(compute_s, (6, 12, 30))
    assert (thirty - twelve) / (twelve - six) == pytest.approx(3, rel=1e-6)
    assert 1 <= (twelve - six) / 6 / (2 * n**3 / 197e12) <= 2


@pytest.mark.parametrize("target", (CPU, H100))
def test_no_time_where_the_compiler_gives_none(target):
    mesh = mesh_of(target)
    step = step_of(lambda x: x @ x.T, array(mesh, (64, 64), "float32", "data"), mesh=mesh)
    assert step.compute_s is None and step.step_s(lambda _: 1.0) is None


def test_text_of_a_step():
    mesh = mesh_of(CPU)
    x = array(mesh, (64, 64), "float32", None, "model")
    w = array(mesh, (64, 32), "float32", "model")
    step = step_of(lambda x, w: x @ w, x, w, mesh=mesh, out=P())  # one matmul
    line = line_of("one matmul")
    assert str(step).splitlines()[1:] == [
        f"all-reduce over model: 1 x 8.0 KiB f32[64,32] at test_inspect.py:{line} (<lambda>)"
    ]
    assert str(step).startswith("peak ") and "arguments 12.0 KiB" in str(step)


@pytest.mark.parametrize("target", (CPU, V5E))
def test_a_whole_that_is_only_sliced_is_said(target):
    mesh = mesh_of(target, "data=8")

    def f(x):
        whole = jax.lax.all_gather(x, "data", tiled=True)
        other = (3 * jax.lax.axis_index("data")) % 8
        return jax.lax.dynamic_slice_in_dim(whole, other * 16, 16)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    (c,) = step_of(mapped, array(mesh, (128, 256), "float32", "data"), mesh=mesh).collectives
    assert (c.kind, c.resliced) == ("all-gather", True) and str(c).endswith("only to be sliced")
    read_whole = jax.shard_map(
        lambda x: jnp.sin(jax.lax.all_gather(x, "data", tiled=True)),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    (c,) = step_of(read_whole, array(mesh, (128, 256), "float32", "data"), mesh=mesh).collectives
    assert (c.kind, c.resliced) == ("all-gather", False)


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize(
    ("pairs", "shift", "group_size"),
    [
        ([(i, (i + 1) % 4) for i in range(4)], True, 4),
        ([(i, i - 1) for i in range(1, 4)], True, 4),
        ([(i, (i + 2) % 4) for i in range(4)], False, 2),
        ([(0, 3), (3, 1)], False, 3),
    ],
)
def test_permutes_between_neighbours_are_told_apart(target, pairs, shift, group_size):
    mesh = mesh_of(target)

    def f(x):
        return jax.lax.ppermute(x, "data", pairs)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
    (c,) = step_of(
        mapped, array(mesh, (64, 256), "float32", "data", "model"), mesh=mesh
    ).collectives
    assert (c.kind, c.axes, c.shift, c.group_size) == (
        ("collective-permute", ("data",), shift, group_size)
    )
    assert c.bytes == 16 * 128 * 4


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model"), ("model", "data")])
def test_explicit_collectives_come_back(target, axes):
    """Every kind over every set of axes, written by hand, is read as written."""
    mesh = mesh_of(target)
    n = int(np.prod([mesh.shape[a] for a in axes]))

    def f(x):
        y = jax.lax.all_gather(jnp.sin(x), axes, tiled=True)
        y = jnp.cos(jax.lax.psum_scatter(jnp.tanh(y), axes, tiled=True))
        y = jnp.sin(jax.lax.all_to_all(y, axes, 0, 1, tiled=True))
        return jax.lax.psum(y, axes)

    spec = P(("data", "model"))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = step_of(mapped, array(mesh, (8 * 64, 256), "float32", *spec), mesh=mesh).collectives
    local = 64 * 256 * 4
    expected = {
        "all-gather": n * local,
        "reduce-scatter": n * local,
        "all-to-all": local,
        "all-reduce": local,
    }
    assert {c.kind: c.bytes for c in found} == expected and len(found) == 4
    assert all(c.axes == tuple(sorted(axes)) and c.group_size == n for c in found)


def test_collectives_are_priced_by_the_topology():
    from autoshard import collectives, hardware, topology
    from autoshard.inspect import price_on

    mesh = mesh_of(V5E)
    shape = MeshShape.parse("data=4,model=2")
    v5e = topology.topology(shape, hardware.preset("v5e"), mesh.devices)
    price = price_on(v5e)
    x = array(mesh, (1024, 2048), "bfloat16", "data", "model")
    w = array(mesh, (2048, 1024), "bfloat16", "model")
    step = step_of(lambda x, w: x @ w, x, w, mesh=mesh, out=P("data"))
    (c,) = step.collectives
    alone = collectives.all_reduce_s(v5e, ("model",), 256 * 1024 * 2)
    assert price(c) == alone and step.exposed_comm_s(price) == pytest.approx(alone)
    times = step.times(price)
    assert times is not None and step.step_s(price) == times.step_s
    assert times.step_s == pytest.approx(step.compute_s + alone + times.exposed_copy_s)
