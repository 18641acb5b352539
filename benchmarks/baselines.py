"""The hand plans of each kind of model, as its users write them."""

from collections.abc import Iterator

from benchmarks.hand import HandPlan, Where
from benchmarks.workloads import Workload

ALL = ("data", "model")
DATA, MODEL = ("data",), ("model",)
LEAST = 100_000  # elements from which on frameworks shard a parameter


def hand_plans(workload: Workload) -> list[HandPlan]:
    """Returns the hand plans of a workload on its three meshes, the likeliest first."""
    kind = _KINDS.get(workload.model, _transformers)
    if kind is _transformers and workload.batch < workload.device_count:
        kind = _few_sequences
    elif kind is _transformers and workload.slice_count > 1:
        kind = _slices
    return list(kind(workload.meshes))


def _transformers(meshes: tuple[str, ...]) -> Iterator[HandPlan]:
    line, wide = meshes[0], meshes[1:]
    heads: Where = (("F", MODEL), ("K", MODEL), ("I", MODEL), ("V", MODEL))
    fsdp: Where = (("D", ALL), ("F", ALL))
    yield HandPlan("FSDP", line, (("B", ALL),), fsdp, least=LEAST)
    yield HandPlan("FSDP, no windows", line, (("B", ALL),), fsdp, least=LEAST, windowed=False)
    yield HandPlan("ZeRO-1", line, (("B", ALL),), (), fsdp, LEAST)
    yield HandPlan("data parallel", line, (("B", ALL),))
    for mesh in wide:
        yield HandPlan(
            "FSDP + TP + sequence", mesh, (*heads, ("B", DATA), ("S", MODEL)),
            (*heads, ("D", DATA)), least=LEAST,
        )  # fmt: skip
        yield HandPlan(
            "FSDP, sequences split, keys and values gathered, no windows", mesh,
            (("B", DATA), ("S", MODEL), ("T", MODEL)), fsdp, least=LEAST, inside=("T",),
            windowed=False,
        )  # fmt: skip
    for mesh in wide:
        yield HandPlan("FSDP + TP", mesh, (*heads, ("B", DATA)), (*heads, ("D", DATA)), least=LEAST)
        yield HandPlan(
            "HSDP, no windows", mesh, (("B", ALL),), (("D", MODEL),), (("D", MODEL),), LEAST,
            windowed=False,
        )  # fmt: skip
        yield HandPlan(
            "TP + sequence", mesh, (*heads, ("B", DATA), ("S", MODEL)), heads, least=LEAST
        )
        yield HandPlan("TP", mesh, (*heads, ("B", DATA)), heads, least=LEAST)
        yield HandPlan(
            "ZeRO-1 + TP", mesh, (*heads, ("B", DATA)), heads, (*heads, ("D", DATA)), LEAST
        )


def _few_sequences(meshes: tuple[str, ...]) -> Iterator[HandPlan]:
    """Fewer sequences than devices: the positions are split too."""
    line, narrow, wide = meshes
    fsdp: Where = (("D", ALL), ("F", ALL))
    heads: Where = (("F", MODEL), ("K", MODEL), ("I", MODEL), ("V", MODEL))
    for mesh, batch, rest in ((wide, DATA, MODEL), (narrow, MODEL, DATA), (line, DATA, DATA)):
        split: Where = (("B", batch), ("S", rest))
        yield HandPlan(
            "sequences split, heads inside attention, FSDP, no windows", mesh,
            (("B", batch), ("K", rest), ("S", rest)), fsdp, least=LEAST, outside=("K",),
            windowed=False,
        )  # fmt: skip
        yield HandPlan(
            "sequences split, keys and values gathered, FSDP, no windows", mesh,
            (*split, ("T", rest)), fsdp, least=LEAST, inside=("T",), windowed=False,
        )  # fmt: skip
        if mesh == wide:
            yield HandPlan(
                "FSDP + TP + sequence", mesh, (*heads, *split), (*heads, ("D", DATA)), least=LEAST
            )
    for mesh in (wide, narrow):
        yield HandPlan("FSDP", mesh, (("B", ALL),), fsdp, least=LEAST)
        yield HandPlan("TP", mesh, (*heads, ("B", DATA)), heads, least=LEAST)


def _slices(meshes: tuple[str, ...]) -> Iterator[HandPlan]:
    """Slices joined by a slow network, which is to carry gradients only, and those once a step."""
    line, narrow, slices = meshes
    batch: Where = (("B", ALL),)
    heads: Where = (("F", MODEL), ("K", MODEL), ("V", MODEL))
    inside: Where = (("D", MODEL), ("F", MODEL))
    fsdp: Where = (("D", ALL), ("F", ALL))
    split: Where = (*heads, ("B", DATA), ("S", MODEL))
    yield HandPlan("HSDP, no windows", slices, batch, inside, inside, LEAST, windowed=False)
    yield HandPlan("ZeRO-1 in a slice", slices, batch, (), inside, LEAST)
    yield HandPlan("FSDP, no windows", line, batch, fsdp, least=LEAST, windowed=False)
    yield HandPlan("FSDP + TP + sequence", narrow, split, (*heads, ("D", DATA)), least=LEAST)
    yield HandPlan("HSDP", slices, batch, inside, inside, LEAST)
    yield HandPlan("TP + sequence in a slice", slices, split, heads, least=LEAST)
    yield HandPlan("ZeRO-1", line, batch, (), fsdp, LEAST)
    yield HandPlan("FSDP", line, batch, fsdp, least=LEAST)


