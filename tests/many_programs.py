"""Thousands of random programs, some at a time in processes of their own.

`python -m tests.many_programs FIRST COUNT [PROCESSES]` prints those that fail.
"""

import concurrent.futures
import faulthandler
import gc
import multiprocessing
import os
import random
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import Any

import autoshard
from tests.plans import assert_same, check_random_plans, mesh_of, on_one_device, run
from tests.random_programs import differentiated, random_program

TOLERANCE = 3e-5
# A process is given up after so many programs: what JAX remembers of each adds up.
A_PROCESS = 125
HANGS_AFTER_S = 1200  # the longest takes minutes: a scan over 3,200 steps of 5,000 operations


def check(rng: random.Random, plans: str) -> None:
    """Draws a program and runs it under a random or the best plan, and on one device."""
    gradient = rng.random() < 0.25
    program = random_program(rng, 30, gradient)
    fn = differentiated(program) if gradient else program
    args, seed = program.arguments(), rng.randrange(2**20)
    try:
        if plans == "random":
            check_random_plans(fn, args, [seed], tolerance=TOLERANCE)
        else:
            mesh = mesh_of(("4x2", "8")[seed % 2])
            planned: Any = autoshard.plan(fn, *args, mesh=mesh, time_limit_s=10).jit(fn)
            assert_same(run(planned, args), on_one_device(fn, args), TOLERANCE)
    except Exception as e:
        e.add_note(f"gradient: {gradient}\n{program}")
        raise


def check_numbered(number: int) -> None:
    """Checks the program of a number, every third under its best plan."""
    check(random.Random(number), ("random", "random", "best")[number % 3])


def failures(numbers: Iterable[int], processes: int = max(2, os.cpu_count() or 2)) -> list[str]:
    """Returns what went wrong with the programs of some numbers, each with its program."""
    numbers = list(numbers)
    parts = [numbers[k : k + A_PROCESS] for k in range(0, len(numbers), A_PROCESS)]
    with concurrent.futures.ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=_start,
        max_tasks_per_child=1,
    ) as pool:
        return [text for part in pool.map(_failures, parts) for text in part]


def _start() -> None:
    import tests.conftest  # noqa: F401  the devices

    warnings.simplefilter("error")
    gc.set_threshold(200_000, 50, 50)  # tracing makes many small objects, and few in cycles


def _failures(numbers: list[int]) -> list[str]:
    found = []
    for number in numbers:
        print(number, end=" ", file=sys.stderr, flush=True)  # the last one, should it hang
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        try:
            check_numbered(number)
        except Exception:
            found.append(f"program {number}\n{traceback.format_exc()}")
        faulthandler.cancel_dump_traceback_later()
    return found


if __name__ == "__main__":
    first, count, *processes = map(int, sys.argv[1:])
    for text in failures(range(first, first + count), *processes):
        print(text)
