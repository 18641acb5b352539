"""A wall-clock limit that remembers whether it struck."""

import time


class Clock:
    def __init__(self, limit_s: float):
        self.start = time.monotonic()
        self.limit_s = limit_s
        self.struck = False

    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.start)

    def expired(self) -> bool:
        self.struck = self.struck or self.left_s() <= 0
        return self.struck
