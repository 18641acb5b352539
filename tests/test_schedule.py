"""The simulated schedule against the same schedule worked out by hand or unrolled."""

import random

import pytest

from autoshard import hlo
from autoshard.schedule import (
    Blocking,
    Branches,
    Clock,
    Compute,
    Done,
    Loop,
    Node,
    Schedule,
    Start,
    Transfer,
    read,
    simulate,
)

CLOCK = Clock(cycles_per_s=1.0, hbm_bytes_per_s=1.0)  # cycles are seconds


def run(nodes, seconds, links=None, kinds=None):
    count = len(seconds)
    kinds = kinds or ["all-gather"] * count
    transfers = tuple(Transfer(k, None, None, 1, True) for k in kinds)  # type: ignore[arg-type]
    schedule = Schedule(tuple(nodes), transfers, (), True)
    links = links or [("x",)] * count
    return simulate(schedule, CLOCK, seconds.__getitem__, links.__getitem__)


def test_blocking_collectives_are_exposed_whole():
    t = run([Compute(5), Blocking(0), Compute(2), Blocking(0)], [3.0])
    assert (t.compute_s, t.exposed_comm_s, t.step_s) == (7, 6, 13)


@pytest.mark.parametrize(("between", "exposed"), [(0, 4), (3, 1), (4, 0), (9, 0)])
def test_what_stands_between_start_and_done_hides_the_transfer(between, exposed):
    t = run([Start(0, "a"), Compute(between), Done("a")], [4.0])
    assert (t.compute_s, t.exposed_comm_s) == (between, exposed)


def test_transfers_on_one_axis_queue_and_on_two_do_not():
    nodes = [Start(0, "a"), Start(1, "b"), Compute(4), Done("a"), Done("b")]
    assert run(nodes, [4.0, 4.0]).exposed_comm_s == 4
    assert run(nodes, [4.0, 4.0], [("x",), ("y",)]).exposed_comm_s == 0
    assert run(nodes, [4.0, 4.0], [("x",), ("y", "x")]).exposed_comm_s == 4


def test_a_blocking_collective_waits_for_its_links():
    t = run([Start(0, "a"), Compute(1), Blocking(1), Done("a")], [4.0, 2.0])
    assert (t.step_s, t.exposed_comm_s) == (6, 5)


def test_copies_are_told_apart():
    nodes = [Start(0, "a"), Start(1, "b"), Done("a"), Done("b")]
    t = run(nodes, [2.0, 5.0], [("x",), ("hbm",)], ["all-gather", "copy"])
    assert (t.exposed_comm_s, t.exposed_copy_s, t.step_s) == (2, 3, 5)
    assert (
        str(t) == "step 5000.000 ms: compute 0.000, exposed collectives 2000.000, copies 3000.000"
    )


def test_the_longest_branch_runs():
    nodes = [Branches(((Compute(3),), (Compute(1), Blocking(0)), ())), Compute(1)]
    t = run(nodes, [4.0])
    assert (t.compute_s, t.exposed_comm_s, t.step_s) == (2, 4, 6)


def test_a_gather_started_for_the_next_iteration_hides_behind_this_one():
    body = (Done("w"), Start(0, "w"), Compute(10))
    t = run([Start(0, "w"), Loop(8, body), Done("w")], [6.0])
    assert (t.compute_s, t.exposed_comm_s) == (80, 6)  # only the first is waited for


def test_a_loop_is_its_body_unrolled():
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 4)
        seconds = [float(rng.randint(0, 9)) for _ in range(count)]
        links = [(rng.choice("xy"),) for _ in range(count)]
        body: list[Node] = []
        body += [Start(i, str(i)) for i in range(count)]
        body += [Done(str(i)) for i in range(count)]
        for _ in range(rng.randint(0, 4)):
            body.insert(rng.randrange(len(body) + 1), Compute(rng.randint(0, 9)))
        trips = rng.randint(0, 6)
        looped = run([Loop(2, (Loop(trips, tuple(body)),))], seconds, links)
        unrolled = run(body * trips * 2, seconds, links)
        assert looped == unrolled


def test_an_estimate_that_overflowed_is_taken_as_the_bytes_written():
    """The TPU compiler says 2^63 - 1 cycles of the maxima of f32[4,8,4,4096,4096] scores."""
    module = hlo.parse(
        "HloModule m, is_scheduled=true\n\n"
        "ENTRY %main (p: f32[4,1024]) -> f32[4,1024] {\n"
        "  %p = f32[4,1024]{1,0} parameter(0)\n"
        '  %a = f32[4,1024]{1,0} negate(%p), backend_config={"estimated_cycles":"7"}\n'
        "  ROOT %b = f32[4,1024]{1,0} negate(%a), "
        f'backend_config={{"estimated_cycles":"{2**63 - 1}"}}\n'
        "}\n"
    )
    schedule = read(module)
    assert simulate(schedule, CLOCK, [].__getitem__, [].__getitem__).step_s == 7 + 4 * 4 * 1024
    (note,) = schedule.notes
    assert "%b" in note and "no estimate" in note
