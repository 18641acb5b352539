"""`autoshard.jit` and `autoshard.plan` as a user meets them."""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.jitted import JittedFunction

S = jax.ShapeDtypeStruct


@contextlib.contextmanager
def _compiles():
    """Collects the names of the functions that jax compiles while the block runs."""
    names: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            if text.startswith("Finished XLA compilation of jit("):
                names.append(text.split("jit(")[1].split(")")[0])

    handler = Handler()
    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield names
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def mesh_4x2(**kwargs) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), **kwargs)


def step(state, batch):
    def loss(w):
        return jnp.mean((jax.nn.relu(batch @ w["in"]) @ w["out"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    state = {
        "in": jax.random.normal(keys[0], (64, 128)),
        "out": jax.random.normal(keys[1], (128, 64)),
    }
    return state, jax.random.normal(keys[2], (32, 64))


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_decorator_with_and_without_arguments():
    wanted = step(*arguments())
    assert_close(autoshard.jit(step, mesh=mesh_4x2())(*arguments()), wanted)
    assert_close(autoshard.jit(mesh=mesh_4x2())(step)(*arguments()), wanted)

    @autoshard.jit
    def bare(state, batch):
        return step(state, batch)

    assert_close(bare(*arguments()), wanted)
    assert bare.__name__ == "bare"


@pytest.mark.parametrize("kind", ["explicit", "auto", "dict", "text", "one device", "odd names"])
def test_any_mesh(kind):
    mesh = {
        "explicit": lambda: jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2),
        "auto": lambda: jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2),
        "dict": lambda: {"a": 4, "b": 2},
        "text": lambda: "a=4,b=2",
        "one device": lambda: Mesh(np.array(jax.devices()[:1]), ("x",)),
        "odd names": lambda: Mesh(
            np.array(jax.devices()).reshape(2, 2, 2), ("i", "dp_replica", "Z")
        ),
    }[kind]()
    hardware = "cpu" if kind in ("dict", "text") else None
    run = autoshard.jit(step, mesh=mesh, hardware=hardware)
    assert_close(run(*arguments()), step(*arguments()))


def test_an_abstract_mesh_is_planned_and_runs_on_devices_later():
    mesh = AbstractMesh((4, 2), ("data", "model"))
    plan = autoshard.plan(step, *arguments(), mesh=mesh, hardware="cpu")
    assert_close(plan.jit(step, mesh_4x2())(*arguments()), step(*arguments()))


def test_a_mesh_context_of_explicit_axes_does_not_disturb():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    wanted = step(*arguments())
    with jax.set_mesh(mesh):
        assert_close(autoshard.jit(step, mesh=mesh)(*arguments()), wanted)


def test_new_shapes_are_planned_again_and_old_ones_cached():
    run = autoshard.jit(step, mesh=mesh_4x2())
    state, batch = arguments()
    first = run.plan(state, batch)
    assert run.plan(state, batch) is first
    assert run.plan(state, batch[:8]) is not first
    for n in (32, 8, 32, 16):
        assert_close(run(state, batch[:n]), step(state, batch[:n]))


def test_keyword_static_and_donated_arguments():
    def fn(x, power, *, scale=1.0, name="a"):
        return x**power * scale if name == "a" else -x

    run = autoshard.jit(fn, mesh=mesh_4x2(), static_argnums=1, static_argnames="name")
    x = jnp.arange(16.0).reshape(4, 4)
    assert_close(run(x, 2), x**2)
    assert_close(run(x, 3, scale=2.0), x**3 * 2.0)
    assert_close(run(x, power=3), x**3)
    assert_close(run(x, 3, name="b"), -x)

    run = autoshard.jit(lambda x: x + 1.0, mesh=mesh_4x2(), donate_argnums=0)
    x = jax.device_put(x, NamedSharding(mesh_4x2(), run.plan(x).in_shardings[0]))
    run(x)
    assert x.is_deleted()


def test_methods():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @functools.partial(autoshard.jit, mesh=mesh_4x2(), static_argnums=0)
        def apply(self, x):
            return x * self.scale

    x = jnp.arange(8.0)
    assert_close(Model(2.0).apply(x), x * 2)
    assert_close(Model(3.0).apply(x), x * 3)
    assert isinstance(Model.apply, JittedFunction)


@pytest.mark.parametrize("where", ["numpy", "one device", "other sharding", "uncommitted"])
def test_arguments_that_live_elsewhere_are_moved(where):
    mesh = mesh_4x2()
    run = autoshard.jit(step, mesh=mesh, memory_limit_bytes=60_000)
    state, batch = arguments()
    place = {
        "numpy": np.asarray,
        "one device": lambda x: jax.device_put(x, jax.devices()[3]),
        "other sharding": lambda x: jax.device_put(
            x, NamedSharding(mesh, P(None, ("model", "data")))
        ),
        "uncommitted": lambda x: x,
    }[where]
    wanted = step(state, batch)
    assert_close(run(jax.tree.map(place, state), place(batch)), wanted)
    assert_close(run(*jax.tree.map(place, (state, batch))), wanted)


def test_results_feed_the_next_call_without_moving():
    run = autoshard.jit(step, mesh=mesh_4x2(), memory_limit_bytes=60_000)
    state, batch = arguments()
    plan = run.plan(state, batch)
    assert plan.in_shardings[0] == plan.out_shardings[0]
    state, _ = run(state, batch)
    assert jax.tree.map(lambda x: x.sharding.spec, state) == plan.in_shardings[0]


def test_pins_are_kept():
    pins = ({"in": P(None, "model")}, None)
    plan = autoshard.plan(
        step, *arguments(), mesh=mesh_4x2(), in_shardings=pins, out_shardings=(None, P())
    )
    assert plan.in_shardings[0]["in"] == P(None, "model") == plan.out_shardings[0]["in"]
    by_name = autoshard.plan(
        step, *arguments(), mesh=mesh_4x2(), in_shardings={"state": {"in": P(None, "model")}}
    )
    assert by_name.in_shardings == plan.in_shardings
    parted = autoshard.plan(
        step,
        *arguments(),
        mesh=mesh_4x2(),
        in_shardings=({"in": P("data")}, None),
        out_shardings=({"in": P("model")}, None),
    )
    assert parted.in_shardings[0]["in"] == P("data") and parted.out_shardings[0]["in"] == P("model")
    assert_close(parted.jit(step)(*arguments()), step(*arguments()))


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (({"up": P("model")}, None), r"\['up'\].*names no array.*state\['in'\]"),
        (({"in": P("rows")}, None), r"state\['in'\].*unknown mesh axis 'rows'"),
        ((None, None, P("data")), "names no array"),
        (({"in": P("data", "model", None)}, None), "has 3 entries, the array has 2 dims"),
        (({"in": "data"}, None), "wanted a PartitionSpec"),
    ],
)
def test_bad_pins(pins, message):
    with pytest.raises(autoshard.PinError, match=message):
        autoshard.plan(step, *arguments(), mesh=mesh_4x2(), in_shardings=pins)


