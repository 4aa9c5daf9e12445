"""Other ways to move the same blocks, for the same run: what the driver offers, and kernels of other packages.

Packages are optional: one that is not installed, or does not work here, is named with the reason, never left out.
Each gets memory laid out as it wants it. Does not know how long anything takes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from layercast.bench.ground import Ground, Ints
from layercast.bench.results import Start
from layercast.move.cuda_ways import rows_of
from layercast.plan.pieces import Pieces

CHUNK = 256
"""Tokens of one of LMCache's memory objects."""


@dataclass(frozen=True)
class Rival:
    """up, down: start all layers' copies. verify: whether a round trip brings every block of a layer back."""

    up: Start
    down: Start
    verify: Callable[[], bool] | None = None

    def start(self, *, up: bool) -> Start:
        """The one of that direction."""
        return self.up if up else self.down


def rivals(ground: Ground) -> tuple[dict[str, Rival], dict[str, str]]:
    """(rivals that work here, those that do not and why)."""
    makers: Mapping[str, Callable[[Ground], dict[str, Rival]]] = {
        "one copy a block": one_a_block,
        "index_copy_": index_copy,
        "vLLM swap_blocks_batch": vllm_swap,
        "sgl-kernel transfer_kv": sgl_kernels,
        "LMCache layerwise": lmcache_layers,
    }
    found: dict[str, Rival] = {}
    absent: dict[str, str] = {}
    for name, make in makers.items():
        try:
            made = make(ground)
            wrong = [each for each, rival in made.items() if rival.verify is not None and not rival.verify()]
        except ModuleNotFoundError as error:
            absent[name] = f"not installed ({error.name})"
        except (ImportError, AttributeError, OSError, RuntimeError, TypeError, AssertionError, ValueError) as error:
            first = next(iter(str(error).splitlines()), "it does not say why")
            absent[name] = f"does not work here ({type(error).__name__}: {first[:200]})"
        else:
            found |= {each: rival for each, rival in made.items() if each not in wrong}
            absent |= dict.fromkeys(wrong, "did not bring the blocks back")
    return found, absent


def on_copying(ground: Ground, run: Callable[[], object]) -> Start:
    """`run` with the copying stream as torch's current one."""

    def start() -> Callable[[], None]:
        with torch.cuda.stream(ground.device.copying):
            run()
        return ground.device.copying.synchronize  # type: ignore[no-any-return]

    return start


def one_a_block(ground: Ground) -> dict[str, Rival]:
    """A call of the driver for every block and layer."""
    copy, stream = ground.device.driver.calls.copy, ground.device.copying

    def of(*, up: bool) -> Start:
        layers = [rows_of(pieces) for pieces in ground.step(up=up)]
        rows = [list(zip(*(c.tolist() for c in (p.target, p.source, p.length)), strict=True)) for p in layers]

        def run() -> None:
            for layer in rows:
                for to, from_, length in layer:
                    copy(to, from_, length, stream.cuda_stream)

        return on_copying(ground, run)

    return {"one copy a block": Rival(of(up=True), of(up=False))}


def index_copy(ground: Ground) -> dict[str, Rival]:
    """torch's indexed copies from and to a buffer that is copied in one piece; the host's side lies together."""
    ids = torch.from_numpy(ground.ids).cuda()
    staging = torch.empty_like(ground.pools[0][: ground.blocks])
    pinned = torch.empty(staging.shape, dtype=staging.dtype, pin_memory=True)

    def up() -> None:
        for pool in ground.pools:
            staging.copy_(pinned, non_blocking=True)
            pool.index_copy_(0, ids, staging)

    def down() -> None:
        for pool in ground.pools:
            torch.index_select(pool, 0, ids, out=staging)
            pinned.copy_(staging, non_blocking=True)

    return {"index_copy_": Rival(on_copying(ground, up), on_copying(ground, down))}


def vllm_swap(ground: Ground) -> dict[str, Rival]:
    """vLLM's batched copy of blocks, all layers in one call, between our own blocks and slots."""
    import inspect

    import vllm._custom_ops as ops
    import vllm.platforms

    assert vllm.platforms.current_platform.is_cuda()
    accepted = inspect.signature(ops.swap_blocks_batch).parameters
    options = {name: True for name in ("is_src_access_order_any",) if name in accepted}

    def of(*, up: bool) -> Start:
        rows = rows_of(Pieces.join([*ground.step(up=up)]))
        source, target, length = (torch.from_numpy(column) for column in (rows.source, rows.target, rows.length))
        return on_copying(ground, lambda: ops.swap_blocks_batch(source, target, length, **options))

    def verify() -> bool:
        ground.blank()
        of(up=True)()()
        return ground.arrived()

    return {"vLLM swap_blocks_batch": Rival(of(up=True), of(up=False), verify)}


