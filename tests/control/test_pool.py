"""The embedded pool over real memory: every loaded byte is the saved one, or the load fails."""

import numpy as np
import pytest
from pool_driver import BLOCK, BLOCKS, LAYERS, TOKENS, driver, flip

from layercast.errors import BadBlocks, PeerLost
from layercast.flow.orders import LoadEnd, StepOrders


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("block_major", [True, False])
@pytest.mark.parametrize("window", [1, 2, 4, 6])
def test_what_is_loaded_is_what_was_saved(block_major, window, verify):
    with driver(block_major, layerwise_window=window, verify=verify) as drive:
        assert drive.run("cold", TOKENS)[0] == 0

        tokens, outcomes, table, failed = drive.run("warm", TOKENS)

        assert tokens == 8 * BLOCK
        assert not failed
        assert drive.correct(TOKENS, table)
        (outcome,) = outcomes
        assert outcome.end is LoadEnd.LANDED
        assert outcome.verified is verify
        assert outcome.nbytes == 8 * BLOCK * 24 * LAYERS
        assert outcome.layers == LAYERS


def test_bulk_moves_the_same_bytes_as_layerwise():
    with driver(use_layerwise=False) as drive:
        drive.run("cold", TOKENS)
        _, (outcome,), table, _ = drive.run("warm", TOKENS)
        assert drive.correct(TOKENS, table)
        assert outcome.layers == LAYERS


@pytest.mark.parametrize(("blocks", "nbytes"), [(3, 0), (0, 100), (1, 1), (2, 500)])
def test_limits_on_a_batch_change_no_byte(blocks, nbytes):
    with driver(layerwise_max_transfer_blocks=blocks, layerwise_max_transfer_bytes=nbytes) as drive:
        drive.run("cold", TOKENS)
        tokens, (outcome,), table, _ = drive.run("warm", TOKENS)
        assert tokens == 8 * BLOCK
        assert outcome.end is LoadEnd.LANDED
        assert drive.correct(TOKENS, table)


@pytest.mark.parametrize("chunks", [[33], [4, 33], [1, 2, 3, 33], [16, 17, 33], [31, 32, 33]])
def test_any_chunking_of_a_prefill_saves_the_same_keys(chunks):
    with driver() as drive:
        drive.run("cold", TOKENS, chunks=chunks)
        keys = drive.pool.match(TOKENS).keys[0]
        assert drive.pool.directory.present(0, keys) == [True] * 8
        assert drive.pool.match(TOKENS).tokens == 8 * BLOCK


def test_a_flipped_byte_fails_the_load_and_is_never_offered_again():
    with driver() as drive:
        drive.run("cold", TOKENS)
        slot = flip(drive, TOKENS, 5, 3)

        tokens, (outcome,), _, failed = drive.run("warm", TOKENS)

        assert tokens == 8 * BLOCK
        assert failed
        assert outcome.end is LoadEnd.CORRUPT
        assert outcome.bad_slots == ((0, slot),)
        assert drive.pool.match(TOKENS).tokens == 5 * BLOCK


def test_blocks_lost_between_promise_and_load_are_recomputed():
    with driver() as drive:
        drive.run("cold", TOKENS)
        keys = drive.pool.match(TOKENS).keys[0]

        tokens, outcomes, table, failed = drive.run(
            "warm", TOKENS, between=lambda: drive.pool.directory.forget(0, keys[3:4])
        )

        assert tokens == 8 * BLOCK
        assert outcomes == []
        assert not failed
        assert drive.correct(TOKENS, table)


def test_the_same_calls_serve_a_hit_a_miss_lost_or_damaged_bytes_and_a_broken_mover(monkeypatch):
    """`Driver.run` makes a wait and a hand-off for each layer, whatever happens: none raises, and each end is told."""

    def broken(*_, **__):
        raise PeerLost("the link broke")

    with driver() as drive:
        keys = drive.pool.match(TOKENS).keys[0]
        forget = drive.pool.directory.forget
        ends = {}

        def run(name, tokens=TOKENS, **how):
            promised, outcomes, table, failed = drive.run(name, tokens, **how)
            ends[name] = (promised, [outcome.end for outcome in outcomes], failed)
            assert failed or drive.correct(tokens, table)

        run("miss")
        run("hit")
        run("too short", TOKENS[:2])
        run("partial hit", TOKENS[:17] + [9] * 16)
        run("lost", between=lambda: forget(0, keys[:1]))
        flip(drive, TOKENS, 2, 4)
        run("damaged")
        run("after it")
        with monkeypatch.context() as patch:
            patch.setattr(drive.pool.worker.mover, "submit", broken)
            run("broken mover")
        run("mended")
    assert ends == {
        "miss": (0, [], False),
        "hit": (32, [LoadEnd.LANDED], False),
        "too short": (0, [], False),
        "partial hit": (16, [LoadEnd.LANDED], False),
        "lost": (32, [], False),
        "damaged": (32, [LoadEnd.CORRUPT], True),
        "after it": (8, [LoadEnd.LANDED], False),
        "broken mover": (32, [LoadEnd.LOST], True),
        "mended": (32, [LoadEnd.LANDED], False),
    }


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"])
def test_every_pattern_of_every_dtype_comes_back_bit_for_bit(dtype):
    """NaN of every kind included: bytes are moved and compared, never numbers."""
    with driver(dtype=dtype) as drive:
        patterns = np.resize(np.arange(256, dtype=np.uint8), BLOCK * 24)
        patterns[:24] = 0xFF  # NaN in all of them
        drive.engine.write = lambda layer, block, prefix: drive.engine.arrays[layer].__setitem__(
            block, patterns ^ layer
        )
        drive.run("cold", TOKENS)
        for array in drive.engine.arrays.values():
            array[:] = 0
        drive.engine.write = lambda *_: None
        tokens, (outcome,), table, failed = drive.run("warm", TOKENS)
        assert (tokens, outcome.end, outcome.verified, failed) == (32, LoadEnd.LANDED, True, False)
        for layer in range(LAYERS):
            assert (drive.engine.arrays[layer][table[:8]] == patterns ^ layer).all()


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_around_a_block_boundary_whole_blocks_are_saved_and_one_token_is_left_to_compute(length):
    """And a generated token never makes an object of less than a block."""
    with driver() as drive:
        tokens = TOKENS[:length]
        drive.run("cold", tokens)
        assert len(drive.pool.directory._shelves[0].stored) == length // BLOCK
        promised, _, table, failed = drive.run("warm", tokens)
        assert promised == max(0, length - 1) // BLOCK * BLOCK
        assert not failed
        assert drive.correct(tokens, table)


