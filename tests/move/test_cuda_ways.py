import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layercast.move.costs import Costs, Way
from layercast.move.cuda_ways import rows_of, stretches, surely_engine, way_of
from layercast.move.kernels.pieces_host import plain_scribe
from layercast.testing.move_laws import pieces_of

COSTS = Costs(gbps=50.0, piece_us=1.0, row_us=0.3, kernel_gbps=15.0)
KIB = 1024
UNMOVED = np.zeros((1, 2), np.int64)
SCRIBE = plain_scribe()


def scattered(blocks, size, *, host_run):
    """Source blocks in stretches of `host_run`, target blocks apart."""
    return pieces_of(*((2**30 + (i + i // host_run) * size, 2**40 + 3 * i * size, size) for i in range(blocks)))


def choice(pieces, **available):
    fits = {"runs": SCRIBE.runs(pieces.table, True), "kernel": SCRIBE.look(pieces.table, UNMOVED)[-1]}
    return way_of(pieces.size, COSTS, **{**fits, **available})


def test_large_pieces_go_by_the_copy_engine():
    assert choice(scattered(512, 512 * KIB, host_run=1)) is Way.ENGINE
    assert choice(scattered(512, 512 * KIB, host_run=512)) is Way.ENGINE
    assert choice(scattered(512, 64 * KIB, host_run=1)) is Way.ENGINE


def test_few_pieces_go_by_the_copy_engine_and_many_of_a_common_model_are_staged():
    assert choice(scattered(32, 64 * KIB, host_run=32)) is Way.ENGINE
    assert choice(scattered(128, 64 * KIB, host_run=128)) is Way.STAGED
    assert choice(scattered(1875, 64 * KIB, host_run=1875)) is Way.STAGED


def test_what_a_forward_waits_idly_for_goes_by_the_copy_engine_where_that_fills_the_link():
    assert choice(scattered(128, 64 * KIB, host_run=128), idle=True) is Way.ENGINE
    assert choice(scattered(1875, 64 * KIB, host_run=1875), idle=True) is Way.ENGINE
    assert choice(scattered(1024, 32 * KIB, host_run=1024), idle=True) is Way.STAGED


def test_to_a_forward_that_waits_idly_long_copies_cost_no_more_than_their_time_either():
    size = 1024 * 32 * KIB, 1024
    assert way_of(size, COSTS, kernel=True, runs=820, idle=True) is Way.STAGED
    assert way_of(size, COSTS, kernel=True, runs=1000, idle=True) is Way.ENGINE


def test_small_pieces_whose_host_side_is_long_are_staged():
    assert choice(scattered(1024, 32 * KIB, host_run=64)) is Way.STAGED
    assert choice(scattered(4096, 4 * KIB, host_run=64)) is Way.STAGED


def test_small_pieces_apart_on_both_sides_go_by_the_kernel():
    assert choice(scattered(4096, 4 * KIB, host_run=1)) is Way.KERNEL


def test_what_is_missing_or_cannot_take_the_pieces_is_never_chosen():
    pieces = scattered(1024, 32 * KIB, host_run=64)
    assert choice(pieces, runs=0) is not Way.STAGED
    assert choice(pieces, kernel=False) is Way.ENGINE
    assert choice(scattered(1024, 24 * KIB + 8, host_run=64)) is Way.ENGINE
    assert choice(pieces_of((0, 1 << 30, 16))) is Way.ENGINE


@given(
    blocks=st.integers(0, 600),
    words=st.integers(1, 1 << 13),
    host_run=st.integers(1, 64),
    figures=st.tuples(*[st.floats(0.01, 100.0)] * 4),
    up=st.booleans(),
    staging=st.booleans(),
    idle=st.booleans(),
)
def test_what_surely_goes_by_the_engine_does_wherever_it_lies(blocks, words, host_run, figures, up, staging, idle):
    costs, size = Costs(*figures), 16 * words
    pieces = scattered(blocks, size, host_run=host_run)
    if surely_engine(pieces.size, costs, idle=idle):
        runs = SCRIBE.runs(pieces.table, up) if staging else 0
        assert way_of(pieces.size, costs, kernel=True, runs=runs, idle=idle) is Way.ENGINE


def test_blocks_that_lie_together_surely_go_by_the_engine():
    rows = ((2**30 + 2 * i * 1024 * KIB, 2**40 + 3 * i * 1024 * KIB, 1024 * KIB) for i in range(32))
    assert surely_engine(pieces_of(*rows).size, COSTS)


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 3), st.integers(-50, 50), st.integers(-50, 50)), max_size=9
    )
)
def test_rows_are_the_copies_of_all_pieces_in_order(pieces):
    wanted = [
        (1000 + nth * down, 5000 + nth * up, length)
        for length, count, down, up in pieces
        if length
        for nth in range(count)
    ]
    pieces = pieces_of(*((1000, 5000, *piece) for piece in pieces))
    rows = rows_of(pieces)
    assert list(zip(*(column.tolist() for column in (rows.source, rows.target, rows.length)), strict=True)) == wanted


def test_stretches_are_numbered_in_order_of_address():
    order, stretch = stretches(np.array([40, 0, 10, 60, 50]), np.array([10, 10, 10, 5, 10]))
    assert order.tolist() == [1, 2, 0, 4, 3]
    assert stretch.tolist() == [0, 0, 1, 1, 1]
