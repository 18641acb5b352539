"""On a terminal, planning that takes long shows its stage and time; elsewhere it is silent."""

import os
import pty
import subprocess
import sys

SCRIPT = """
import time
from autoshard import stages
stages.PATIENCE_S = 0.1
with stages.Stages("planning step").line() as s:
    with s.stage("solve"):
        time.sleep(0.6)
print(s)
"""


def test_a_terminal_sees_the_stage_and_the_time():
    master, slave = pty.openpty()
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=slave,
        check=True,
    )
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert "planning step: solve, 0." in shown
    assert run.stdout.startswith(b"solve 0.")


def test_a_pipe_sees_nothing():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    assert b"planning step" not in run.stderr