@pytest.mark.parametrize(
    ("table", "says"),
    [([BLOCKS, *range(7)], f"block {BLOCKS} "), ([-1, *range(7)], "block -1 "), ([3, 3, *range(4, 10)], "named twice")],
)
def test_engine_blocks_that_can_not_be_are_refused_before_anything_moves(table, says):
    with driver() as drive:
        drive.run("cold", TOKENS)
        before = {layer: array.copy() for layer, array in drive.engine.arrays.items()}
        load = drive.pool.load_order("warm", drive.pool.match(TOKENS), [table])
        with pytest.raises(BadBlocks, match=says):
            drive.pool.begin(StepOrders(7, (load,)))
        assert all((drive.engine.arrays[layer] == before[layer]).all() for layer in before)
        drive.pool.directory.release(drive.pool._loading.pop(load.id).lease)


def test_requests_of_one_step_that_share_part_of_their_prefix_load_their_own_blocks():
    """Three requests side by side, each with its own part of one saved prompt and blocks of its own."""
    with driver() as drive:
        drive.run("cold", TOKENS)
        prompts = {"all": TOKENS, "half": TOKENS[:17] + [1] * 16, "none": [1] * 33}
        tables = {name: list(range(at, at + 9)) for at, name in zip((0, 10, 20), prompts, strict=True)}
        matches = {name: drive.pool.match(tokens) for name, tokens in prompts.items()}
        assert [match.tokens for match in matches.values()] == [32, 16, 0]
        loads = [drive.pool.load_order(name, matches[name], [tables[name]]) for name in ("all", "half")]
        saves = [
            order
            for name, tokens in prompts.items()
            if (order := drive.pool.save_order(name, tokens, matches[name].tokens, 33, [tables[name]]))
        ]
        assert [save.request for save in saves] == ["half", "none"]
        step = drive.pool.begin(StepOrders(1, tuple(loads), tuple(saves)))
        for layer in range(LAYERS):
            step.wait(layer)
            for name, tokens in prompts.items():
                for block in range(matches[name].tokens // BLOCK, 8):
                    drive.engine.write(layer, tables[name][block], tokens[: (block + 1) * BLOCK])
            step.written(layer)
        assert not drive.pool.settle(step.end()).failed
        drive.drain()
        assert all(drive.correct(tokens, tables[name]) for name, tokens in prompts.items())
        assert [drive.pool.match(tokens).tokens for tokens in prompts.values()] == [32, 32, 32]


def test_a_save_without_room_is_dropped_and_serving_goes_on():
    small = 3 * BLOCK * 24 * LAYERS + 4096
    with driver(host_bytes=small) as drive:
        slots = drive.pool.worker.ways.slab.slots[0]
        assert slots < BLOCKS - 1
        long = list(range(1000, 1000 + (slots + 1) * BLOCK))
        tokens, _, _, failed = drive.run("long", long)
        assert not failed
        assert tokens == 0
        assert drive.pool.directory.stats.saves_dropped == 1
        assert drive.pool.match(long).tokens == 0


def test_a_step_whose_hooks_do_not_fire_fails_its_load_and_names_the_layers():
    with driver() as drive:
        drive.run("cold", TOKENS)
        match = drive.pool.match(TOKENS)
        table = list(range(9))
        order = drive.pool.load_order("warm", match, [table])
        step = drive.pool.begin(StepOrders(9, (order,)))
        for layer in range(LAYERS - 1):
            step.wait(layer)
        settled = drive.pool.settle(step.end())
        assert settled.failed == ("warm",)
        outcomes = [*settled.loads, *drive.drain()]
        assert outcomes[0].end is LoadEnd.LATE
        assert f"[{LAYERS - 1}]" in outcomes[0].reason


def test_layers_without_a_hook_are_swept_into_the_save_and_counted():
    with driver() as drive:
        table = list(range(8))
        save = drive.pool.save_order("cold", TOKENS, 0, 32, [table])
        step = drive.pool.begin(StepOrders(0, (), (save,)))
        for layer in range(LAYERS):
            step.wait(layer)
            for block in range(8):
                drive.engine.write(layer, block, TOKENS[: (block + 1) * BLOCK])
            if layer % 2 == 0:
                step.written(layer)
        first = drive.pool.settle(step.end())
        saves = [*first.saves, *drive.pool.reports(1, timeout_s=5).saves]
        assert saves[0].swept_layers == LAYERS // 2
        _, (outcome,), out, _ = drive.run("warm", TOKENS)
        assert outcome.end is LoadEnd.LANDED
        assert drive.correct(TOKENS, out)
