"""The text of compiled programs: types, device groups, loop counts, one form at a time."""

import itertools

import numpy as np
import pytest

from autoshard import hlo
from autoshard.inspect import from_text
from autoshard.sharding import MeshShape

ids = np.arange(8)


def instruction(text: str) -> hlo.Instruction:
    module = hlo.parse(f"HloModule m, num_partitions=8\n\nENTRY %main () -> f32[] {{\n{text}\n}}\n")
    return module.entry.root


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ids.reshape(4, 2)),
        ("replica_groups={{0,4,2,6},{1,5,3,7}}", [[0, 4, 2, 6], [1, 5, 3, 7]]),
        ("replica_groups={}", [ids]),
        ("replica_groups={{0}}", [ids]),
        ("", [ids]),
        ("replica_groups=[4,2]<=[8]", ids.reshape(4, 2)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ids.reshape(4, 2).T),
        ("replica_groups=[4,2]<=[2,2,2]T(1,0,2)", [[0, 1], [4, 5], [2, 3], [6, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", ids.reshape(4, 2)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", ids.reshape(4, 2).T),
        ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", [ids]),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (
            "replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}",
            ids.reshape(4, 2),
        ),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("source_target_pairs={{0,1},{1,2},{2,3},{4,5}}", [[0, 1, 2, 3], [4, 5]]),
        ("source_target_pairs={{3,0},{0,3},{5,6},{6,2},{2,5}}", [[0, 3], [2, 5, 6]]),
    ],
)
def test_groups(form, expected):
    i = instruction(f"ROOT %a = f32[4] all-reduce(%x), channel_id=1, {form}, to_apply=%add")
    got = sorted(tuple(sorted(g)) for g in hlo.groups(i, 8))
    assert got == sorted(tuple(sorted(int(n) for n in g)) for g in expected)


def test_a_list_of_one_partition_with_global_ids_is_itself():
    form = "replica_groups={{0}}, use_global_device_ids=true"
    i = instruction(f"ROOT %a = f32[4] all-reduce(%x), channel_id=1, {form}, to_apply=%add")
    assert hlo.groups(i, 8) == ((0,),)


@pytest.mark.parametrize(
    ("text", "expected", "nbytes"),
    [
        ("f32[8,128]{1,0:T(8,128)}", ["f32[8,128]"], 4096),
        ("bf16[3]", ["bf16[3]"], 6),
        ("pred[5]{0:T(1024)(128)(4,1)}", ["pred[5]"], 5),
        ("f8e4m3fn[2,2]{1,0}", ["f8e4m3fn[2,2]"], 4),
        ("f4e2m1fn[7]{0:E(4)}", ["f4e2m1fn[7]"], 3.5),
        ("s4[16]{0:T(8,128)(8,1)E(4)S(1)}", ["s4[16]"], 8),
        ("u2[16]", ["u2[16]"], 4),
        ("c64[2]{0}", ["c64[2]"], 16),
        ("f32[<=10,2]{1,0}", ["f32[10,2]"], 80),
        (
            "(f32[1], bf16[2]{0:T(256)(128)(2,1)}, /*index=5*/(s32[], u8[0]), token[])",
            ["f32[1]", "bf16[2]", "s32[]", "u8[0]", "token[]"],
            12,
        ),
    ],
)
def test_arrays_of_a_type(text, expected, nbytes):
    i = instruction(f"ROOT %a = {text} all-to-all(%x, /*index=5*/%y.1), channel_id=3")
    assert [str(a) for a in i.arrays] == expected
    assert sum(a.bytes for a in i.arrays) == nbytes
    assert (i.opcode, i.operands) == ("all-to-all", ("x", "y.1"))
    assert i.integer("channel_id") == 3


