"""Imports vLLM once, and forks a process for each drive that is asked for: a line of JSON on stdin, its exit on stdout.

Usage: forks.py      A line: [script, [argument, ...], file for what it prints, file for its errors].

Does not know what drives do, or how long they may take: whoever asks ends this process, and the drive with it.
"""

import gc
import importlib
import json
import os
import runpy
import sys

import lab  # noqa: F401  what every drive imports first

ENGINES = ("vllm.v1.worker.cpu_worker", "vllm.v1.core.sched.async_scheduler", "layercast.connector.vllm.connector")
"""What the first engine would import. Models are imported by the drives that have them."""


def become(script, arguments, printed, errors):
    """Make this process the drive, as if it had been started by itself."""
    for stream, path, mode in ((0, os.devnull, os.O_RDONLY), (1, printed, os.O_WRONLY), (2, errors, os.O_WRONLY)):
        file = os.open(path, mode | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def main():
    for module in ENGINES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads, and keep their locks"
    gc.collect()
    gc.freeze()  # what is imported never goes, so no engine's end need look through it for garbage again
    gc.freeze = gc.unfreeze = lambda: None  # an engine thaws everything when it ends
    for line in sys.stdin:
        drive = os.fork()
        if not drive:
            become(*json.loads(line))
            return
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(drive, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
