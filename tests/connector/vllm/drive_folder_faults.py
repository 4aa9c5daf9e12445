"""What may happen to a shared folder, in real engines; facts of each case. Usage: drive_folder_faults.py FOLDER KV."""

import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path

from drive_folder import PROMPTS, TOLD, counted, without_connector
from lab import Engine, model, tell
from tiny_models import torch, transformers

from layercast.store.folder import UNFINISHED, FolderStore

SEEDS = 40


def files_of(kv):
    return sorted(path for path in Path(kv).rglob("*") if path.is_file())


def answers(engine):
    """All prompts, one by one; the tokens, what was loaded, and how the loads ended."""
    runs = [engine.run(ids, params=TOLD) for ids in PROMPTS]
    return {
        "tokens": [run["replies"][0]["tokens"] for run in runs],
        "cached": [run["replies"][0]["cached"] for run in runs],
        "ends": sorted({end for run in runs for end, *_ in run["loads"]}),
    }


def ended(engine, run, stats, kv):
    """The engine's end, with what it leaves."""
    drained = engine.drain()
    engine.connector.get_kv_connector_stats()
    engine.side.directory.check()
    run |= {"drained": drained, "blocks": engine.blocks, "stats": stats, "threads": engine.close()}
    run["unfinished"] = sum(path.name.endswith(UNFINISHED) for path in files_of(kv)) if Path(kv).is_dir() else 0
    return run


def forget(engine):
    """The slab's content is as good as gone."""
    for group, shelf in enumerate(engine.side.directory._shelves):
        engine.side.directory.forget(group, list(shelf.stored))


def damage(draw, file):
    """One of the things that become of a file."""
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data))
    match draw.randrange(4):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
        case 1:
            file.write_bytes(data[:at])
        case 2:
            file.write_bytes(data + b"more")
        case _:
            file.unlink()


def damaged(path, kv, whole):
    """Forty rounds of damage to some files, each round from a whole folder and an empty slab."""
    engine = Engine(path, pool={"disk_path": kv}, role="kv_consumer")
    stats, rounds = counted(engine), []
    for seed in range(SEEDS):
        draw = random.Random(seed)
        shutil.rmtree(kv)
        shutil.copytree(whole, kv)
        for file in draw.sample(files_of(kv), draw.randrange(1, 5)):
            damage(draw, file)
        forget(engine)
        rounds.append(answers(engine))
    return ended(engine, {"rounds": rounds}, stats, kv)


def removed(path, kv):
    """The folder goes away between two steps, comes back with a save, and is then a file."""
    engine = Engine(path, pool={"disk_path": kv})
    stats, steps, build = counted(engine), [], engine.connector.build_connector_meta

    def removing(output):
        steps.append(1)
        if len(steps) % 7 == 3 and Path(kv).is_dir():
            shutil.rmtree(kv, ignore_errors=True)
        return build(output)

    engine.connector.build_connector_meta = removing
    first = answers(engine)
    engine.connector.build_connector_meta = build
    engine.drain()
    shutil.rmtree(kv, ignore_errors=True)
    Path(kv).write_bytes(b"")
    forget(engine)
    second = answers(engine)
    return ended(engine, {"rounds": [first, second]}, stats, kv)


def late(path, kv):
    """Reads that take longer than anybody waits; they end before the engine does."""
    load, let = FolderStore._load, threading.Event()

    def slow(store, key, size):
        let.wait(20)
        return load(store, key, size)

    FolderStore._load = slow
    engine = Engine(path, pool={"disk_path": kv, "layer_wait_ms": 100}, role="kv_consumer")
    stats, start_s = counted(engine), time.monotonic()
    first = answers(engine)
    seconds = time.monotonic() - start_s
    let.set()
    FolderStore._load = load
    engine.drain()
    second = answers(engine)
    return ended(engine, {"rounds": [first, second], "seconds": seconds}, stats, kv)


def narrow(path, kv):
    """A folder with room for three blocks."""
    one = files_of(kv)[0].stat().st_size
    shutil.rmtree(kv)
    engine = Engine(path, pool={"disk_path": kv, "disk_bytes": 3 * one})
    stats = counted(engine)
    return ended(engine, {"rounds": [answers(engine)]}, stats, kv) | {"files": len(files_of(kv))}


def small(path, kv):
    """A slab with room for four blocks, over a folder that has all of them."""
    engine = Engine(path, pool={"disk_path": kv, "host_bytes": 5 * 65_536}, role="kv_both")
    stats = counted(engine)
    return ended(engine, {"rounds": [answers(engine), answers(engine)]}, stats, kv)


def other_weights(path, kv, tmp):
    """The same path and configuration, but trained on: not a block may be found."""
    there = Path(path)
    aside = there.rename(Path(tmp) / "aside")
    changed = transformers.AutoModelForCausalLM.from_pretrained(aside, dtype=torch.float32)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.01)
    changed.save_pretrained(there)
    try:
        engine = Engine(path, pool={"disk_path": kv}, role="kv_consumer")
        stats = counted(engine)
        return ended(engine, {"rounds": [answers(engine)]}, stats, kv)
    finally:
        shutil.rmtree(there)
        aside.rename(there)


def main(folder, tmp):
    path, kv, whole = model(folder, "llama"), f"{tmp}/kv", f"{tmp}/whole"
    facts = {"plain": without_connector(path), "seeds": SEEDS}
    descriptors = len(os.listdir("/proc/self/fd"))
    engine = Engine(path, pool={"disk_path": whole}, role="kv_producer")
    facts["whole"] = ended(engine, {"rounds": [answers(engine)]}, counted(engine), whole)
    cases = {
        "damaged": lambda: damaged(path, kv, whole),
        "removed": lambda: removed(path, kv),
        "late": lambda: late(path, kv),
        "narrow": lambda: narrow(path, kv),
        "small": lambda: small(path, kv),
        "other_weights": lambda: other_weights(path, kv, tmp),
    }
    for name, case in cases.items():
        if Path(kv).is_file():
            Path(kv).unlink()
        shutil.rmtree(kv, ignore_errors=True)
        shutil.copytree(whole, kv)
        facts[name] = case()
    facts["descriptors"] = len(os.listdir("/proc/self/fd")) - descriptors
    tell(facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