def sgl_kernels(ground: Ground) -> dict[str, Rival]:
    """sgl-kernel's zero-copy kernels between token-major pools of K and of V."""
    from sgl_kernel import kvcacheio

    shape, layers = ground.shape, range(ground.shape.layers)
    tokens, item = ground.blocks * shape.block, shape.kv_heads * shape.width * 2
    pool_tokens = len(ground.pools[0]) * shape.block
    size = (shape.kv_heads, shape.width)
    device = [torch.randn(pool_tokens, *size, device="cuda").to(torch.bfloat16) for _ in range(2 * shape.layers)]
    host = [torch.empty(tokens, *size, dtype=torch.bfloat16, pin_memory=True) for _ in range(2 * shape.layers)]
    at, of = (_token_slots(blocks, shape.block) for blocks in (ground.ids, ground.slots))

    def each(*, up: bool) -> Start:
        a, b, from_, to = (host, device, of, at) if up else (device, host, at, of)

        def run() -> None:
            for n in layers:
                kvcacheio.transfer_kv_per_layer(a[2 * n], b[2 * n], a[2 * n + 1], b[2 * n + 1], from_, to, item)

        return on_copying(ground, run)

    def every(*, up: bool) -> Start:
        a, b, from_, to = (host, device, of, at) if up else (device, host, at, of)
        k_from, k_to, v_from, v_to = (_pointers(t) for t in (a[0::2], b[0::2], a[1::2], b[1::2]))
        call = kvcacheio.transfer_kv_all_layer
        return on_copying(ground, lambda: call(k_from, k_to, v_from, v_to, from_, to, item, shape.layers))

    def rival(make: Callable[..., Start]) -> Rival:
        made = Rival(make(up=True), make(up=False), lambda: _comes_back(device[3], at, made))
        return made

    return {"sgl-kernel transfer_kv_per_layer": rival(each), "sgl-kernel transfer_kv_all_layer": rival(every)}


def lmcache_layers(ground: Ground) -> dict[str, Rival]:
    """LMCache's layer-by-layer connector: chunks in pinned memory, a buffer on the device, its own kernels."""
    import types

    import lmcache.c_ops
    from lmcache.v1.gpu_connector.gpu_connectors import VLLMPagedMemLayerwiseGPUConnector
    from lmcache.v1.memory_allocators.pin_memory_allocator import PinMemoryAllocator
    from lmcache.v1.memory_management import MemoryFormat

    kind = type(lmcache.c_ops.single_layer_kv_transfer)
    assert kind is types.BuiltinFunctionType, "its kernels are missing, and its Python fallback is no fair rival"
    shape, hidden = ground.shape, ground.shape.kv_heads * ground.shape.width
    tokens, layers = ground.blocks * shape.block, ground.shape.layers
    size = (len(ground.pools[0]), 2, shape.block, shape.kv_heads, shape.width)
    pools = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    allocator = PinMemoryAllocator(ground.nbytes + (64 << 20))
    starts = list(range(0, tokens, CHUNK))
    ends = [start + CHUNK for start in starts]
    chunk = (torch.Size([CHUNK, 2, hidden]), torch.bfloat16, MemoryFormat.KV_T2D)
    objects = [[allocator.allocate(*chunk) for _ in starts] for _ in range(layers)]
    connector = VLLMPagedMemLayerwiseGPUConnector(
        hidden,
        layers,
        use_gpu=True,
        chunk_size=CHUNK,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        layout_hints={"kv_layout": "NHD"},
    )
    options: dict[str, Any] = {
        "kvcaches": pools,
        "slot_mapping": _token_slots(ground.ids, shape.block),
        "sync": True,
    }

    def down() -> None:
        for _ in connector.batched_from_gpu(objects, starts, ends, **options):
            pass

    def up() -> None:
        steps = connector.batched_to_gpu(starts, ends, **options)
        next(steps)
        for layer in range(layers):
            steps.send(objects[layer])
        for _ in steps:
            pass

    def start(run: Callable[[], None]) -> Start:
        begin = on_copying(ground, run)

        def started() -> Callable[[], None]:
            begin()
            return torch.cuda.synchronize  # type: ignore[no-any-return]  # it has streams of its own

        return started

    ids = torch.from_numpy(ground.ids).cuda()
    rival = Rival(start(up), start(down), lambda: _comes_back(pools[3], ids, rival))
    return {"LMCache layerwise": rival}


def _comes_back(pool: torch.Tensor, rows: torch.Tensor, rival: Rival) -> bool:
    """Whether these rows of a pool are what they were once they have gone to the host and come back."""
    kept = pool.clone()
    torch.cuda.synchronize()
    rival.down()()
    pool.zero_()
    torch.cuda.synchronize()
    rival.up()()
    return bool(torch.equal(pool[rows], kept[rows]))


def _token_slots(blocks: Ints, block: int) -> torch.Tensor:
    """Each token's place in a pool of tokens, int64 on the device."""
    return torch.from_numpy((blocks[:, None] * block + np.arange(block)).reshape(-1)).cuda()


def _pointers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64, device="cuda")
