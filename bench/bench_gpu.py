"""What the CUDA mover and gates cost and reach on this machine's GPUs: every `layercast bench`, each in a process.

    python bench/bench_gpu.py --json bench/results/gpu_h100.json [--only layers,overlap,...] [--repeats 15]

Writes the JSON after every case, and a picture of each beside it. Without a GPU it says so and ends well.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

CASES = {
    "layers": ["layers"],
    "layers of blocks of 64": ["layers", "--block", "64"],
    "layers of blocks of 128": ["layers", "--block", "128"],
    "overlap": [
        "overlap",
        "--shape",
        "8192+2048",
        "--shape",
        "8192+512",
        "--shape",
        "32768+1024",
        "--shape",
        "2048+256",
    ],
    "overlap of blocks of 64": ["overlap", "--no-busy", "--block", "64", "--shape", "8192+512"],
    "overlap of blocks of 128": ["overlap", "--no-busy", "--block", "128", "--shape", "8192+512"],
    "graph": ["graph", "--shape", "8192+2048", "--shape", "8192+512"],
    "long": ["overlap", "--no-busy", "--shape", "131072+1024"],
    "peer": ["peer"],
}
NO_GPU = 2
"""What `layercast` ends with where a measurement finds too few GPUs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", default=",".join(CASES), help="cases, in order")
    parser.add_argument("--repeats", default="15")
    given = parser.parse_args()
    found: dict[str, object] = {"command": " ".join(["python", *sys.argv])}
    worst = 0
    for name in given.only.split(","):
        part = given.json.with_name(f"{given.json.stem}_{name.replace(' ', '_')}.json")
        command = [sys.executable, "-m", "layercast.cli", "bench", *CASES[name], "--repeats", given.repeats]
        ended = subprocess.run([*command, "--json", part, "--out", part.with_suffix("")], check=False)
        if ended.returncode == NO_GPU:
            continue
        worst = max(worst, ended.returncode)
        found[name] = json.loads(part.read_text()) if part.exists() else f"failed with {ended.returncode}"
        part.unlink(missing_ok=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return worst


if __name__ == "__main__":
    sys.exit(main())
