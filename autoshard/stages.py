"""How long each stage of planning took, and a line on a terminal while it takes long."""

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

PATIENCE_S = 2.0  # planning shorter than this stays silent
RARE = (1_000_000, 50, 50)  # objects, and collections of the younger generation, per collection


class Stages:
    """Times named stages; on a terminal, shows the current one after PATIENCE_S."""

    def __init__(self, title: str, show: bool | None = None):
        self.title = title
        self.show = sys.stderr.isatty() if show is None else show
        self.times: dict[str, float] = {}
        self._current = ""
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._current = name
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def line(self) -> Iterator["Stages"]:
        """Shows the stage line while the block runs, and keeps Python's collector out of it."""
        with _rare_collections():
            if not self.show:
                yield self
                return
            with self._shown():
                yield self

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _watch(self, done: threading.Event) -> None:
        if done.wait(PATIENCE_S):
            return
        with Status(self._text(), console=Console(stderr=True)) as status:
            while not done.wait(0.2):
                status.update(self._text())

    def _text(self) -> str:
        return f"{self.title}: {self._current}, {time.perf_counter() - self._start:.1f} s"

    def __str__(self) -> str:
        return ", ".join(f"{name} {s:.2f} s" for name, s in self.times.items())


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Planning makes millions of objects that live as long as it: looking through them again and
    again for garbage takes a tenth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(*(max(n, rare) if n else 0 for n, rare in zip(before, RARE, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
