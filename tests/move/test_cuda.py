"""The laws on a real device. Without one, everything here is skipped."""

import ctypes
import threading

import numpy as np
import pytest
from loops import interpreter_kept, loop_of, spun

from layercast.errors import DeviceFailed
from layercast.move.base import Waits
from layercast.move.costs import Way, only
from layercast.move.cuda_driver import DEVICE, HOST, PAGEABLE
from layercast.move.cuda_issue import best_issue, compiled_issue, plain_issue
from layercast.plan.pieces import Pieces
from layercast.testing.gate_laws import GateLaws
from layercast.testing.move_laws import SOON_S, MoverLaws, pieces_of

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from layercast.move.cuda import CudaMover  # noqa: E402
from layercast.move.cuda_driver import Driver  # noqa: E402
from layercast.move.cuda_gates import CudaGate, FlagGate  # noqa: E402
from layercast.move.cuda_pin import Pinning  # noqa: E402
from layercast.move.kernels.pieces import compiled, copy_reference  # noqa: E402

COSTS = {way.value: only(way) for way in Way}


@pytest.fixture(scope="session")
def driver():
    torch.zeros(1, device="cuda")
    return Driver(0)


@pytest.fixture(scope="session")
def kernel(driver):
    return compiled(0)


class CudaMemory:
    def __init__(self, driver, kinds):
        self.driver, self.kinds, self.made, self.blocks = driver, kinds, 0, []

    def alloc(self, nbytes):
        kind = self.kinds[self.made % len(self.kinds)]
        self.made += 1
        if kind == DEVICE:
            block = torch.zeros(nbytes + 256, dtype=torch.uint8, device="cuda")
        else:
            block = torch.zeros(nbytes + 256, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize()
        self.blocks.append(block)
        return -(-block.data_ptr() // 256) * 256

    def read(self, address, nbytes):
        data = ctypes.create_string_buffer(max(nbytes, 1))
        self._move(ctypes.addressof(data), address, nbytes)
        return data.raw[:nbytes]

    def write(self, address, data):
        copy = ctypes.create_string_buffer(data, max(len(data), 1))
        self._move(address, ctypes.addressof(copy), len(data))

    def _move(self, to, from_, nbytes):
        if nbytes:
            self.driver.bind()
            self.driver.check("a test's copy", self.driver._lib.cuMemcpy(*map(ctypes.c_uint64, (to, from_, nbytes))))


class OnDevice(MoverLaws):
    costs = {}
    kinds = (DEVICE,)
    make_issue = staticmethod(plain_issue)

    @pytest.fixture(autouse=True)
    def _device(self, driver, kernel):
        self.driver, self.kernel = driver, kernel

    def make_mover(self):
        issue = type(self).make_issue(self.driver.calls, self.driver.batch_attributes)
        mover = CudaMover(self.driver, self.kernel, issue)
        mover.prefer(self.costs)
        return mover

    @pytest.fixture
    def memory(self, driver):
        return CudaMemory(driver, self.kinds)

    def slow_write(self, mover, memory, address, data):
        """A slow kernel on the current stream writes a part, sleeps, writes the next."""
        block = next(b for b in memory.blocks if 0 <= address - b.data_ptr() <= 512)
        first = address - block.data_ptr()
        fresh = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        step = len(data) // 4
        torch.cuda._sleep(20_000)
        for at in range(0, len(data), step):
            block[first + at : first + at + step].copy_(fresh[at : at + step], non_blocking=True)
            torch.cuda._sleep(20_000)
        return mover.mark()


class TestEngine(OnDevice):
    costs = COSTS["engine"]


class TestKernel(OnDevice):
    costs = COSTS["kernel"]


class TestCompiledLoop(OnDevice):
    costs = COSTS["engine"]
    make_issue = staticmethod(compiled_issue)


class TestCudaGate(GateLaws):
    @pytest.fixture(autouse=True)
    def _device(self, driver):
        self.driver = driver

    def make_gate(self):
        return CudaGate(self.driver)


class TestFlagGate(GateLaws):
    @pytest.fixture(autouse=True)
    def _device(self, driver):
        self.driver = driver

    def make_gate(self):
        return FlagGate(self.driver, 8)

    def holds(self, gate, layer):
        """Whether a stream that waits for the flag is held."""
        stream = torch.cuda.Stream()
        gate.capture_wait(layer, stream.cuda_stream)
        after = torch.cuda.Event()
        after.record(stream)
        threading.Event().wait(0.02)
        held = not after.query()
        if held:  # let it go, then close the flag again as it was
            gate._flags[layer] = 1
            stream.synchronize()
            gate._flags[layer] = 0
        return held


@pytest.fixture
def mover(driver, kernel):
    mover = CudaMover(driver, kernel)
    yield mover
    mover.close(SOON_S)


@pytest.mark.parametrize("way", COSTS)
@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST), (DEVICE,), (HOST,)])
@pytest.mark.parametrize("size", [48, 4096, 16400, 40960])
def test_a_step_of_scattered_blocks_is_bit_equal_whichever_way(driver, mover, way, kinds, size):
    mover.prefer(COSTS[way])
    memory, choose = CudaMemory(driver, kinds), np.random.default_rng(size)
    lists, wanted = [], []
    for blocks in (200, 0, 77, 300):
        source, target = memory.alloc(size * 400), memory.alloc(size * 400)
        data = choose.bytes(size * 400)
        memory.write(source, data)
        from_, to = choose.permutation(400)[:blocks], choose.permutation(400)[:blocks]
        lists.append(
            pieces_of(*((source + size * int(a), target + size * int(b), size) for a, b in zip(from_, to, strict=True)))
        )
        expected, held = np.zeros(size * 400 + 16, np.uint8), np.frombuffer(data + bytes(16), np.uint8)
        at, held_at = -expected.ctypes.data % 16, np.zeros(size * 400 + 16, np.uint8)
        skip = -held_at.ctypes.data % 16
        held_at[skip : skip + len(data)] = held[: len(data)]
        copy_reference(
            held_at.ctypes.data + skip + size * from_, expected.ctypes.data + at + size * to, np.full(blocks, size)
        )
        wanted.append((target, expected[at : at + size * 400].tobytes()))
    for flight, (target, expected) in zip(mover.submit_all(lists), wanted, strict=True):
        flight.wait(SOON_S)
        assert memory.read(target, size * 400) == expected


