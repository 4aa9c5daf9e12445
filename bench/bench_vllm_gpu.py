"""Hits, first sights and decoding of vLLM on one GPU with layercast's connector, beside vLLM without one and rivals.

    python bench/bench_vllm_gpu.py --json bench/results/vllm_h200.json --model FOLDER [--phases hits ...]

Llama-3.1-8B shape, seeded random weights (not dummy ones), bf16, full graphs and async scheduling as vLLM chooses them.
Each case is an engine in a process of its own (vllm_engine.py). Some are up at a time (a "pair") and one works: so
engines can be compared in turn, and start together. The JSON is written after every phase of every case. A case of two
pairs goes by its neighbours the second time, and is not asked again what concerns it alone.

same    tokens and KV bytes of layercast's hits against hits from GPU memory; a load that fails inside a forward
sound   bytes of what Poisson arrivals have loaded and shared against what was computed alone
hits    TTFT of prefix + new tokens: from the connector, and with the prefix in GPU memory (the floor: `recompute`'s)
link    plain copies of 1 GiB between pinned memory and the GPU: the link's limit in this run
hooks   the engine thread's time in layercast's hooks
gates   when the device came to each layer's gate in hits, passed it, and had its KV written
first   first sight of a prompt, saving on against off, two engines in turn
decode  inter-token time at 1, 8, 32 and 256 running, two engines in turn
loop    tokens a second of 256 running, who is replaced as it ends: what saving short prompts and answers costs
mixed   inter-token time of 32 decodes while 8k hits arrive, one a second
poisson requests over 16 kinds of 8k prefix at Poisson arrivals, all engines in turn
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from pairs import ratios_of

HERE = Path(__file__).parent
SHAPES = [(2048, 256), (8192, 512), (8192, 2048), (30000, 1024)]
HOST_BYTES = 20 << 30
ARRIVALS = {"prefixes": 16, "prefix": 8192, "new": 128, "tokens": 32, "count": 96}
ROUNDS = 12
"""In which two engines take turns: a host is fast and slow by turns of seconds, so that few long rounds say little."""
BLOCKS = 6200
"""Of 16 tokens: 99,200 tokens of GPU cache in every engine."""
KV_BYTES_A_TOKEN = 32 * 2 * 8 * 128 * 2
ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""CUDA's own 8 unless a case says otherwise. Up to ed461fd all had 32, at 87a70fc all but `layercast-8`."""
LMCACHE = {"LMCACHE_CHUNK_SIZE": "256", "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "20"}


def layercast(**settings):
    return {
        "kv_connector": "LayercastConnector",
        "kv_connector_module_path": "layercast.connector.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_bytes": HOST_BYTES, **settings},
    }


def native(**settings):
    extra = {"cpu_bytes_to_use": HOST_BYTES, **settings}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


AGAIN = "recompute-again"
"""A second engine without a connector: two of the same are as far apart as this says (see `compared`)."""
CASES = {
    "recompute": {"kv": None},
    AGAIN: {"kv": None},
    "layercast": {"kv": layercast(), "layercast": True},
    **{f"layercast-{n}": {"kv": layercast(), "layercast": True, "env": {QUEUES: str(n)}} for n in (1, 8, 32)},
    "layercast-bulk": {"kv": layercast(use_layerwise=False), "layercast": True},
    "native-16": {"kv": native()},
    "native-256": {"kv": native(block_size=256)},
    "lmcache-bulk": {"kv": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, "env": LMCACHE},
}


def before(source):
    """layercast of another commit, whose `src` is there: whether a difference is the host's or the code's."""
    if source is None:
        raise SystemExit("an engine `before` in --pairs needs --before, the folder `src` of another commit")
    return {"kv": layercast(), "env": {"PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"}}


def labelled(pairs):
    """Each pair's (case, what its results go by): its name, and that of its neighbours where it was up before."""
    seen, every = set(), []
    for names in (pair.split(",") for pair in pairs):
        others = {name: ",".join(other for other in names if other != name) for name in names}
        every.append([(name, f"{name} beside {others[name]}" if name in seen else name) for name in names])
        seen.update(names)
    return every


