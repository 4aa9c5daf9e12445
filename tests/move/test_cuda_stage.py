"""What the loop makes of batches that are staged: what stands behind what on a device, whatever its streams do."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LOOPS, loop_of
from test_cuda_issue import CODES, Launching

from layercast.move.cuda_program import LAUNCH_BYTES, Program
from layercast.move.cuda_rows import BELL, TALLY_BYTES
from layercast.move.cuda_stage import LEAD, SLOTS, Slots
from layercast.move.kernels.pieces import PARAMETERS
from layercast.testing.move_laws import pieces_of

COPY, LAUNCH = 50, 51
EVENTS = range(1, 1 + 2 * SLOTS)
FAR = 1 << 20
"""Bytes from one part's memory to the next one's, on paper."""


class Staging(Launching):
    """Notes long copies too, by the number of the part that they are of."""

    def _copy_batch(self, to, from_, nbytes, count, *rest):
        stream, work = super()._copy_batch(to, from_, nbytes, count, *rest)
        ((_, source, _),) = work.args[0]
        self.seen.append(("copy", source // FAR, stream))
        return stream, lambda: None


@pytest.fixture(scope="module", params=LOOPS)
def device(request):
    device = Staging()
    device.issue = loop_of(request.param)(device.calls, (0, 0))
    return device


def orders_of(seen):
    """For each copy, launch and count that was handed over, in that order: what it is, and what it stands behind."""
    behind, events, found = defaultdict(set), defaultdict(set), []
    for what, *rest in seen:
        if what == "record":
            events[rest[0]] = set(behind[rest[1]])
        elif what == "wait":
            behind[rest[0]] |= events[rest[1]]
        else:
            name, stream = (rest[9], rest[8]) if what == "launch" else rest
            found.append(((what, name), frozenset(behind[stream])))
            behind[stream].add((what, name))
    return found


@settings(deadline=None)
@given(
    up=st.booleans(),
    rows=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(0, SLOTS - 1)), min_size=1, max_size=2),
    failed=CODES,
    refused=CODES,
)
def test_a_slot_is_emptied_behind_what_fills_it_filled_behind_what_emptied_it_and_counted_behind_all_its_batch(
    device, up, rows, failed, refused
):
    slots, program, errors = Slots(FAR, FAR, COPY, LAUNCH, EVENTS), Program(), np.zeros(14, np.int64)
    errors[[*failed]] = [*failed.values()]
    tally, uses, nth = np.zeros(TALLY_BYTES // 8, np.int64), [], 0
    tally[BELL // 8] = -1
    for batches, parts, slot in rows:
        columns = program.columns(pieces_of((0, 0, 16)))
        numbers = np.arange(nth, nth + batches * parts)
        values = np.zeros((len(numbers), PARAMETERS), np.int64)
        values[:, 0] = numbers
        about = np.array([up, 77, 5, 256, 64, slots.address, 1, parts, *(columns * parts)])
        moves = np.repeat(numbers * FAR, 2).reshape(-1, 2)
        at = program.hold(values)
        program.stages(program.hold(about), moves, at, batches, slot, tally.ctypes.data, program.owner)
        uses += [(program.owner + n // parts, (slot + n) % SLOTS) for n in range(batches * parts)]
        program.owner += batches
        nth += batches * parts
    device.refused, device.failing = refused, {}
    device.seen.clear()
    device.issue.run(program.table(), np.zeros(0, np.int64), errors, 100)
    found = orders_of(device.seen)
    stands, (fills, empties) = dict(found), ("copy", "launch") if up else ("launch", "copy")
    emptied = {}
    for part, (owner, slot) in enumerate(uses):
        if (empties, part) in stands:
            assert (fills, part) in stands[empties, part]
        if (fills, part) in stands:
            assert emptied.get(slot, set()) <= stands[fills, part]
        if (empties, part) in stands:
            emptied[slot] = {(empties, part)}
        whole = not (failed.get(owner) or any(n in refused for n, (whose, _) in enumerate(uses) if whose == owner))
        if whole:
            assert {(fills, part), (empties, part)} <= {*stands}
        elif owner in failed:
            assert not {(fills, part), (empties, part)} & {*stands}
        assert bool(errors[owner]) == (not whole)
    counts = [(what, stood) for (what, stood) in found if what[0] == "count"]
    assert [number for (_, number), _ in counts] == [100 + owner for owner in range(program.owner)]
    moved = {what for what, _ in found if what[0] == empties and what[1] not in refused}
    for (_, number), stood in counts:
        assert {what for what in moved if uses[what[1]][0] <= number - 100} <= stood


@pytest.mark.parametrize("up", [True, False])
def test_from_a_device_launches_are_ahead_of_copies_and_to_it_each_follows_its_own(device, up):
    slots, program, count = Slots(FAR, FAR, COPY, LAUNCH, EVENTS), Program(), 3 * SLOTS
    values, tally = np.zeros((count, PARAMETERS), np.int64), np.zeros(TALLY_BYTES // 8, np.int64)
    values[:, 0], tally[BELL // 8] = np.arange(count), -1
    about = np.array([up, 77, 5, 256, 64, slots.address, 1, 1, *program.columns(pieces_of((0, 0, 16)))])
    moves = np.repeat(np.arange(count) * FAR, 2).reshape(-1, 2)
    program.stages(program.hold(about), moves, program.hold(values), count, 0, tally.ctypes.data, 0)
    assert values.strides[0] == LAUNCH_BYTES
    device.refused, device.failing = {}, {}
    device.seen.clear()
    device.issue.run(program.table(), np.zeros(0, np.int64), np.zeros(count, np.int64), 0)
    order = [what for what, _ in orders_of(device.seen) if what[0] != "count"]
    ahead = [order.index(("copy", nth)) - order.index(("launch", nth)) for nth in range(SLOTS, 2 * SLOTS)]
    assert ahead == [-1 if up else 2 * LEAD + 1] * SLOTS
    assert {row[9] for row in device.seen if row[0] == "launch"} == {LAUNCH}
    assert {row[2] for row in device.seen if row[0] == "count"} == {LAUNCH if up else COPY}