LOOP = """HloModule m, is_scheduled=true, num_partitions=4

%bump (p: s32[]) -> s32[] {{
  %p = {T}[] parameter(0)
  %by = {T}[] constant({stride})
  ROOT %sum = {T}[] add(%p, %by)
}}

%body (c: ({T}[], f32[8], {T}[])) -> ({T}[], f32[8], {T}[]) {{
  %c = ({T}[], f32[8], {T}[]) parameter(0)
  %i = {T}[]{{:T(128)}} get-tuple-element(%c), index=0
  %copy = {T}[]{{:T(128)S(6)}} copy(%i)
  %x = f32[8] get-tuple-element(%c), index=1
  %end = {T}[] get-tuple-element(%c), index=2
  %next = {T}[] fusion(%copy), kind=kLoop, calls=%bump
  %moved = f32[8] collective-permute(%x), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT %out = ({T}[], f32[8], {T}[]) tuple(%next, %moved, %end)
}}

%less (a: {T}[], b: {T}[]) -> pred[] {{
  %a = {T}[] parameter(0)
  %b = {T}[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction={direction}
}}

%condition (c: ({T}[], f32[8], {T}[])) -> pred[] {{
  %c = ({T}[], f32[8], {T}[]) parameter(0)
  %i = {T}[] get-tuple-element(%c), index=0
  %end = {T}[] get-tuple-element(%c), index=2
  ROOT %go = pred[] fusion(%i, %end), kind=kLoop, calls=%less
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %first = {T}[] constant({first})
  %limit = {T}[] constant({limit})
  %start = ({T}[], f32[8], {T}[]) tuple(%first, %x, %limit)
  %loop = ({T}[], f32[8], {T}[]) while(%start), condition=%condition, body=%body
  ROOT %y = f32[8] get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize("dtype", ["s32", "u32"])
@pytest.mark.parametrize("direction", ["LT", "LE", "GT", "GE", "NE"])
def test_trip_counts_equal_those_of_running_the_loop(direction, dtype):
    """The limit is a constant of the loop's tuple, the step and the test stand in fusions."""
    go = {"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "NE": "!="}[direction]
    for first, limit, stride in itertools.product((0, 1, 7), (0, 7, 12), (1, 2, 5, -1, -3)):
        i, trips = first, 0
        while eval(f"{i} {go} {limit}") and trips < 100:
            i, trips = i + stride, trips + 1
        text = LOOP.format(T=dtype, stride=stride, direction=direction, first=first, limit=limit)
        step = from_text(text, MeshShape.parse("a=2,b=2"))
        if trips == 100:
            assert len(step.notes) == 1, (first, limit, stride)
        else:
            assert step.notes == () and [c.trips for c in step.collectives] == [trips]


def test_a_chain_of_shared_values_is_read_once():
    doubling = "\n".join(f"  %v{n} = s32[] add(%v{n - 1}, %v{n - 1})" for n in range(1, 60))
    text = LOOP.format(T="s32", stride=1, direction="LT", first=0, limit=5)
    text = text.replace("  %first = s32[] constant(0)", f"  %v0 = s32[] constant(0)\n{doubling}")
    text = text.replace("tuple(%first, %x", "tuple(%v59, %x")
    assert [c.trips for c in from_text(text, MeshShape.parse("a=4")).collectives] == [5]


def test_source_is_the_innermost_line_outside_installed_packages():
    text = """HloModule m, num_partitions=2

FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.11/site-packages/flax/linen.py"

FunctionNames
1 "step"
2 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=3 end_column=9}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=3 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %y = f32[4] negate(%x), metadata={op_name="neg" stack_frame_id=2}
  %r = f32[4] all-reduce(%y), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true
  ROOT %z = f32[4] all-reduce(%x), channel_id=2, metadata={source_file="/a/b.py" source_line=7}
}
"""
    a, b = from_text(text, MeshShape.parse("data=2")).collectives
    assert (a.source, a.op_name) == ("train.py:12 (step)", "neg")
    assert b.source == "b.py:7"


WRAPPED = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%scatter (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %rs = f32[2,4]{1,0} reduce-scatter(%p), channel_id=1, GROUPS
}

%commands (p: f32[2,4]) -> f32[2,4] {
  %p = f32[2,4]{1,0} parameter(0)
  %peer = ((f32[2,4]{1,0}), u32[], token[]) send(%p, %token), channel_id=2, PAIRS
  ROOT %q = f32[2,4]{1,0} negate(%p)
}

ENTRY %main (x: f32[8,4]) -> f32[2,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %start = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%x), calls=%scatter
  %update = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-update(%start)
  %done = f32[2,4]{1,0} async-done(%update)
  ROOT %call = f32[2,4]{1,0} call(%done), to_apply=%commands
}
"""


def test_collectives_in_async_wrappers_and_calls():
    text = WRAPPED.replace(
        "PAIRS", "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,0}}}"
    ).replace("GROUPS", "replica_groups=[1,4]<=[4], use_global_device_ids=true, to_apply=%add")
    scatter, permute = from_text(text, MeshShape.parse("a=2,b=2")).collectives
    assert (scatter.kind, scatter.bytes, scatter.axes) == ("reduce-scatter", 128, ("a", "b"))
    assert scatter.asynchronous and scatter.shape == "f32[8,4]"
    assert (permute.kind, permute.bytes, permute.axes) == ("collective-permute", 32, ("b",))


def test_a_peeled_clone_runs_once_more_on_the_same_channel():
    text = LOOP.format(T="s32", stride=1, direction="LT", first=1, limit=6)
    before = "  %first = s32[] constant(1)"
    clone = "  %m = f32[8] collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}"
    (c,) = from_text(text.replace(before, f"{clone}\n{before}"), MeshShape.parse("a=4")).collectives
    assert c.trips == 1 + 5 and c.group_size == 2


@pytest.mark.parametrize(
    ("kind", "name", "nbytes"),
    [
        ("ALL_GATHER", "all-gather", 2 * 128),
        ("ALL_REDUCE", "all-reduce", 128),
        ("REDUCE_SCATTER", "reduce-scatter", 128),
        ("ALL_TO_ALL", "all-to-all", 128),
    ],
)
def test_messages_between_slices_are_one_collective(kind, name, nbytes):
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_rendezvous="all.1_0",_xla_megascale_target="{1,2}x{0:4}",'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    text = f"""HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[8,4]) -> f32[8,4] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %t = token[] after-all()
  %send = (f32[8,4]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=2, {attributes}
  %recv = (f32[8,4]{{1,0}}, u32[], token[]) recv(%t), channel_id=1, {attributes}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %done = (f32[8,4]{{1,0}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %y = f32[8,4]{{1,0}} get-tuple-element(%done), index=0
}}
"""
    (c,) = from_text(text, MeshShape.parse("slice=2,data=4")).collectives
    assert (c.kind, c.axes, c.bytes, c.group_size) == (name, ("slice",), nbytes, 2)
    (turned,) = from_text(text, MeshShape.parse("data=4,slice=2"), slice_ids=[0, 1] * 4).collectives
    assert turned.axes == ("slice",)