def test_an_uneven_pin():
    with pytest.raises(autoshard.PinError, match="dim 0 of size 6 is not divisible by data=4"):
        autoshard.plan(lambda x: x, S((6, 4), "float32"), mesh=mesh_4x2(), in_shardings=P("data"))


def test_bad_meshes():
    with pytest.raises(
        autoshard.MeshError, match="16 devices, this process has 8|wants 16 devices"
    ):
        autoshard.jit(step, mesh={"data": 16}, hardware="cpu")(*arguments())
    with pytest.raises(autoshard.MeshError, match="got a mesh of type float"):
        autoshard.plan(step, *arguments(), mesh=8.0)  # type: ignore[arg-type]
    with pytest.raises(autoshard.HardwareError, match="pass hardware="):
        autoshard.plan(step, *arguments(), mesh={"data": 8})
    with pytest.raises(autoshard.HardwareError, match="v5e"):
        autoshard.plan(step, *arguments(), mesh={"data": 8}, hardware="v99")


def test_a_limit_below_what_fits_names_the_smallest_that_would():
    with pytest.raises(autoshard.InfeasibleError) as e:
        autoshard.plan(step, *arguments(), mesh=mesh_4x2(), memory_limit_bytes=100.0)
    text = str(e.value)
    least = float(text.split("(")[1].split(" bytes")[0])
    assert "test_api.py" in text or "state[" in text
    plan = autoshard.plan(step, *arguments(), mesh=mesh_4x2(), memory_limit_bytes=least)
    assert plan.peak_bytes <= least
    with pytest.raises(autoshard.InfeasibleError):
        autoshard.plan(step, *arguments(), mesh=mesh_4x2(), memory_limit_bytes=least - 1)


