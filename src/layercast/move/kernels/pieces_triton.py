"""The Triton source of `pieces`; importing it needs Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pieces", "chunks", "source_shift", "target_shift"])  # type: ignore[untyped-decorator]
def copy_pieces(  # type: ignore[no-untyped-def]  # noqa: ANN201
    source,  # noqa: ANN001
    target,  # noqa: ANN001
    words,  # noqa: ANN001
    pieces,  # noqa: ANN001
    chunks,  # noqa: ANN001
    source_shift,  # noqa: ANN001
    target_shift,  # noqa: ANN001
    BLOCK: tl.constexpr,
):
    """source, target: int64 addresses [pieces], less their shifts; words: 8-byte words of each, even.

    chunks: turns the longest takes. Addresses with their shifts are multiples of 16.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    for turn in range(program, pieces * chunks, programs):
        piece, at = turn // chunks, (turn % chunks) * BLOCK
        from_ = tl.multiple_of((tl.load(source + piece) + source_shift).to(tl.pointer_type(tl.int64)), 16)
        to = tl.multiple_of((tl.load(target + piece) + target_shift).to(tl.pointer_type(tl.int64)), 16)
        inside = at + offsets < tl.multiple_of(tl.load(words + piece), 2)
        tl.store(to + at + offsets, tl.load(from_ + at + offsets, mask=inside), mask=inside)
