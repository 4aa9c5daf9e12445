"""The copy kernel on a machine without a GPU: interpreted beside its reference, and compiled as far as that goes."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.move.kernels.pieces import WARPS, copy_reference
from layercast.move.kernels.pieces_host import BLOCK, best_scribe
from layercast.plan.pieces import Pieces

pytest.importorskip("triton", reason="the kernel is Triton's")

from triton import compile as compiled_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from layercast.move.kernels.pieces_triton import copy_pieces

INTERPRETED = InterpretedFunction(copy_pieces.fn)
WORD = 16
ARGUMENTS = {**dict.fromkeys(("source", "target", "words"), "*i64"), "pieces": "i32", "chunks": "i32"}
ARGUMENTS |= {"source_shift": "i64", "target_shift": "i64", "BLOCK": "constexpr"}


def memory(nbytes, fill):
    """(array, address of its first multiple of 16)."""
    array = np.frombuffer(fill(nbytes + WORD), np.uint8).copy()
    return array, array.ctypes.data + -array.ctypes.data % WORD


@settings(deadline=None, max_examples=40)
@given(
    words=st.lists(st.integers(1, 2600), min_size=1, max_size=9),
    programs=st.integers(1, 7),
    shift=st.integers(-64, 64).map(lambda words: WORD * words),
    seed=st.integers(0, 1 << 32),
)
def test_the_kernel_copies_every_bit_that_its_reference_does_and_no_other(words, programs, shift, seed):
    draw = np.random.default_rng(seed)
    length, total = WORD * np.array(words), WORD * (sum(words) + len(words))  # a gap of a word behind each
    (_, first), (found, into), (wanted, there) = (memory(total, fill) for fill in (draw.bytes, bytes, bytes))
    ends = np.cumsum(length + WORD)
    source, order = first + ends - length - WORD, draw.permutation(len(words))
    offset = np.empty_like(length)
    offset[order] = np.cumsum((length + WORD)[order]) - (length + WORD)[order]
    copy_reference(source, there + offset, length)

    room = np.zeros(3 * (len(words) + 1), np.int64)
    pieces = Pieces.plain(source - shift, into + offset + shift, length).table
    copies, turns = best_scribe().spread(pieces, room, 0)
    columns = torch.from_numpy(room).split(copies + copies % 2)[:3]
    INTERPRETED[(programs,)](*columns, copies, turns, shift, -shift, BLOCK=BLOCK)
    assert np.array_equal(found[into - found.ctypes.data :][:total], wanted[there - wanted.ctypes.data :][:total])


def test_compiled_for_a_gpu_it_moves_sixteen_bytes_at_a_time(monkeypatch, tmp_path):
    """Half as many at a time would take twice as long; Triton knows only what it is told of addresses."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # which numbers it has none of; unset, it warns
    aligned = {(nth,): [["tt.divisibility", WORD]] for nth in range(3)}
    kernel = ASTSource(copy_pieces, ARGUMENTS, {(len(ARGUMENTS) - 1,): BLOCK}, aligned)
    made = compiled_for(kernel, GPUTarget("cuda", 90, 32), {"num_warps": WARPS}).asm["ptx"]
    moves = BLOCK * 8 // WORD // (32 * WARPS)
    assert len(re.findall(r"ld\.global\.v2\.b64", made)) == len(re.findall(r"st\.global\.v2\.b64", made)) == moves
    assert len(re.findall(r"ld\.global", made)) == moves + 3, "and a piece's place and length"
    assert len(re.findall(r"st\.global", made)) == moves
