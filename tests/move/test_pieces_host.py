"""What the host writes for the kernel: by numpy and compiled, the same numbers."""

import sys
from types import FunctionType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.move.kernels.pieces_host import BLOCK, PARAMETERS, best_scribe, compiled_scribe, plain_scribe
from layercast.testing.move_laws import pieces_of

UNTOUCHED, FAR = -7, 1 << 44


@pytest.fixture(scope="module", params=["plain", "compiled"])
def scribe(request):
    if request.param == "compiled":
        pytest.importorskip("numba", reason="numba is not installed, so there is no compiled scribe to test")
        return compiled_scribe()
    return plain_scribe()


def nearly(number):
    """Mostly multiples of 16, as pieces that a kernel can move have nothing else."""
    return st.one_of(number.map(lambda n: 16 * n), number.map(lambda n: 16 * n), number)


ADDRESSES, STRIDES = nearly(st.integers(0, 1 << 40)), nearly(st.integers(-(1 << 20), 1 << 20))
LENGTHS = st.one_of(st.just(0), nearly(st.integers(0, 1 << 18)))
PIECES = st.lists(st.tuples(ADDRESSES, ADDRESSES, LENGTHS, st.integers(0, 5), STRIDES, STRIDES), max_size=12)
PLAIN = st.lists(st.tuples(ADDRESSES, ADDRESSES, nearly(st.integers(1, 1 << 18))), max_size=12)
SHIFTS = st.lists(st.tuples(STRIDES, STRIDES), min_size=1, max_size=7).map(lambda rows: np.array(rows, np.int64))


def laid_out_as(layout, table):
    """The same numbers as another array: as they are, one that may not be written, every second column, or turned."""
    if layout == "kept":
        table.flags.writeable = False
    elif layout == "apart":
        table = np.repeat(table, 2, axis=1)[:, ::2]
    elif layout == "turned":
        table = np.asfortranarray(table)
    return table


TABLES = st.builds(
    laid_out_as,
    st.sampled_from(["made", "kept", "apart", "turned"]),
    st.one_of(PIECES, PLAIN).map(lambda pieces: pieces_of(*pieces).table.copy()),
)


def copies_in(table):
    """[(from, to, bytes)], in order, none of them empty."""
    return [
        (from_ + nth * down, to + nth * up, nbytes)
        for from_, to, nbytes, count, down, up in table.T.tolist()
        for nth in range(count)
        if nbytes > 0
    ]


@given(table=TABLES, shifts=SHIFTS)
def test_a_look_tells_bytes_copies_and_the_longest_and_whether_an_address_a_stride_a_length_or_a_shift_is_askew(
    scribe, table, shifts
):
    askew = np.any(table[[0, 1, 2, 4, 5]] % 16) or np.any(shifts % 16)
    nbytes = sum(length for _, _, length in copies_in(table))
    longest = max(table[2].tolist(), default=0)
    assert scribe.look(table, shifts) == (nbytes, sum(table[3].tolist()), longest, not askew)


