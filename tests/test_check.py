"""A plan compiled for a machine that is not here, beside its prediction."""

import dataclasses
import importlib.util
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import autoshard
from autoshard import cli
from autoshard.check import check
from autoshard.errors import MeshError
from models import mlp

needs_tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
SIZES = mlp.Sizes(2, 1024, 8192, 65_536, compute_dtype="bfloat16")


def planned(sizes: Any = SIZES, mesh: Any = "data=4,model=2", **options: Any) -> autoshard.Plan:
    options = {"hardware": "v5e", "donate_argnums": (0,)} | options
    return autoshard.plan(mlp.train_step, *mlp.example_arguments(sizes), mesh=mesh, **options)


@needs_tpu
def test_a_plan_for_a_tpu():
    plan = planned()
    found = plan.check(mlp.train_step, *mlp.example_arguments(SIZES), topology="v5e:2x4")
    assert found.memory is not None and found.comparison is not None and found.times is not None
    predicted, memory = found.predicted, found.memory
    assert predicted.argument_bytes == pytest.approx(memory.argument_bytes, rel=0.02)
    assert predicted.output_bytes == pytest.approx(memory.output_bytes, rel=0.02)
    assert found.peak_ratio == pytest.approx(1.0, abs=0.35)
    # XLA makes an all-reduce and a slice of some reduce-scatters over two torus dims.
    assert found.unplanned_fraction < 0.25
    assert 0.3 < predicted.step_s / found.times.step_s < 3
    text = str(found)
    assert text.splitlines()[0] == "train_step compiled for v5e:2x4"
    assert "predicted" in text and "was not planned" in text and "temporaries" in text


@needs_tpu
def test_a_program_that_does_not_fit_is_said_to_be_refused():
    sizes = dataclasses.replace(SIZES, layers=1, width=16_384, hidden=65_536)
    pins = {"in_shardings": (jax.sharding.PartitionSpec(), None)}
    plan = planned(sizes, memory_limit_bytes=1e12, **pins)
    found = plan.check(mlp.train_step, *mlp.example_arguments(sizes), topology="v5e:2x4")
    assert found.step is None and found.refused is not None and "out of memory" in found.refused
    assert "the compiler refuses it" in str(found)


def test_a_plan_for_local_devices_has_no_estimate_of_time():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    plan = planned("tiny", mesh, hardware="cpu")
    found = plan.check(mlp.train_step, *mlp.example_arguments("tiny"))
    assert found.times is None and found.memory is not None
    assert found.target == "8 x cpu"
    assert "-" in str(found)


def test_what_is_missing_is_said():
    plan = dataclasses.replace(planned("tiny"), devices=None)
    arguments = mlp.example_arguments("tiny")
    with pytest.raises(MeshError, match="pass mesh=, or topology="):
        check(plan, mlp.train_step, arguments)
    other = Mesh(np.array(jax.devices()), ("x",))
    with pytest.raises(MeshError, match="the plan is for mesh data=4,model=2, got x=8"):
        plan.check(mlp.train_step, *arguments, mesh=other)


@needs_tpu
def test_command_line(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    planned("tiny").save(path)
    argv = ("check", path, "models.mlp:train_step", "--size", "tiny", "--topology", "v5e:2x4")
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith("train_step compiled for v5e:2x4")
    assert cli.main((*argv[:-1], "v5e:4x4")) == 2
    assert "has 16" in capsys.readouterr().err