class Engine:
    """A case's process. Raises RuntimeError, with the end of its log, when it has died."""

    def __init__(self, name, label, slot, args):
        case = {
            "model": args.model,
            "kv_bytes": BLOCKS * 16 * KV_BYTES_A_TOKEN,
            **(CASES[name] if name != "before" else before(args.before)),
            **json.loads(args.engine),
        }
        cache = {"VLLM_CACHE_ROOT": f"{os.environ.get('VLLM_CACHE_ROOT', '/tmp/vllm_cache')}_{slot}"}
        self._start(label, Path(args.logs) / f"{label}.log", {**cache, **case.pop("env", {})}, case)

    def _start(self, name, log, env, case):
        """The process, which imports what it needs and waits for `begin`."""
        self.name, self.dead, self.log = name, False, log
        self.ours = name.startswith("layercast")
        command = [sys.executable, str(HERE / "vllm_engine.py"), json.dumps(case)]
        env, pipe = {**os.environ, **ENV, **env}, subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log.open("w"), text=True, env=env, cwd=HERE
        )

    def begin(self):
        """Let it take the GPU; it has imported by now what takes half a minute."""
        self._write("begin")

    def up(self):
        self.facts = self._reply()
        return self.facts

    def __call__(self, do, **order):
        self._write(json.dumps({"do": do, **order}))
        return self._reply()

    def _write(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _reply(self):
        for line in self.process.stdout:
            if line.startswith("REPLY "):
                return json.loads(line[6:])
        self.dead = True
        raise RuntimeError(f"{self.name} died: " + "\n".join(self.log.read_text().splitlines()[-25:])[-3000:])

    def end(self):
        if not self.dead:
            self._write('{"do": "end"}')
        self.process.wait(60)


class Results:
    """The JSON, written after every entry; no phase is begun once its time is over."""

    def __init__(self, path, seconds):
        self.path, self.until = Path(path), time.monotonic() + seconds
        self.start = time.monotonic()
        self.all = json.loads(self.path.read_text()) if self.path.exists() else {}

    def put(self, phase, key, value):
        self.all.setdefault(phase, {})[key] = value
        self.path.write_text(json.dumps(self.all, indent=1) + "\n")
        print(f"[{time.monotonic() - self.start:.0f} s] {phase} {key}: {json.dumps(value)[:700]}", flush=True)

    @property
    def over(self):
        return time.monotonic() > self.until


@contextmanager
def on_core(engine, number):
    """The engine's own thread works on one core, by the number of a round, meanwhile.

    A core may be half as fast as another for seconds, and an engine that is left on it looks slow.
    """
    cores = sorted(os.sched_getaffinity(0))
    engine("move", core=cores[(1 + 3 * number) % len(cores)])
    yield
    engine("move", core=None)


def turns(engines, rounds):
    """(round, engine), engine after engine on one core, in the same order in every round.

    None follows itself, but one that moves in several ways (see `by_ways`): replays of a graph take one of a few
    speeds, up to 4 % apart, by which kernels a process ran before, until another process has the device. Plain torch
    does, too: see "speeds of a graph" in gpu_h200.json.
    """
    for number in range(rounds):
        for engine in engines:
            with on_core(engine, number):
                yield number, engine


def in_turn(engines, rounds, order):
    """Each engine's answers to the same order, engine after engine, `rounds` times; seconds joined."""
    every = {engine.name: [] for engine in engines}
    for _, engine in turns(engines, rounds):
        every[engine.name].append(engine(**order)["seconds"])
    return every


def compared(every):
    """Median and mean of each engine's times and their ratios; that of medians round by round, too (`by_rounds`); the
    spread of the baseline's own halves."""
    base, other = (name for name in every if name != AGAIN)
    medians = {name: statistics.median(t for times in rounds for t in times) for name, rounds in every.items()}
    means = {name: statistics.fmean(t for times in rounds for t in times) for name, rounds in every.items()}
    halves = [statistics.median(t for times in every[base][half::2] for t in times) for half in (0, 1)]
    return {
        "median_ms": {name: round(1e3 * value, 4) for name, value in medians.items()},
        "mean_ms": {name: round(1e3 * value, 4) for name, value in means.items()},
        "ratio_of_medians": round(medians[other] / medians[base], 4),
        "ratio_of_means": round(means[other] / means[base], 4),
        "off_against_off": round(max(halves) / min(halves), 4),
        "times": sum(len(times) for times in every[other]),
        **by_rounds({name: [*map(statistics.median, rounds)] for name, rounds in every.items()}),
    }


def by_rounds(every):
    """An engine's figures, one a round, over the baseline's; and so that one's likeness's, where it took turns, too."""
    base, other = (name for name in every if name != AGAIN)
    likeness = {AGAIN: ratios_of(every[AGAIN], every[base])} if AGAIN in every else {}
    return {"by_rounds": ratios_of(every[other], every[base]), **likeness}


def spread(values):
    """Median, least and greatest, and all of them as they came, in ms."""
    ms = [round(1e3 * value, 3) for value in values]
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms), "reps": len(ms), "all_ms": ms}


