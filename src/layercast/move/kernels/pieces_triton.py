"""The Triton source of `pieces`; importing it needs Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pieces", "chunks"])  # type: ignore[untyped-decorator]
def copy_pieces(source, target, words, pieces, chunks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """source, target: int64 addresses [pieces]; words: 8-byte words of each, even; chunks: turns the longest takes."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    for turn in range(program, pieces * chunks, programs):
        piece, at = turn // chunks, (turn % chunks) * BLOCK
        from_ = tl.multiple_of(tl.load(source + piece).to(tl.pointer_type(tl.int64)), 16)
        to = tl.multiple_of(tl.load(target + piece).to(tl.pointer_type(tl.int64)), 16)
        inside = at + offsets < tl.multiple_of(tl.load(words + piece), 2)
        tl.store(to + at + offsets, tl.load(from_ + at + offsets, mask=inside), mask=inside)