@given(table=TABLES, before=st.integers(0, 9), behind=st.integers(-9, 9))
def test_a_table_has_every_copy_in_its_column_and_nothing_is_written_outside_its_room(scribe, table, before, behind):
    copies = copies_in(table)
    columns = len(copies) + len(copies) % 2
    room = np.full(max(0, before + 3 * columns + behind), UNTOUCHED, np.int64)
    found = scribe.spread(table, room, before)
    ends = room[:before].tolist(), room[before + 3 * columns :].tolist()
    assert {*ends[0], *ends[1]} <= {UNTOUCHED}
    if len(room) < before + 3 * columns or any(number % 16 for copy in copies for number in copy):
        assert found == (-1, 0)
        return
    words = [nbytes // 8 for _, _, nbytes in copies]
    assert found == (len(copies), -(-max(words, default=0) // BLOCK))
    pad = [0] * (columns - len(copies))
    rows = [from_ for from_, _, _ in copies], [to for _, to, _ in copies], words
    assert room[before : before + 3 * columns].tolist() == [number for row in rows for number in [*row, *pad]]


def stretches_in(copies):
    """[(address, bytes)] of unbroken memory, of (address, bytes) in order of address."""
    found = []
    for at, nbytes in copies:
        if found and sum(found[-1]) == at:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        else:
            found.append((at, nbytes))
    return found


@given(table=TABLES, up=st.booleans())
def test_runs_are_the_stretches_of_host_memory_whatever_the_order_of_pieces(scribe, table, up):
    hosts = sorted((copy[0] if up else copy[1], copy[2]) for copy in copies_in(table))
    assert scribe.runs(table, up) == plain_scribe().runs(table, up)
    if len({at for at, _ in hosts}) == len(hosts):
        assert scribe.runs(table, up) == len(stretches_in(hosts))


@given(table=TABLES, up=st.booleans(), slot=st.integers(1, 1 << 19), before=st.integers(0, 9), room=st.integers(0, 240))
def test_parts_of_pieces_bring_each_copy_by_way_of_a_slot_that_none_outgrows(scribe, table, up, slot, before, room):
    copies, made = copies_in(table), np.full(before + room, UNTOUCHED, np.int64)
    longs, parts, end = scribe.cut(table, up, slot, made, before, FAR)
    same = np.full(before + room, UNTOUCHED, np.int64)
    other_longs, other_parts, other_end = plain_scribe().cut(table, up, slot, same, before, FAR)
    parts[:, 0] -= longs.ctypes.data
    other_parts[:, 0] -= other_longs.ctypes.data
    assert (longs.tolist(), parts.tolist(), end) == (other_longs.tolist(), other_parts.tolist(), other_end)
    if end < 0:
        askew = any(number % 16 for copy in copies for number in copy)
        assert askew or max(copy[2] for copy in copies) > slot or 3 * (len(copies) + 2 * len(copies)) > room
        return
    assert made.tolist() == same.tolist()
    assert (made[:before] == UNTOUCHED).all()
    found, at = [], before
    for first, count, table_at, columns, pieces, turns in parts.tolist():
        long = longs[first // 8 :][: 6 * count].reshape(6, count)
        assert (long[3:].T == (1, 0, 0)).all()
        hosts, slots, sizes = (long[0], long[1], long[2]) if up else (long[1], long[0], long[2])
        assert (table_at, columns) == (FAR + 8 * at, pieces + pieces % 2)
        assert 0 < sizes.sum() <= slot
        ends = [*zip(hosts.tolist(), sizes.tolist(), strict=True)]
        assert slots.tolist() == [0, *np.cumsum(sizes).tolist()][:-1]
        rows = made[at : at + 3 * columns].reshape(3, columns)[:, :pieces].tolist()
        ours = [
            (from_, to, 8 * words) if up else (to, from_, 8 * words) for from_, to, words in zip(*rows, strict=True)
        ]
        assert turns == -(-max(nbytes for _, _, nbytes in ours) // (8 * BLOCK))
        for in_slot, other, nbytes in ours:
            nth = int(np.searchsorted(slots, in_slot, side="right")) - 1
            host = int(hosts[nth]) + in_slot - int(slots[nth])
            assert in_slot + nbytes <= slots[nth] + sizes[nth]
            found.append((host, other, nbytes) if up else (other, host, nbytes))
        host_side = [(copy[0] if up else copy[1], copy[2]) for copy in found[-pieces:]]
        assert stretches_in(host_side) == ends
        at += 3 * columns
    assert at == end
    assert (made[at:] == UNTOUCHED).all()
    assert sorted(found) == sorted(copies)


@given(
    shifts=SHIFTS,
    tables=st.lists(
        st.tuples(ADDRESSES, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3
    ),
)
def test_launches_are_given_their_tables_in_turn_and_each_its_shifts(scribe, shifts, tables):
    made = np.full((len(shifts), PARAMETERS), UNTOUCHED, np.int64)
    found = scribe.launch(made, np.array(tables), shifts)
    taken = [tables[nth % len(tables)] for nth in range(len(made))]
    askew = np.any(shifts % 16) or any(at % 16 or columns % 2 for at, columns, *_ in taken)
    assert found == (0 if askew else made.ctypes.data)
    assert made.tolist() == [
        [at, at + 8 * columns, at + 16 * columns, pieces, chunks, *shift, 0, 0]
        for (at, columns, pieces, chunks), shift in zip(taken, shifts.tolist(), strict=True)
    ]


@given(
    shifts=SHIFTS,
    up=st.booleans(),
    each=st.integers(1, 3),
    first=st.integers(0, 20),
    base=ADDRESSES,
    nbytes=st.integers(1, 1 << 20),
    count=st.integers(1, 9),
)
def test_the_parts_of_each_batch_go_by_slots_in_turn_and_meet_there(
    scribe, shifts, up, each, first, base, nbytes, count
):
    halves = np.full((2, len(shifts) * each, 2), UNTOUCHED, np.int64)
    scribe.by_slots(halves, shifts, up, first, (base, nbytes, count))
    for turn, (long, launch) in enumerate(zip(*halves.tolist(), strict=True)):
        source, target = shifts[turn // each].tolist()
        place = base + (first + turn) % count * nbytes
        into, out_of = (long, launch) if up else (launch, long)
        assert (into, out_of) == ([source, place], [place, target])


def test_a_kernel_may_copy_nothing_at_all(scribe):
    assert scribe.look(pieces_of().table, np.zeros((1, 2), np.int64)) == (0, 0, 0, True)
    assert scribe.spread(pieces_of().table, np.zeros(0, np.int64), 0) == (0, 0)
    assert scribe.runs(pieces_of((0, 0, 0)).table, True) == 0
    long, parts, end = scribe.cut(pieces_of().table, True, 16, np.zeros(0, np.int64), 0, FAR)
    assert (len(long), len(parts), end) == (0, 0, 0)


def test_where_numba_is_not_installed_numpy_writes(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled_scribe.cache_clear()
    assert all(isinstance(call, FunctionType) for call in best_scribe())