def joined(rounds):
    """An engine's answers to the same order as one, list by list."""
    return {key: [value for found in rounds for value in found[key]] for key in rounds[0]}


def order_of(shape, reps):
    """What `hits` and `gates` are asked for a shape such as 8192+512."""
    prefix, new = map(int, shape.split("+"))
    return {"prefix": prefix, "new": new, "reps": reps, "settle": 0.3 if prefix < 20000 else 0.8}


def hits_of(rounds):
    """What `hits` has found over all rounds; a median of each kind, and what was cached."""
    found = joined(rounds)
    facts = {kind: spread(found[kind]) for kind in ("cold", "hit", "in_gpu") if found[kind]}
    facts["cached"] = sorted(set(map(tuple, found["cached"])))
    facts |= {kind: found[kind] for kind in ("stages", "stages_in_gpu", "spent", "load_ms", "pieces") if kind in found}
    return {**facts, "missed": found["missed"]} if found["missed"] else facts


def mixed_of(rounds):
    """What `mixed` has found over all rounds: of the gaps between tokens, in ms, and of the hits' TTFT.

    slowest_ms: each with how long before its end the last hit was asked.
    """
    found, each = joined(rounds), [sorted(1e3 * gap for gap in found["gaps"]) for found in rounds]
    steps = sorted(zip(found["gaps"], found["since"], strict=True))
    gaps = [1e3 * gap for gap, _ in steps]
    return {
        "itl": {"p50_ms": gaps[len(gaps) // 2], "p99_ms": gaps[int(0.99 * len(gaps))], "max_ms": gaps[-1]},
        "p99_ms of each round": [round(gaps[int(0.99 * len(gaps))], 3) for gaps in each],
        "slowest_ms": [[round(1e3 * ms, 2) for ms in slow] for slow in steps[:-41:-1]],
        "steps": len(gaps),
        "ttft": spread(found["ttft"]),
        "cached": sorted(set(found["cached"])),
        **{kind: found[kind] for kind in ("how", "pieces") if kind in found},
    }


def alone(engine, args, results):
    """The phases of one engine, while its neighbour is idle."""
    name, phases, ours = engine.name, set(args.phases), engine.ours
    if "same" in phases and ours:
        results.put("same", name, engine("same", prefix=2048, new=300, tokens=16, count=3))
        results.put("same", f"{name} fault", engine("fault", prefix=2048, new=300, tokens=16))
        engine("troubles")  # that one was lost on purpose
    if "sound" in phases and ours:
        results.put("sound", name, engine("sound", seeds=[1, 2, 3], rate=25, **ARRIVALS))
    for shape in args.shapes if "gates" in phases and ours else ():
        for name_of_way in by_ways(engine, args.ways):
            results.put("gates", f"{name_of_way} {shape}", engine("gates", **order_of(shape, args.reps)))
    if "hooks" in phases and ours:
        results.put("hooks", name, engine("hooks", prefix=8192, new=512))
        for batch in args.batches:
            results.put("hooks", f"{name} decode {batch}", engine("decode_hooks", batch=batch, steps=100))


def by_ways(engine, ways, number=0):
    """What an engine's results go by, layercast's while it moves by each of the ways that are asked for.

    number: of the round: each round begins with another way.
    """
    if not (engine.ours and ways):
        yield engine.name
        return
    for way in rotated(ways, number):
        engine("way", way=way)
        yield engine.name if way == "measured" else f"{engine.name} {way}"
    engine("way", way="measured")


def rotated(items, number):
    """The same in the same order, of which the one of that number, counted over and over, is now the first."""
    first = number % len(items)
    return items[first:] + items[:first]


def loads_of(engine, count):
    """What layercast's own says of its last loads; nothing of another."""
    return engine("loads", count=count) if engine.ours else {}


def hits(engines, args, results):
    """Hits of each shape, all engines and ways in turn, so that the host's good and bad moments are everybody's."""
    for shape in args.shapes:
        rounds = {}
        for number, engine in turns(engines, args.reps // 3):
            for name in by_ways(engine, args.ways, number):
                wishes = {"load": True} if engine.ours else None
                found = engine("hits", wishes=wishes, **order_of(shape, 3))
                rounds.setdefault(name, []).append(found | loads_of(engine, 3))
        for name, found in rounds.items():
            results.put("hits", f"{name} {shape}", hits_of(found))
        for engine in engines:
            if engine.ours and (troubles := engine("troubles")):
                results.put("troubles", f"{engine.name} {shape}", troubles)


def asked_of(phase, engines, args):
    """Who takes part: in hits all but the second without a connector, in mixed load and at arrivals those with one;
    none where it is another pair that has two of them."""
    if phase is hits:
        return [engine for engine in engines if not engine.name.startswith(AGAIN)]
    rivals = [engine for engine in engines if not engine.name.startswith("recompute")]
    return rivals if len(rivals) > 1 or len(args.pairs) == 1 else []


def mixed(engines, args, results):
    """Decodes beside hits, the engines in turn; layercast's by each of the ways that are asked for."""
    order = {"running": 32, "prefix": 8192, "new": 512, "count": 10, "every_s": 1.0}
    rounds = {}
    for number, engine in turns(engines, 2):
        for name in by_ways(engine, args.ways, number):
            found = engine("mixed", **order)
            rounds.setdefault(name, []).append(found | loads_of(engine, order["count"]))
    for name, found in rounds.items():
        results.put("mixed", name, mixed_of(found))
    for engine in engines:
        if engine.ours:
            results.put("troubles", f"{engine.name} mixed", engine("troubles"))


def arrivals(engines, args, results):
    """Poisson arrivals, the engines with a connector in turn at the same ones; a first round warms up."""
    order = {"do": "poisson", **ARRIVALS}
    for engine in engines:
        engine(**order, rate=args.rates[0][0], seed=0)
    for nth, (rate, seed) in enumerate(args.rates):
        for engine in rotated(engines, nth):
            if not results.over:
                with on_core(engine, nth):
                    found = engine(**order, rate=rate, seed=int(seed))
                results.put("poisson", f"{engine.name} rate {rate:g} seed {seed:g}", found)
    for engine in engines:
        if engine.ours:
            results.put("troubles", f"{engine.name} poisson", engine("troubles"))


def together(engines, args, results):
    """The phases that compare two engines in turn, and may have a third beside them that is as the first."""
    for prefix in args.firsts if "first" in args.phases else ():
        rounds = ROUNDS if prefix < 5000 else 6 if prefix < 20000 else 3
        if not results.over:
            every = in_turn(engines, rounds, {"do": "cold", "prefix": prefix, "reps": 4})
            every = {name: [times[1:] for times in rounds] for name, rounds in every.items()}
            results.put("first", str(prefix), compared(every))
    for batch in args.batches if "decode" in args.phases else ():
        if not results.over:
            every = in_turn(engines, ROUNDS, {"do": "decode", "batch": batch, "steps": 90})
            results.put("decode", str(batch), compared(every))
    if "loop" in args.phases and not results.over:
        loop(engines, results)


def loop(engines, results):
    """256 that come and go; told of after every round, as all of them take two minutes."""
    every = {engine.name: [] for engine in engines}
    for seed, engine in turns(engines, ROUNDS):
        every[engine.name].append(engine("loop", batch=256, seconds=2.0, seed=seed)["tokens_per_s"])
        if engine is engines[-1]:
            rounded = {name: [round(rate, 1) for rate in rates] for name, rates in every.items()}
            results.put("loop", "256", {"tokens_per_s": rounded, **by_rounds(every)})


def measured(engines, args, results):
    """Everything that is asked of engines that are up together. One that dies ends its own phases, or the one that is
    everybody's."""
    for engine in engines:
        engine.begin()
    alive = []
    for engine in engines:
        try:
            results.put("engines", engine.name, engine.up())
            alive.append(engine)
            if "link" in args.phases and "link" not in results.all:
                results.put("link", "limit", engine("link"))
        except RuntimeError as error:
            results.put("failed", engine.name, str(error))
    pair = [engine for engine in alive if engine.name in ("recompute", AGAIN, "layercast")]
    if {"recompute", "layercast"} <= {engine.name for engine in pair}:
        together(pair, args, results)
    fresh = [engine for engine in alive if " beside " not in engine.name]
    for engine in sorted(fresh, key=lambda engine: not engine.ours):
        try:
            alone(engine, args, results)
        except RuntimeError as error:
            results.put("failed", engine.name, str(error))
    for name, phase in (("hits", hits), ("mixed", mixed), ("poisson", arrivals)):
        left = [engine for engine in alive if not engine.dead]
        chosen = asked_of(phase, left, args)
        if name in args.phases and chosen and not results.over:
            try:
                phase(chosen, args, results)
            except RuntimeError as error:
                results.put("failed", name, str(error))
    for engine in engines:
        engine.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--logs", default="/tmp")
    parser.add_argument(
        "--pairs", nargs="*", default=["recompute,layercast", "native-256,lmcache-bulk", "native-16,layercast-bulk"]
    )
    parser.add_argument("--phases", nargs="*", default=["link", "same", "hits", "hooks", "first", "decode", "mixed"])
    parser.add_argument("--before", help="folder `src` of another commit: what the engine `before` of a pair runs")
    parser.add_argument("--shapes", nargs="*", default=[f"{prefix}+{new}" for prefix, new in SHAPES])
    parser.add_argument("--firsts", nargs="*", type=int, default=[2048, 8192, 30000])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32, 8, 256])
    parser.add_argument(
        "--ways",
        nargs="*",
        default=[],
        help="measured, engine, staged, staged8: gates, hits, mixed load by these in turn",
    )
    parser.add_argument("--reps", type=int, default=9, help="hits counted of each kind, three a round")
    parser.add_argument("--rates", nargs="*", type=lambda text: tuple(map(float, text.split(":"))), default=[(0.0, 1)])
    parser.add_argument("--engine", default="{}", help="further fields of each engine's case, as JSON")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no phase after so long")
    args = parser.parse_args()
    results = Results(args.json, args.seconds)
    results.put("about", "command", " ".join(sys.argv))
    results.put("about", "machine", {"python": platform.python_version(), "cores": os.cpu_count()})
    pairs = [
        [Engine(name, label, slot, args) for slot, (name, label) in enumerate(pair)] for pair in labelled(args.pairs)
    ]
    for engines in pairs:
        if not results.over:
            measured(engines, args, results)
    for engine in (engine for engines in pairs for engine in engines):
        engine.process.kill()
    sys.exit("failed" in results.all)


if __name__ == "__main__":
    main()
