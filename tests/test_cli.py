import json
import re
import subprocess
import sys

import pytest

from layercast import __version__


def layercast(*arguments, cwd=None, **environ):
    return subprocess.run(
        [sys.executable, "-c", "from layercast.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "PYTHONPATH": ":".join(sys.path), **environ},
    )


def test_the_version_is_printed():
    assert layercast("--version").stdout == f"layercast {__version__}\n"


def test_a_disk_that_is_full_is_one_line():
    ended = layercast("doctor", "--json", "/dev/full")
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == ["layercast: No space left on device; make room, or have it written elsewhere"]


@pytest.mark.parametrize("command", ["doctor", "demo", "bench", "why"])
def test_help_names_every_value_in_capitals_and_says_what_it_is_without_it(command):
    said = layercast(command, "--help", COLUMNS="80").stdout
    assert "<" not in said.partition("Options:\n")[2]
    options = re.split(r"\n  (?=--)", said.partition("Options:\n")[2])
    for option in options:
        name, value = re.match(r"\s*(--[\w-]+)( / --[\w-]+| [A-Z+=/]+)?", option).groups()
        assert value is None or "default" in option.lower(), name
    assert all(len(line) <= 80 for line in said.splitlines())


def test_the_list_of_commands_cuts_no_sentence():
    said = layercast("--help", COLUMNS="80").stdout
    assert "..." not in said.partition("Commands:")[2]


def test_doctor_writes_its_findings_as_json(tmp_path):
    path = tmp_path / "deep" / "doctor.json"
    ran = layercast("doctor", "--json", str(path), HOME=str(tmp_path), LAYERCAST_HOST_BYTES="1000000")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    checks = json.loads(path.read_text())["checks"]
    assert {"settings", "torch", "memory", "loopback", "disk"} <= {check["name"] for check in checks}
    assert all(set(check) == {"name", "level", "found", "advice"} for check in checks)


def test_doctor_fails_on_an_error_and_says_what_to_do(tmp_path):
    ran = layercast("doctor", "--set", "verfy=true", HOME=str(tmp_path))
    assert ran.returncode == 1
    assert "unknown setting verfy" in ran.stdout
    assert "kv_recompute_threshold" in ran.stdout


def test_doctor_tells_of_a_model_and_translates_what_stood_before_in_one_command(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = tmp_path / "lmcache.yaml"
    theirs.write_text("chunk_size: 256\nmax_local_cpu_size: 0.5\nuse_layerwise: true\n")
    told = tmp_path / "doctor.json"
    arguments = ["--vllm", str(tmp_path), "--from", str(theirs), "--set", "lease_s=9", "--json", str(told)]
    ran = layercast("doctor", *arguments, HOME=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    command = ran.stdout.splitlines()[-1]
    assert command == json.loads(told.read_text())["command"]
    assert command.startswith(f"vllm serve {tmp_path} ")
    assert '"kv_connector_extra_config":{"host_bytes":"512MiB","lease_s":9.0}' in command
    alone = layercast("doctor", "--from", str(theirs), HOME=str(tmp_path)).stdout.splitlines()[-1]
    assert alone.startswith("--kv-transfer-config '{")


def test_a_config_file_is_served_as_the_folder_it_lies_in(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = layercast("doctor", "--vllm", "config.json", HOME=str(tmp_path), cwd=tmp_path)
    assert ran.stdout.splitlines()[-1].startswith(f"vllm serve {tmp_path} ")


def test_no_command_is_offered_for_a_model_that_cant_be_served_so(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = layercast("doctor", "--vllm", str(tmp_path), HOME=str(tmp_path))
    assert (ran.returncode, "vllm serve" in ran.stdout) == (1, False)


def test_a_folder_that_cant_be_used_is_an_error_with_translated_settings_too(tmp_path):
    (tmp_path / "file").touch()
    theirs = tmp_path / "lmcache.yaml"
    theirs.write_text(f"chunk_size: 256\nlocal_disk: {tmp_path}/file\nmax_local_disk_size: 1\n")
    ran = layercast("doctor", "--from", str(theirs), HOME=str(tmp_path))
    assert (ran.returncode, "file is no folder" in ran.stdout) == (1, True)


@pytest.mark.parametrize("arguments", [["--vllm", "no/model"], ["--from", "no-file"], ["--vllm", ""]])
def test_doctor_says_what_it_cant_read_in_one_line(arguments, tmp_path):
    ran = layercast("doctor", *arguments, HOME=str(tmp_path))
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert arguments[1] in ran.stderr


@pytest.mark.parametrize("arguments", [["--set", "verfy=true"], ["--set", "verify"], ["--set", "host_bytes=lots"]])
def test_a_wrong_setting_is_one_line_on_stderr_and_no_traceback(arguments, tmp_path):
    ran = layercast("demo", *arguments, HOME=str(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr.startswith("layercast: command line: ") or ran.stderr.startswith("layercast: setting ")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--out", "--json", "--cache"])
def test_a_place_that_cant_be_written_names_the_option_that_chose_it_before_anything_long_runs(option, tmp_path):
    (tmp_path / "file").touch()
    ran = layercast("demo", option, str(tmp_path / "file" / "deeper" / "x"), HOME=str(tmp_path), cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"layercast: {tmp_path / 'file' / 'deeper'}")
    assert ran.stderr.endswith(f"choose another with {option}\n")


def test_a_file_that_was_chosen_for_a_folder_is_named_once(tmp_path):
    (tmp_path / "file").touch()
    ran = layercast("demo", "--out", "file", HOME=str(tmp_path), cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (2, "layercast: file is no folder; choose another with --out\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["demo", "--dtype", "fp16"], "'--dtype': 'fp16' is not one of 'auto', 'bfloat16', 'float32'."),
        (["bench", "foo"], "'WHAT': 'foo' is not one of 'layers', 'overlap', 'graph', 'busy', 'peer'."),
    ],
)
def test_a_value_that_is_no_choice_is_told_with_the_choices_and_nothing_before_it(arguments, told):
    ran = layercast(*arguments)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (2, f"Error: Invalid value for {told}")


@pytest.mark.parametrize("command", ["doctor", "demo", "bench"])
def test_a_file_where_nothing_can_be_written_is_refused_in_one_line_before_any_work(command, tmp_path):
    words = [command, "layers"] if command == "bench" else [command]
    ran = layercast(*words, "--json", "/proc/x.json", HOME=str(tmp_path), cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith("layercast: /proc: can't be written")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_once_there_is_something_to_write_and_said_to_be(tmp_path):
    for words in (["demo", "--set", "host_bytes=1MiB"], ["bench", "layers"]):
        ran = layercast(*words, HOME=str(tmp_path), cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
        assert ran.returncode == 2, ran.stdout + ran.stderr
        assert list(tmp_path.iterdir()) == []
    ran = layercast("doctor", "--json", "deep/doctor.json", HOME=str(tmp_path), cwd=tmp_path)
    assert ran.stderr == "made the folder deep\n"
    assert layercast("doctor", "--json", "deep/doctor.json", HOME=str(tmp_path), cwd=tmp_path).stderr == ""


@pytest.mark.parametrize("command", [["doctor"], ["demo"], ["bench", "layers"]])
@pytest.mark.parametrize("place", ["mistyped/deep", "/no-such-folder"])
def test_a_folder_is_made_in_one_that_is_there_alone_and_never_beside_the_systems_own(command, place, tmp_path):
    options = ["--json"] if command == ["doctor"] else ["--json", "--out"]
    for option in options:
        chosen = place if option == "--out" else f"{place}/x.json"
        ran = layercast(*command, option, chosen, HOME=str(tmp_path), cwd=tmp_path)
        told = f"layercast: {place}: is not there; make it first (mkdir -p), or choose another with {option}\n"
        assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", told)
        assert list(tmp_path.iterdir()) == []


def test_the_package_runs_as_a_module():
    ran = subprocess.run([sys.executable, "-m", "layercast", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"layercast {__version__}\n"


def test_a_settings_file_that_is_not_there_is_named_without_a_number(tmp_path):
    ran = layercast("doctor", "--config", "/no.toml", HOME=str(tmp_path))
    assert "/no.toml: can't be read: No such file" in ran.stdout
    assert "Errno" not in ran.stdout


def test_a_demo_in_vllm_without_vllm_says_what_installs_it(tmp_path):
    code = "import sys; sys.modules['vllm'] = None; from layercast.cli import main; main()"
    command = [sys.executable, "-c", code, "demo", "--vllm", "--out", str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "make demo-vllm" in ran.stderr


def test_the_command_line_loads_no_engine_and_no_picture_library():
    code = (
        "import sys, layercast.cli, layercast.doctor.examine, layercast.demo.report, layercast.demo.model;"
        "print([name for name in ('torch', 'transformers', 'vllm', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_why_prints_the_receipts_of_a_request_and_fails_without_any(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text('INFO receipt {"request":"cmpl-1-0","prompt_tokens":9,"computed_tokens":9}\n')
    done = layercast("why", "cmpl-1", str(log))
    assert (done.returncode, done.stdout) == (0, "cmpl-1-0: 9 prompt tokens, 9 computed, nothing loaded\n")
    other = layercast("why", "cmpl-2", str(log))
    assert (other.returncode, other.stdout, other.stderr.count("\n")) == (1, "", 1)
    assert "cmpl-1-0" in other.stderr
    log.write_text("INFO nothing of ours\n")
    assert "print(result.receipt.sentence)" in layercast("why", "cmpl-2", str(log)).stderr


def test_a_folder_named_beside_other_settings_stands_in_the_flag(tmp_path):
    theirs = tmp_path / "nixl.json"
    theirs.write_text('{"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}')
    arguments = ["doctor", "--from", str(theirs), "--set", f"disk_path={tmp_path}/kv", "--set", "disk_bytes=1KiB"]
    ran = layercast(*arguments, HOME=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f'"kv_connector_extra_config":{{"disk_path":"{tmp_path}/kv","disk_bytes":1024}}' in ran.stdout
    assert layercast(*arguments[:3], HOME=str(tmp_path)).returncode == 1