def _experts(meshes: tuple[str, ...]) -> Iterator[HandPlan]:
    heads: Where = (("F", MODEL), ("K", MODEL), ("V", MODEL))
    fsdp: Where = (("D", ALL), ("F", ALL))
    experts: Where = (("E", MODEL), ("B", ALL))
    yield HandPlan("FSDP", meshes[0], (("B", ALL),), fsdp, least=LEAST)
    yield HandPlan("FSDP, no windows", meshes[0], (("B", ALL),), fsdp, least=LEAST, windowed=False)
    for mesh in meshes[1:]:
        yield HandPlan("experts + FSDP", mesh, experts, (("E", MODEL), ("D", ALL)), least=LEAST)
        yield HandPlan("FSDP + TP", mesh, (*heads, ("B", DATA)), (*heads, ("D", DATA)), least=LEAST)
        yield HandPlan(
            "experts + ZeRO-1", mesh, experts, (("E", MODEL),), (("E", MODEL), ("D", ALL)), LEAST
        )
    for mesh in meshes[1:]:
        yield HandPlan("experts, rest replicated", mesh, experts, (("E", MODEL),), least=LEAST)
        yield HandPlan(
            "FSDP + TP + sequence", mesh, (*heads, ("B", DATA), ("S", MODEL)),
            (*heads, ("D", DATA)), least=LEAST,
        )  # fmt: skip
    yield HandPlan("ZeRO-1", meshes[0], (("B", ALL),), (), fsdp, LEAST)
    yield HandPlan("data parallel", meshes[0], (("B", ALL),))


def _tables(meshes: tuple[str, ...]) -> Iterator[HandPlan]:
    batch: Where = (("B", ALL),)
    large = 10_000_000
    yield HandPlan("columns of all tables", meshes[0], batch, (("D", ALL),), least=LEAST)
    yield HandPlan("columns of large tables", meshes[0], batch, (("D", ALL),), least=large)
    yield HandPlan("rows of all tables", meshes[0], batch, (("V", ALL),), least=LEAST)
    yield HandPlan("rows of large tables", meshes[0], batch, (("V", ALL),), least=large)
    for mesh in meshes[1:]:
        yield HandPlan(
            "rows over one axis, columns over the other", mesh, batch,
            (("V", DATA), ("D", MODEL)), least=large,
        )  # fmt: skip
        yield HandPlan("columns over one axis", mesh, batch, (("D", MODEL),), least=large)
    yield HandPlan("data parallel", meshes[0], batch)
    yield HandPlan("ZeRO-1", meshes[0], batch, (), (("V", ALL),), LEAST)


def _images(meshes: tuple[str, ...]) -> Iterator[HandPlan]:
    line = meshes[0]
    batch: Where = (("B", ALL),)
    store: Where = (("O", ALL), ("C", ALL))
    yield HandPlan("data parallel", line, batch)
    yield HandPlan("ZeRO-1", line, batch, (), store, LEAST)
    yield HandPlan("FSDP", line, batch, store, least=LEAST)
    for mesh in meshes[1:]:
        yield HandPlan("HSDP", mesh, batch, (("O", MODEL),), least=LEAST)
        yield HandPlan(
            "channels split", mesh, (("B", DATA), ("O", MODEL)), (("O", MODEL),), least=LEAST
        )
        yield HandPlan("rows of pixels split", mesh, (("B", DATA), ("Y", MODEL)))
        yield HandPlan("ZeRO-1 over one axis", mesh, batch, (), (("O", MODEL),), LEAST)


def _serving(meshes: tuple[str, ...]) -> Iterator[HandPlan]:
    n = meshes[0].partition("=")[2]
    heads: Where = (("F", MODEL), ("K", MODEL), ("V", MODEL))
    yield HandPlan("KV heads and hidden split", f"model={n}", heads, heads)
    yield HandPlan("batch split, weights whole", meshes[0], (("B", ALL),))
    yield HandPlan("batch split, FSDP", meshes[0], (("B", ALL),), (("D", ALL),))
    for mesh in meshes[1:]:
        where = (*heads, ("B", DATA))
        yield HandPlan("KV heads and batch split", mesh, where, heads)
        yield HandPlan("KV heads and batch split, FSDP", mesh, where, (*heads, ("D", DATA)))
        yield HandPlan(
            "batch of the cache, hidden of the MLP", mesh,
            (("F", ALL), ("V", ALL), ("B", ALL)), (("F", ALL), ("V", ALL)),
        )  # fmt: skip
        yield HandPlan("KV heads and positions split", mesh, (*heads, ("T", DATA)), heads)


_KINDS = {"moe": _experts, "dlrm": _tables, "unet": _images, "decode": _serving}
