"""The embedded pool in troubles that users of other pools have reported in public; see each test for where."""

import msgspec
import pytest
from pool_driver import BLOCK, LAYERS, TOKENS, driver, flip

from layercast.errors import PeerLost
from layercast.flow.orders import LoadEnd, StepOrders
from layercast.observe.receipts import MissReason


def forward(drive, orders, write):
    """One step over all layers; `write(layer)` fills the blocks."""
    step = drive.pool.begin(orders)
    for layer in range(LAYERS):
        step.wait(layer)
        write(layer)
        step.written(layer)
    return drive.pool.settle(step.end())


def test_requests_that_interleave_and_finish_twice_save_their_own_bytes():
    """LMCache#2453: finishing one request advanced another one's exhausted saver, and the engine died."""
    with driver() as drive:
        prompts = {name: [seed] * 16 for seed, name in enumerate("abc")}
        tables = {name: list(range(4 * at, 4 * at + 4)) for at, name in enumerate("abc")}
        for done in range(0, 16, BLOCK):
            saves = [
                drive.pool.save_order(name, tokens, done, done + BLOCK, [tables[name]])
                for name, tokens in prompts.items()
            ]

            def write(layer, done=done):
                for name, tokens in prompts.items():
                    drive.engine.write(layer, tables[name][done // BLOCK], tokens[: done + BLOCK])

            forward(drive, StepOrders(done, (), tuple(saves)), write)
            drive.pool.finish("c")
            drive.pool.finish("c")
            drive.pool.finish("never seen")
        drive.drain()
        for name, tokens in prompts.items():
            promised, _, table, _ = drive.run(f"warm {name}", [*tokens, 9])
            assert promised == 16
            assert drive.correct(tokens, table)


@pytest.mark.parametrize("saved", [1, 2, 6])
@pytest.mark.parametrize("loaded", [0, 1, 4])
def test_what_was_saved_in_one_granularity_is_loaded_in_any_other(saved, loaded):
    """LMCache#683, #1174: a block saved layer by layer had a format that a load in bulk did not know."""
    with driver(layerwise_window=saved) as drive:
        drive.run("cold", TOKENS)
        found = drive.pool.match(TOKENS)
        match = msgspec.structs.replace(found, decision=msgspec.structs.replace(found.decision, window=loaded))
        table = list(range(20, 29))
        load = drive.pool.load_order("warm", match, [table])
        settled = forward(drive, StepOrders(9, (load,)), lambda layer: None)
        outcomes = [*settled.loads, *drive.drain()]
        assert [(o.end, o.verified, o.layers) for o in outcomes] == [(LoadEnd.LANDED, True, LAYERS)]
        assert drive.correct(TOKENS, table)


@pytest.mark.parametrize("fails_at", range(LAYERS))
def test_a_save_of_which_one_layer_failed_is_counted_and_never_found(monkeypatch, fails_at):
    """LMCache#1150, #4064: puts failed, the counter of completed ones rose, and nothing was stored."""
    with driver() as drive:
        submit, calls = drive.pool.worker.mover.submit, []

        def sometimes(pieces, **how):
            calls.append(pieces)
            if len(calls) == fails_at + 1:
                raise PeerLost("the link broke")
            return submit(pieces, **how)

        monkeypatch.setattr(drive.pool.worker.mover, "submit", sometimes)
        drive.run("cold", TOKENS)
        assert drive.pool.match(TOKENS).tokens == 0
        stats = drive.pool.directory.stats
        assert (stats.saved, stats.saves_failed) == (0, 1)
        drive.run("again", TOKENS)
        assert drive.pool.match(TOKENS).tokens == 32


def test_a_producer_that_dies_after_a_chunk_has_promised_that_chunk_only():
    """vLLM#53314: a consumer believed in a whole prompt of which one chunk had been written."""
    with driver() as drive:
        drive.run("dies", TOKENS, chunks=[12])
        order = drive.pool.save_order("dies", TOKENS, 12, 24, [list(range(9))])
        step = drive.pool.begin(StepOrders(5, (), (order,)))
        step.wait(0)
        step.written(0)
        drive.pool.abort("dies")
        drive.pool.settle(step.end())
        drive.drain()
        assert drive.pool.match(TOKENS).tokens == 12


def test_a_pool_that_is_full_of_leases_drops_saves_at_once_and_recovers_by_itself():
    """LMCache#3187: a pool full of pinned blocks failed every allocation for hours, also when the pins had gone."""
    with driver(host_bytes=9 * BLOCK * 24 * LAYERS + 4096) as drive:
        drive.run("cold", TOKENS)
        load = drive.pool.load_order("reader", drive.pool.match(TOKENS), [list(range(9))])
        other = [7] * 33
        drive.run("other", other)
        assert drive.pool.match(other).tokens == 0
        assert drive.pool.directory.stats.saves_dropped == 1
        settled = forward(drive, StepOrders(9, (load,)), lambda layer: None)
        assert not settled.failed
        drive.drain()
        drive.run("other again", other)
        assert drive.pool.match(other).tokens == 32


def test_every_miss_says_why():
    """LMCache#3659: "tell me why it missed"."""
    with driver(host_bytes=9 * BLOCK * 24 * LAYERS + 4096) as drive:
        assert drive.pool.match(TOKENS).miss is MissReason.NEVER_STORED
        assert drive.pool.match(TOKENS[: BLOCK - 1]).miss is MissReason.SHORT
        drive.run("cold", TOKENS)
        assert drive.pool.match(TOKENS).miss is None
        flip(drive, TOKENS, 0, 0)
        drive.run("damaged", TOKENS)
        found = drive.pool.match(TOKENS)
        assert found.miss is MissReason.CORRUPT
        drive.run("again", TOKENS)
        for other in range(3):
            drive.run(f"other {other}", [other] * 33)
        assert drive.pool.match(TOKENS).miss is MissReason.EVICTED
    with driver(kv_recompute_threshold=64) as drive:
        drive.run("cold", TOKENS)
        assert drive.pool.match(TOKENS).miss is MissReason.BELOW_THRESHOLD


@pytest.mark.parametrize("chunks", [[2048, 2049], [1, 2049], [700, 1400, 2049], [2049]])
def test_2049_tokens_leave_2048_in_the_pool_however_they_were_cut(chunks):
    """LMCache#2540, #3640: the skip rule looked at a step's tokens, so a tail was not saved."""
    tokens = list(range(2049))
    with driver(blocks=600) as drive:
        drive.run("cold", tokens, chunks=chunks)
        assert drive.pool.match(tokens).tokens == 2048
        assert len(drive.pool.directory._shelves[0].stored) == 512
