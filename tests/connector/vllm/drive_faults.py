"""Faults injected into loads and saves, of each kind in turn. Usage: drive_faults.py FOLDER FAULTS, for each engine."""

import logging
import random
import sys
import threading

from lab import Engine, model, prompt, tell

from layercast.move.base import Waits
from layercast.move.flights import HostFlight

WAIT_MS, STALL_S = 150, 0.6


class Log(logging.Handler):
    """Keeps lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Troubles:
    """What can go wrong with one engine's pool. Each is set up, lasts for one run, and is undone."""

    def __init__(self, engine, draw):
        self.engine, self.draw, self.undo = engine, draw, []

    def lost_byte(self, ids):
        group = self.draw.randrange(len(self.engine.side.specs))
        spec = self.engine.side.specs[group]
        last = min(len(ids), 200) // spec.block_size - 1
        self.engine.flip(self.engine.slot(ids, last, group), self.draw.choice(spec.layers), group)

    def late_layer(self, ids):
        """One copy of the next load comes after everybody has ceased to wait for it."""
        self.stalled(self.draw.randrange(4), lambda held: threading.Timer(STALL_S, held.land).start())

    def stalled(self, number, told):
        """One copy of the next load waits for a flight, which `told` is given."""
        issuer, seen = self.engine.worker.issuer, []
        mover = issuer._mover

        class Stalling:
            def submit_all(self, batches, *, after, keep=(), waits=Waits.IDLE):
                behind = list(after)
                for nth, batch in enumerate(batches):
                    seen.append(batch)
                    if len(seen) == number + 1:
                        held = HostFlight()
                        told(held)
                        behind[nth] = (*after[nth], held)
                return mover.submit_all(batches, after=behind, keep=keep, waits=waits)

            def __getattr__(self, name):
                return getattr(mover, name)

        issuer._mover = Stalling()
        self.undo.append(lambda: setattr(issuer, "_mover", mover))

    def full_slab(self, ids):
        """No save finds room."""
        shelves = self.engine.side.directory._shelves
        for shelf in shelves:
            shelf.room = lambda keys=(): 0
        self.undo.append(lambda: [shelf.__dict__.pop("room") for shelf in shelves])

    def evicted(self, ids):
        """What was found is gone when it is to be leased."""
        lease, directory = self.engine.side.load_order, self.engine.side.directory

        def load_order(request, match, tables):
            for group, (keys, needed) in enumerate(zip(match.keys, match.needed, strict=True)):
                directory.forget(group, [keys[i] for i in needed[-1:]])
            return lease(request, match, tables)

        self.engine.side.load_order = load_order
        self.undo.append(lambda: self.engine.side.__dict__.pop("load_order"))

    def dead_thread(self, ids):
        line = self.engine.worker.mover._line
        line.submit(HostFlight(), lambda _: sys.exit())


def one(engine, kind, number, references):
    """One fault on one of the prompts; what came of it."""
    ids = prompt(number % 4, 200)
    engine.run(ids)  # whatever the last fault has cost is saved again, some of it with the answer
    engine.drain()
    troubles = Troubles(engine, random.Random(number))
    getattr(troubles, kind)(ids)
    run = engine.run(ids, prompt(number % 4 + 10, 60))
    for undo in troubles.undo:
        undo()
    hit, other = run["replies"]
    return {
        "kind": kind,
        "finish": hit["finish"],
        "text": len(hit["tokens"]),
        "equal": hit["tokens"] == references[number % 4],
        "other": other["tokens"] == references[number % 4 + 10],
        "loads": [load[0] for load in run["loads"]],
        **engine.drain(),
    }


def trouble(folder, name, policy, count, log):
    engine = Engine(
        model(folder, name), policy=policy, pool={"layer_wait_ms": WAIT_MS, "lease_s": WAIT_MS / 1000}, max_num_seqs=4
    )
    references = {seed: engine.run(prompt(seed, 200))["replies"][0]["tokens"] for seed in range(4)}
    references |= {seed: engine.run(prompt(seed, 60))["replies"][0]["tokens"] for seed in range(10, 14)}
    kinds = ["lost_byte", "late_layer", "full_slab", "evicted"]
    faults = [one(engine, kinds[number % 4], number, references) for number in range(int(count))]
    faults.append(one(engine, "dead_thread", 1, references))
    asked = {"extra_args": {"kv_transfer_params": {"layercast": {}}}}
    after = [engine.run(prompt(seed, 200), params=asked) for seed in (2, 2)]
    stopped = {
        "equal": [run["replies"][0]["tokens"] == references[2] for run in after],
        "loads": [run["loads"] for run in after],
        "saves": [run["saves"] for run in after],
        "told": [run["replies"][0]["params"]["layercast"]["miss"] for run in after],
        "log": [line for line in log.lines if "the pool has stopped" in line],
        **engine.drain(),
    }
    log.lines.clear()
    return {"faults": faults, "stopped": stopped, "blocks": engine.blocks, "threads": engine.close()}


def main(folder, count):
    log = Log()
    logging.getLogger("layercast").addHandler(log)
    engines = [(name, policy) for name in ("llama", "gemma3") for policy in ("recompute", "fail")]
    tell({f"{name} {policy}": trouble(folder, name, policy, count, log) for name, policy in engines})


if __name__ == "__main__":
    main(*sys.argv[1:])
