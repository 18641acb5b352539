"""How long each stage of planning took, and a line on a terminal while it takes long."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

PATIENCE_S = 2.0  # planning shorter than this stays silent


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
        """Shows the stage line while the block runs."""
        if not self.show:
            yield self
            return
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), daemon=True)
        thread.start()
        try:
            yield self
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
