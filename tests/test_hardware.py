"""Presets, device kinds, and what a bad description is answered with."""

import dataclasses

import pytest

from autoshard.errors import HardwareError
from autoshard.hardware import GIB, PRESETS, Chip, Fabric, Hardware, Link, from_device_kind, preset

NAMES = ["v4", "v5e", "v5p", "v6e", "v7", "a100-40", "a100-80", "h100", "h200", "b200", "cpu"]


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_complete(name):
    hardware = preset(name)
    assert hardware.name == hardware.chip.name == name
    assert 0 < hardware.chip.usable_hbm_bytes <= hardware.chip.hbm_bytes
    assert hardware.chip.flops_for("int8") >= hardware.chip.flops_for("bfloat16")
    assert str(hardware)
    hash(hardware)


def test_nothing_but_the_documented_names():
    assert list(PRESETS) == NAMES


@pytest.mark.parametrize(
    "alias, name", [("tpu-v5e", "v5e"), ("TPU v6e", "v6e"), ("Ironwood", "v7"), ("H100", "h100")]
)
def test_aliases(alias, name):
    assert preset(alias) is PRESETS[name]


@pytest.mark.parametrize(
    "kind, name",
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v4", "v4"),
        ("TPU7x", "v7"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA GB200", "b200"),
        ("cpu", "cpu"),
    ],
)
def test_device_kinds(kind, name):
    assert from_device_kind(kind) is PRESETS[name]


def test_usable_hbm_is_what_the_tpu_compiler_grants():
    """The limits in the compiler's own RESOURCE_EXHAUSTED messages."""
    usable = {n: round(preset(n).chip.usable_hbm_bytes / GIB, 2) for n in NAMES[:5]}
    assert usable == {"v4": 30.5, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "v7": 94.75}
    assert preset("v4").chip.per_core().usable_hbm_bytes == 15.25 * GIB


@pytest.mark.parametrize("itemsize, rows", [(4, 8), (2, 16), (1, 32)])
def test_tiles_hold_4_kib(itemsize, rows):
    assert preset("v5e").chip.tile(itemsize) == (rows, 128)
    assert preset("h100").chip.tile(itemsize) == (1, 1)


def test_flops_fall_back_to_the_nearest_dtype():
    chip = preset("h100").chip
    assert chip.flops_for("float8_e5m2") == chip.flops_for("float8_e4m3fn") == 1.979e15
    assert chip.flops_for("uint8") == chip.flops_for("int8")
    assert chip.flops_for("int32") == chip.flops_for("float32")
    assert preset("a100-40").chip.flops_for("float8_e4m3fn") == 3.12e14
    assert Chip("c", {"float32": 7.0}, 1.0, 1.0).flops_for("bfloat16") == 7.0


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: preset("v99"), "unknown hardware 'v99': known are v4, v5e"),
        (lambda: from_device_kind("Quux 3"), "unknown device kind 'Quux 3'"),
        (lambda: Link("nvlink", 0.0), "nvlink link has bytes_per_s=0.0"),
        (lambda: Link("nvlink", float("inf")), "wanted a finite number"),
        (lambda: Link("ici", 1e9, latency_s=-1.0), "latency_s=-1.0"),
        (lambda: Link("string", 1e9), "unknown kind of link 'string'"),
        (lambda: Link("ici", 1e9, overlaps=("all",)), r"overlaps=\(.all.,\): wanted some of"),
        (lambda: Chip("c", {}, 1.0, 1.0), "has no flops_per_s"),
        (lambda: Chip("c", {"float32": 0.0}, 1.0, 1.0), r"flops_per_s\['float32'\]=0.0"),
        (lambda: Chip("c", {"float32": 1.0}, 0.0, 1.0), "hbm_bytes_per_s=0.0"),
        (lambda: Chip("c", {"float32": 1.0}, 1.0, 8.0, 8.0), "reserves 8 of its 8"),
        (lambda: Hardware("lab", preset("h100").chip), "has no links"),
    ],
)  # fmt: skip
def test_bad_descriptions_say_what_is_missing(make, text):
    with pytest.raises(HardwareError, match=text):
        make()


def test_a_link_knows_what_its_kind_is():
    assert not Link("ici", 1e9).switched
    assert Link("nvlink", 1e9).switched
    assert not Link("custom", 1e9, switched=False).switched
    ring = Link("ici", 1e9, wrap=True)
    assert ring.ring_bytes_per_s == 2e9
    assert dataclasses.replace(ring, both_ways=False).ring_bytes_per_s == 1e9


def test_custom_hardware_needs_a_link_for_each_axis():
    lab = Hardware("lab", preset("h100").chip, axis_links={"data": Link("dcn", 1e9)})
    assert lab.link_of("data").kind == "dcn"
    with pytest.raises(HardwareError, match="no link for mesh axis 'model': it has links for"):
        lab.link_of("model")


def test_fabric_alone_is_enough():
    fabric = Fabric(Link("pcie", 2e10), domain_size=4)
    assert "pcie 20 GB/s" in str(Hardware("box", preset("a100-40").chip, fabric))
