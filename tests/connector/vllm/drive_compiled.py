"""A compiled model: the hooks are custom ops, so they fire between compiled pieces."""

import sys

import torch._dynamo
from lab import Engine, model, prompt, tell


def main(folder):
    torch._dynamo.config.disable = False
    engine, long = Engine(model(folder, "llama"), enforce_eager=False), prompt(1, 200)
    facts = {"cold": engine.run(long), "warm": engine.run(long), "bytes": engine.loaded_bytes()}
    facts["drained"], facts["threads"] = engine.drain(), engine.close()
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
