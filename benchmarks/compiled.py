"""Programs compiled ahead of time, kept on disk by what went in."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard import inspect
from autoshard.hardware import preset
from autoshard.meshes import mesh_shape
from autoshard.topology import topology


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program, per device; seconds and bytes."""

    step_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    peak_bytes: float | None = None
    compile_s: float = 0.0
    refused: str = ""


def compiled(
    key: str,
    mesh: Mesh,
    chip: str,
    make: Callable[[], dict[str, Any]],
    cache: pathlib.Path,
    patience_s: float = math.inf,
) -> tuple[Compiled, pathlib.Path]:
    """Compiles (`make`, see `text_of`), or reads what an earlier run compiled for the same key.

    A compilation cannot be stopped from within: when it takes longer than `patience_s`, that is
    noted in its place and the whole process starts anew, with the same arguments.
    """
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json.gz"
    found = _read(path)
    if found is None or found.get("patience_s", math.inf) < patience_s:
        with _patience(path, key, patience_s):
            _write(path, {"key": key, **make()})
        found = _read(path)
        assert found is not None
    if "refused" in found:
        return Compiled(compile_s=found["compile_s"], refused=found["refused"]), path
    memory = inspect.Memory(**found["memory"])
    step = inspect.from_text(
        found["text"], mesh_shape(mesh), device_ids=found["positions"],
        device_kind=mesh.devices.flat[0].device_kind, memory=memory,
    )  # fmt: skip
    links = topology(mesh_shape(mesh), preset(chip), mesh.devices)
    times = step.times(inspect.price_on(links))
    if times is None:
        return Compiled(peak_bytes=memory.peak_bytes, compile_s=found["compile_s"]), path
    return Compiled(
        times.step_s, times.compute_s, times.exposed_comm_s, memory.peak_bytes, found["compile_s"]
    ), path  # fmt: skip


@contextlib.contextmanager
def _patience(path: pathlib.Path, key: str, seconds: float) -> Iterator[None]:
    def give_up() -> None:
        refused = f"not compiled within {seconds:.0f} s"
        _write(path, {"key": key, "refused": refused, "compile_s": seconds, "patience_s": seconds})
        os.execv(sys.executable, sys.orig_argv)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write(path: pathlib.Path, found: dict[str, Any]) -> None:
    path.write_bytes(gzip.compress(json.dumps(found).encode()))


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    return json.loads(gzip.decompress(path.read_bytes())) if path.exists() else None


def text_of(mesh: Mesh, lowered: Any, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns what is kept of a program: its text and memory, or why it was refused."""
    start = time.perf_counter()
    try:
        made = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return {"refused": str(e)[:400], "compile_s": time.perf_counter() - start}
    stats = made.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    return {
        "text": made.as_text(),
        "memory": {f"{n}_bytes": getattr(stats, f"{n}_size_in_bytes") for n in names},
        "positions": inspect.positions(made, mesh),
        "compile_s": time.perf_counter() - start,
    }