@pytest.mark.parametrize("way", COSTS)
def test_a_thousand_rounds_with_a_slow_reader_tear_nothing(driver, mover, way):
    """A kernel reads blocks slowly on one stream; a load behind its mark must not change what it read."""
    mover.prefer(COSTS[way])
    size, blocks = 16384, 8
    pool = torch.zeros(blocks * size // 4, dtype=torch.int32, device="cuda")
    host = torch.zeros(blocks * size // 4, dtype=torch.int32, pin_memory=True)
    order = np.random.default_rng(0).permutation(blocks)
    pieces = pieces_of(
        *((host.data_ptr() + size * i, pool.data_ptr() + size * int(b), size) for i, b in enumerate(order))
    )
    read = torch.zeros_like(pool)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for round_ in range(1, 1001):
        host.fill_(round_)
        with torch.cuda.stream(stream):
            for part in range(4):
                torch.cuda._sleep(10_000)
                chosen = slice(part * len(pool) // 4, (part + 1) * len(pool) // 4)
                read[chosen].copy_(pool[chosen])
            mark = mover.mark()
        mover.submit(pieces, after=[mark]).wait(SOON_S)
        stream.synchronize()
        assert bool((read == round_ - 1).all()), f"torn in round {round_}"
    assert bool((pool == 1000).all())


@pytest.mark.parametrize("way", COSTS)
def test_a_thousand_rounds_of_saving_behind_a_slow_writer_tear_nothing(driver, mover, way):
    mover.prefer(COSTS[way])
    size, blocks = 16384, 8
    pool = torch.zeros(blocks * size // 4, dtype=torch.int32, device="cuda")
    host = torch.zeros(blocks * size // 4, dtype=torch.int32, pin_memory=True)
    order = np.random.default_rng(0).permutation(blocks)
    pieces = pieces_of(
        *((pool.data_ptr() + size * int(b), host.data_ptr() + size * i, size) for i, b in enumerate(order))
    )
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for round_ in range(1, 1001):
        with torch.cuda.stream(stream):
            for part in range(4):
                torch.cuda._sleep(10_000)
                pool[part * len(pool) // 4 : (part + 1) * len(pool) // 4].fill_(round_)
            mark = mover.mark()
        mover.submit(pieces, after=[mark]).wait(SOON_S)
        assert bool((host == round_).all()), f"torn in round {round_}"


def test_a_stream_behind_a_gate_runs_after_the_copy(driver, mover):
    nbytes = 256 << 20
    host = torch.full((nbytes,), 7, dtype=torch.uint8, pin_memory=True)
    pool = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    gate = CudaGate(driver)
    gate.arm({0: 1})
    gate.open(0, mover.submit(pieces_of((host.data_ptr(), pool.data_ptr(), nbytes))))
    gate.wait(0, SOON_S)
    assert int(pool.min()) == 7


def test_a_captured_forward_waits_for_its_flag(driver, mover):
    gate = FlagGate(driver, 1)
    host = torch.full((1 << 20,), 5, dtype=torch.int32, pin_memory=True)
    pool, out = torch.zeros(1 << 20, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        out.copy_(pool.sum())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        gate.capture_wait(0, torch.cuda.current_stream().cuda_stream)
        out.copy_(pool.sum())
    for value in (5, 6, 7):
        host.fill_(value)
        gate.arm({0: 1})
        with torch.cuda.stream(stream):
            graph.replay()
            held = torch.cuda.Event()
            held.record(stream)
        assert not held.query()
        (flight,) = mover.submit_all([pieces_of((host.data_ptr(), pool.data_ptr(), 4 << 20))], flags=[gate.flag(0)])
        gate.open(0, flight)
        stream.synchronize()
        assert int(out) == value << 20
        flight.wait(SOON_S)
        gate.wait(0, SOON_S)
    gate.close()


def test_memory_is_usable_before_during_and_after_pinning(driver, mover):
    nbytes = 64 << 20
    block = np.random.default_rng(0).integers(-(2**63), 2**63, (nbytes + 4096) // 8, np.int64)
    at = -(-block.ctypes.data // 4096) * 4096
    pool = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    whole = pieces_of((at, pool.data_ptr(), nbytes))

    def check():
        pool.zero_()
        torch.cuda.synchronize()
        mover.submit(whole).wait(SOON_S)
        got = pool.cpu().numpy()
        assert np.array_equal(got, np.frombuffer(ctypes.string_at(at, nbytes), np.uint8))

    assert driver.kind_of(at) == PAGEABLE
    check()
    pinning = Pinning(driver, at, nbytes, slice_bytes=4 << 20)
    mover.cut_at(pinning.cuts)
    check()
    pinning.wait(SOON_S)
    assert not pinning.refusal
    check()  # one copy over sixteen separately pinned slices
    rows = pieces_of(*((at + (i << 20) - 4096, pool.data_ptr() + (i << 20) - 4096, 8192) for i in range(1, 64)))
    mover.submit(rows).wait(SOON_S)
    pinning.close(SOON_S)
    assert driver.kind_of(at) == PAGEABLE


def test_staging_that_cannot_be_had_is_done_without(driver, kernel):
    mover = CudaMover(driver, kernel, staging_bytes=1 << 45)
    mover.prefer(COSTS["staged"])
    host = torch.full((1 << 16,), 9, dtype=torch.uint8, pin_memory=True)
    pool = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    rows = pieces_of(*((host.data_ptr() + i * 4096, pool.data_ptr() + i * 4096, 2048) for i in range(16)))
    mover.submit(rows).wait(SOON_S)
    assert int(pool.sum()) == 9 * 2048 * 16
    mover.close(SOON_S)


def test_what_is_submitted_moves_though_the_interpreter_is_never_let_go(driver):
    """The thread that submits spins, and no other gets the interpreter, until the last byte is in place."""
    mover = CudaMover(driver, None, loop_of("compiled")(driver.calls, driver.batch_attributes))
    pool = torch.zeros(64 << 14, dtype=torch.uint8, device="cuda")
    host = torch.zeros(64 << 14, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    rows = pieces_of(*((pool.data_ptr() + (i << 14), host.data_ptr() + ((63 - i) << 14), 1 << 14) for i in range(64)))
    last = ctypes.c_uint8.from_address(host.data_ptr() + (1 << 14) - 1)
    mover.submit(rows).wait(SOON_S)
    for value in range(1, 20):
        pool.fill_(value)
        torch.cuda.synchronize()
        threading.Event().wait(0.02)  # the thread that issues goes to sleep
        with interpreter_kept(SOON_S):
            flight = mover.submit(rows)
            moved = spun(last, value, SOON_S)
        assert moved
        flight.wait(SOON_S)
        assert bool((host == value).all())
    mover.close(SOON_S)


def test_a_forward_of_more_launches_than_a_device_queues_gets_its_load(driver):
    """A thread whose launches wait in a full queue keeps the driver to itself: no copy can be handed over meanwhile."""
    layers, count, size = 6, 20000, 512
    mover, gate = CudaMover(driver, None, best_issue(driver.calls, driver.batch_attributes)), CudaGate(driver)
    pool = torch.zeros(layers, count, size, dtype=torch.uint8, device="cuda")
    host = torch.randint(0, 256, pool.shape, dtype=torch.uint8).pin_memory()
    one, steps = torch.zeros(64, device="cuda"), np.arange(count, dtype=np.int64) * size
    shuffled, sizes = np.random.default_rng(1).permutation(steps), np.full(count, size, np.int64)
    torch.cuda.synchronize()
    at = [(host[layer].data_ptr(), pool[layer].data_ptr()) for layer in range(layers)]
    gate.arm(dict.fromkeys(range(layers), 1))
    flights = mover.submit_all([Pieces.plain(from_ + shuffled, to + shuffled, sizes) for from_, to in at])
    gate.open_all(enumerate(flights))
    seen: list[torch.Tensor] = []

    def forward():
        with torch.cuda.stream(torch.cuda.Stream()):
            for layer in range(layers):
                gate.wait(layer, SOON_S)
                seen.append(pool[layer].clone())
                for _ in range(2000):
                    one.add_(1)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert torch.equal(torch.stack(seen).cpu(), host)
    mover.close(SOON_S)


@pytest.mark.parametrize("way", COSTS)
@pytest.mark.parametrize("held", range(3))
def test_a_lane_that_waits_holds_up_no_other(driver, mover, way, held):
    """Nor do its streams share a hardware queue with theirs: a save waits for its layer, and the next load must not."""
    mover.prefer(COSTS[way])
    pools = torch.zeros(3, 1 << 20, dtype=torch.uint8, device="cuda")
    hosts = torch.zeros(3, 1 << 20, dtype=torch.uint8, pin_memory=True)
    word, stream = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.cuda.Stream()
    torch.cuda.synchronize()

    def submit(nth, after=()):
        """A load, a save, or a load in the background."""
        from_, to = (pools, hosts) if nth == 1 else (hosts, pools)
        at, there = from_[nth].data_ptr(), to[nth].data_ptr()
        some = pieces_of(*((at + n, there + (n ^ 65536), 65536) for n in range(0, 1 << 20, 65536)))
        return mover.submit_all([some], after=[after], waits=Waits.NOBODY if nth == 2 else Waits.BUSY)[0]

    for nth in range(3):
        submit(nth).wait(SOON_S)
    driver.stream_waits_for_value(stream.cuda_stream, word.data_ptr(), 1)
    with torch.cuda.stream(stream):
        late = submit(held, [mover.mark()])
    try:
        for nth in {0, 1, 2} - {held}:
            submit(nth).wait(SOON_S)
        assert not late.done
    finally:
        word[0] = 1
    late.wait(SOON_S)


def test_an_address_the_device_refuses_fails_that_copy_alone(driver, mover):
    pool = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    host = torch.full((1 << 16,), 9, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    wrong = mover.submit(pieces_of((host.data_ptr(), pool.data_ptr(), 1 << 40)))
    right = mover.submit(pieces_of((host.data_ptr(), pool.data_ptr(), 1 << 16)))
    with pytest.raises(DeviceFailed):
        wrong.wait(SOON_S)
    right.wait(SOON_S)
    assert int(pool.min()) == 9


@pytest.mark.parametrize("way", ["engine", "kernel"])
@pytest.mark.parametrize("size", [48, 16400])
@pytest.mark.parametrize("pull", [False, True])
def test_scattered_blocks_of_two_devices_are_bit_equal(driver, mover, way, size, pull):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device here")
    driver.reach(1)
    mover.prefer(COSTS[way])
    ours, theirs = (torch.randint(0, 256, (400, size), dtype=torch.uint8, device=f"cuda:{n}") for n in (0, 1))
    for device in (0, 1):
        torch.cuda.synchronize(device)
    source, target = (theirs, ours) if pull else (ours, theirs)
    choose = np.random.default_rng(size)
    from_, to = choose.permutation(400)[:300], choose.permutation(400)[:300]
    wanted = target.cpu()
    wanted[to] = source.cpu()[from_]
    rows = [
        (source.data_ptr() + size * int(a), target.data_ptr() + size * int(b), size)
        for a, b in zip(from_, to, strict=True)
    ]
    mover.submit(pieces_of(*rows)).wait(SOON_S)
    assert torch.equal(target.cpu(), wanted)