def test_an_argument_that_is_no_array():
    with pytest.raises(autoshard.ArgumentError, match="batch is 'text'"):
        autoshard.jit(step, mesh=mesh_4x2())(arguments()[0], "text")


def test_control_flow_on_traced_values_is_jax_s_own_error():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        autoshard.jit(lambda x: x if x[0] > 0 else -x, mesh=mesh_4x2())(jnp.ones(4))


@pytest.mark.parametrize(("seconds", "struck"), [(1e-6, True), (60.0, False)])
def test_a_plan_says_whether_the_time_limit_struck(seconds, struck, tmp_path):
    found = autoshard.plan(step, *arguments(), mesh=mesh_4x2(), time_limit_s=seconds)
    assert found.time_limit_struck is struck
    assert ("the time limit cut the search short" in found.explain()) is struck
    found.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").time_limit_struck is struck


def test_plans_save_and_load(tmp_path):
    plan = autoshard.plan(step, *arguments(), mesh=mesh_4x2(), memory_limit_bytes=60_000)
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.to_json() == plan.to_json()
    assert loaded.in_shardings == plan.in_shardings and loaded.out_shardings == plan.out_shardings
    assert loaded.explain() == plan.explain().split("\n\nplanning:")[0]
    assert_close(loaded.jit(step, mesh_4x2())(*arguments()), step(*arguments()))


def test_a_plan_refuses_what_it_was_not_made_for(tmp_path):
    plan = autoshard.plan(step, *arguments(), mesh=mesh_4x2())
    state, batch = arguments()
    with pytest.raises(autoshard.MeshError, match="the plan is for mesh data=4,model=2, got x=8"):
        plan.jit(step, Mesh(np.array(jax.devices()), ("x",)))
    with pytest.raises(
        autoshard.PlanError, match=r"batch float32\[32,64\], the call has batch float32\[8,64\]"
    ):
        plan.jit(step)(state, batch[:8])
    with pytest.raises(autoshard.PlanError, match="another program"):
        plan.jit(lambda state, batch: (state, jnp.sum(batch @ state["in"])))(state, batch)
    path = tmp_path / "plan.json"
    path.write_text("[]")
    with pytest.raises(autoshard.PlanError, match="is not a plan"):
        autoshard.load(path)
    path.write_text(plan.to_json().replace('"autoshard_plan": 2', '"autoshard_plan": 99'))
    with pytest.raises(autoshard.PlanError, match="version 99"):
        autoshard.load(path)
    path.write_text(plan.to_json().replace('"mesh"', '"mush"'))
    with pytest.raises(autoshard.PlanError, match="damaged.*mesh"):
        autoshard.load(path)


def test_gradients_through_a_planned_function_keep_custom_rules():
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))
    run = autoshard.jit(lambda x: jnp.sum(clip(x) * 5.0), mesh=mesh_4x2())
    assert_close(jax.grad(run)(jnp.ones(8)), jnp.ones(8))


def test_a_second_call_compiles_nothing():
    run = autoshard.jit(step, mesh=mesh_4x2(), memory_limit_bytes=60_000)
    state, batch = arguments()
    with jax.log_compiles(), _compiles() as names:
        state, _ = run(state, np.asarray(batch))
        first = names.count("step")
        state, _ = run(state, batch)
        run(state, np.asarray(batch))
    assert (first, names.count("step")) == (1, 1)
