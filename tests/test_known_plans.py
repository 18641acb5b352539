"""The plans that papers are named after come out of the solve, unasked, where they belong.

No plan has a code path of its own. Each test names a workload and what its plan must look like:
FSDP and a split optimizer state (Rajbhandari et al., "ZeRO", 2019, stages 3 and 1), hybrid
sharding over slices, tensor parallelism with split sequences (Korthikanti et al., 2022), expert
parallelism (Lepikhin et al., "GShard", 2020), sequences split outside attention and heads inside
(Jacobs et al., "DeepSpeed Ulysses", 2023), split vocabularies, and embedding tables split where
they are large.
"""

import dataclasses
import functools
import importlib
import math

import pytest
from jax.sharding import PartitionSpec

import autoshard
from autoshard import aot
from autoshard.sharding import MeshShape
from models import vit


@functools.cache
def plan_of(model: str, base: str, mesh, hardware: str | None, **sizes) -> autoshard.Plan:
    module = importlib.import_module(f"models.{model}")
    return autoshard.plan(
        module.train_step,
        *module.example_arguments(dataclasses.replace(module.SIZES[base], **sizes)),
        mesh=mesh,
        hardware=hardware,
        donate_argnums=module.donate_argnums,
    )


def axes_of(plan: autoshard.Plan, name: str) -> tuple[tuple[str, ...], ...]:
    """Returns the axes of each dim of the argument whose name ends so; moments have its name too.

    An array and its moments must agree.
    """
    found = {a.sharding.dims for a in plan.arguments if a.name.endswith(name)}
    assert len(found) == 1, f"{name}: {found}"
    return found.pop()


def moved(plan: autoshard.Plan, kind: str, source: str = "") -> list:
    """Returns the collectives of a kind inside the layers, whose source line contains a text."""
    return [c for c in plan.collectives if c.kind == kind and source in c.source and c.trips > 1]


def test_fsdp_where_the_batch_is_large():
    plan = plan_of("gpt", "1b", "data=8", "v5e", layers=2, width=1024, hidden=2816, batch=64)
    for name in ("['wq']", "['wo']", "['w_gate']", "['w_down']"):
        assert {a for axes in axes_of(plan, name) for a in axes} == {"data"}, name
    assert moved(plan, "all-gather", "(project)"), "weights are gathered layer by layer"
    assert moved(plan, "reduce-scatter", "(project)"), "gradients are scattered layer by layer"
    assert not moved(plan, "all-to-all"), "activations stay where they are"


def test_tensor_parallel_with_split_sequences_where_there_is_one_sequence():
    plan = plan_of(
        "gpt", "1b", "model=8", "v5e", layers=2, width=4096, hidden=16_384, batch=1, length=2048,
        kv_heads=16,
    )  # fmt: skip
    assert axes_of(plan, "['wq']") == ((), (), ("model",), (), ())
    assert axes_of(plan, "['wo']") == ((), ("model",), (), (), ())
    assert axes_of(plan, "['w_gate']") == ((), (), ("model",))
    assert axes_of(plan, "['w_down']") == ((), ("model",), ())
    assert moved(plan, "reduce-scatter", "(project)") and moved(plan, "all-gather")
    activations = 2048 * 4096 * 4 * 1.01
    assert all(c.bytes <= activations for c in plan.collectives), "no weight moves"


def test_experts_are_split_where_they_are_large_and_tokens_few():
    plan = plan_of(
        "moe", "8x7b", "expert=8", "v5p", layers=2, width=4096, hidden=14_336, batch=8, length=1024
    )
    assert axes_of(plan, "['w_gate']") == ((), ("expert",), (), ())
    assert axes_of(plan, "['w_down']") == ((), ("expert",), (), ())
    there_and_back = {c.source for c in moved(plan, "all-to-all") if "moe.py" in c.source}
    assert len(there_and_back) == 2, "tokens go to their experts and come back"


def test_sequences_are_split_outside_attention_and_heads_inside_where_sequences_are_few():
    plan = plan_of("gpt", "1b", "data=8,model=2", "v5e", layers=2, batch=4, length=8192)
    tokens = next(a for a in plan.arguments if a.name == "batch['targets']")
    assert "data" in tokens.sharding.dims[1], "the batch is smaller than the axis"
    assert [c for c in moved(plan, "all-to-all", "(attend)") if "data" in c.axes]


