import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.errors import MeshError
from autoshard.sharding import MeshShape, Sharding, all_shardings

MESH = MeshShape.parse("data=4,model=2")


def test_mesh_text_round_trips():
    assert str(MESH) == "data=4,model=2"
    assert MESH.device_count == 8 and MESH.size(("data", "model")) == 8


@pytest.mark.parametrize("text", ["data", "data=", "=4", "data=x", "data=4=2", "1a=2"])
def test_bad_mesh_text_is_named(text):
    with pytest.raises(MeshError, match="write data=4,model=2"):
        MeshShape.parse(text)


def test_mesh_axes_are_checked():
    with pytest.raises(MeshError, match="different names"):
        MeshShape((("a", 2), ("a", 2)))
    with pytest.raises(MeshError, match="at least 1"):
        MeshShape((("a", 0),))
    with pytest.raises(MeshError, match="unknown mesh axis 'z'"):
        MESH.size("z")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P(), "f32[16,8]"),
        (P("data"), "f32[16@data,8]"),
        (P(None, "model"), "f32[16,8@model]"),
        (P(("model", "data")), "f32[16@(model,data),8]"),
    ],
)
def test_specs_round_trip(spec, text):
    sharding = Sharding.from_spec(spec, 2)
    assert sharding.text((16, 8), "f32") == text
    assert sharding.to_spec() == spec


def test_local_shape_is_jax_s():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    for sharding in all_shardings((16, 8, 3), MESH):
        named = jax.sharding.NamedSharding(mesh, sharding.to_spec())
        assert sharding.local_shape((16, 8, 3), MESH) == named.shard_shape((16, 8, 3))


def test_all_shardings_are_counted_by_hand():
    # one dim: -, data, model, (data,model), (model,data)
    assert len(all_shardings((8,), MESH)) == 5
    assert len(all_shardings((8,), MESH, ordered=False)) == 4
    # two dims: 1 + 2 axes x 2 dims + (2 dims x 2 orders + 2 ways to split the axes)
    assert len(all_shardings((8, 8), MESH)) == 1 + 4 + 6


def test_uneven_dims_are_not_sharded():
    assert [str(s) for s in all_shardings((6,), MESH)] == ["[-]", "[model]"]
    assert [str(s) for s in all_shardings((7, 0, 1), MESH)] == ["[-,-,-]"]


def test_check_says_what_is_wrong():
    assert "not divisible by data=4" in str(Sharding((("data",),)).check((6,), MESH))
    assert "unknown mesh axis 'z'" in str(Sharding((("z",),)).check((6,), MESH))
    assert "twice" in str(Sharding((("data",), ("data",))).check((4, 4), MESH))
    assert "has 1 dims" in str(Sharding((("data",),)).check((4, 4), MESH))