def test_the_vocabulary_is_split_where_it_is_large():
    plan = plan_of(
        "gpt", "1b", "data=4,model=4", "v5e", layers=2, vocab=128_256, batch=16, length=1024
    )
    unembed = axes_of(plan, "['unembed']")
    assert set(unembed[1]) == {"data", "model"}
    logits = 16 * 1024 * 128_256 * 2 / 16
    assert all(c.bytes < logits for c in plan.collectives), "logits stay where they are made"


def test_attention_weights_are_split_inside_a_slice_and_repeated_across():
    pytest.importorskip("libtpu")
    mesh = aot.mesh("v5e:2x4*2", MeshShape.parse("slice=2,data=8"))
    plan = plan_of("gpt", "1b", mesh, None, layers=2)
    assert {a for axes in axes_of(plan, "['wq']") for a in axes} == {"data"}


@pytest.mark.parametrize("hardware", ["v5e", "v6e"])
def test_optimizer_state_is_split_where_weights_must_lie_whole(hardware):
    """ZeRO-1: gradients are scattered, each device updates its part and gathers the weights.

    Where gathers hide, as on a v5e, the layers convert their part of the weights and gather that.
    """
    args = vit.example_arguments(dataclasses.replace(vit.SIZES["l16"], layers=2, batch=512))
    whole = dataclasses.replace(args[0], params=PartitionSpec(), opt_state=None)
    plan = autoshard.plan(
        vit.train_step, *args, mesh="data=8", hardware=hardware, in_shardings=(whole, None),
        donate_argnums=vit.donate_argnums,
    )  # fmt: skip
    for name in ("['mlp_in']['w']", "['mlp_out']['w']", "['wq']"):
        param, *moments = [a.sharding for a in plan.arguments if a.name.endswith(name)]
        assert param.is_replicated and len(moments) == 2
        assert all(m.axes == ("data",) for m in moments), name
    assert moved(plan, "reduce-scatter", "(project)")
    gathered = moved(plan, "all-gather")
    assert all(c.hidden_s > c.seconds / 2 for c in gathered)
    assert bool(gathered) == (hardware == "v5e")


@pytest.mark.parametrize("hardware", ["v5e", "v6e"])
def test_state_is_split_where_a_step_has_room_for_it(hardware):
    """What data parallel sends, with split moments: gathered once, the other way to write ZeRO-1;
    twice in two bytes where gathers hide, as on a v5e."""
    tables = (4_000_000, 400_000, 1000)
    plan = plan_of("dlrm", "criteo", "data=8", hardware, tables=tables, width=64, batch=32_768)
    name = "['top']['layers'][1]['w']"
    assert {a for axes in axes_of(plan, name) for a in axes} == {"data"}
    size = 4 * math.prod(next(a for a in plan.arguments if a.name.endswith(name)).shape)
    sent = sorted(c.kind for c in plan.collectives if c.bytes == size)
    gathered = [c for c in plan.collectives if c.kind == "all-gather" and c.value.endswith(name)]
    if hardware == "v5e":
        assert sent == ["reduce-scatter"]
        assert len(gathered) == 2 and sum(c.bytes for c in gathered) == size
    else:
        assert sent == ["all-gather", "reduce-scatter"]


def test_large_tables_are_split_by_row_where_there_are_more_devices_than_columns():
    tables = (4_000_000, 400_000, 1000)
    plan = plan_of("dlrm", "criteo", "data=128", "v5e", tables=tables, width=64, batch=32_768)
    split = [axes_of(plan, f"['tables'][{i}]") for i in range(3)]
    assert split == [(("data",), ()), (("data",), ()), ((), ())]


def test_large_tables_are_split_and_small_ones_are_not():
    tables = (4_000_000, 400_000, 1000)
    plan = plan_of("dlrm", "criteo", "data=2,model=4", "v5e", tables=tables, width=64, batch=32_768)
    split = [axes_of(plan, f"['tables'][{i}]") for i in range(3)]
    assert {a for axes in split[0] for a in axes} == {"data", "model"}
    assert {a for axes in split[1] for a in axes} == {"data", "model"}


def test_a_frozen_model_is_repeated_and_its_adapters_are_gathered_once():
    plan = plan_of("lora", "1b", "data=2,model=4", "v5e", layers=2, batch=16)
    base = [a for a in plan.arguments if ".base" in a.name]
    assert base and all(a.sharding.is_replicated for a in base)
    assert not moved(plan, "all-gather"), "nothing is gathered layer by layer"
