import json
import shlex

import msgspec
import pytest

from layercast.config import Config, from_mapping
from layercast.doctor.checks import Level
from layercast.doctor.machine import Facts, gather, judge
from layercast.doctor.model import Model
from layercast.doctor.vllm import (
    MODULE,
    block_tokens,
    bytes_per_token,
    judge_model,
    serve_command,
)
from layercast.spec.groups import GroupKind

FULL, WINDOW, LATENT, RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.LATENT, GroupKind.RECURRENT
LLAMA = Model(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    layers={FULL: 30},
    token_bytes=768,
    state_bytes=0,
    longest=8192,
)
HYBRID = msgspec.structs.replace(LLAMA, layers={FULL: 4, RECURRENT: 36}, state_bytes=400_000)
HERE = Facts(vllm="0.32.0", gpu=False, config=Config(host_bytes=1 << 30))

ON_GPU = msgspec.structs.replace(HERE, gpu=True)


def finding(name, model=LLAMA, at=HERE, **changes):
    own = {key: value for key, value in changes.items() if key in Model.__struct_fields__}
    rest = {key: value for key, value in changes.items() if key not in own}
    found = judge_model(msgspec.structs.replace(model, **own), msgspec.structs.replace(at, **rest))
    return next((check for check in found if check.name == name), None)


def test_a_plain_model_in_a_good_place_has_nothing_but_ok():
    assert {check.level for check in judge_model(LLAMA, ON_GPU)} == {Level.OK}


@pytest.mark.parametrize(
    ("name", "changes", "level", "says"),
    [
        ("vllm", {"vllm": None}, Level.WARNING, "not installed"),
        ("vllm", {"command": False}, Level.WARNING, "does not start"),
        ("vllm", {"vllm": "0.25.1"}, Level.WARNING, "0.26 to 0.33"),
        ("allocator", {"expandable": True}, Level.ERROR, "expandable_segments"),
        ("plugin", {"plugin": False}, Level.NOTE, "not installed beside vLLM"),
        ("plugin", {"allowed": False}, Level.WARNING, "VLLM_PLUGINS"),
        ("model", {"encoder_decoder": True}, Level.ERROR, "LlamaForCausalLM"),
        ("model", {"unknown": ("chunked_attention",)}, Level.WARNING, "chunked_attention"),
        ("model", {"layers": {RECURRENT: 8}, "first_mamba": True}, Level.ERROR, "no kernel for Mamba-1"),
        ("model", {"layers": {RECURRENT: 8}, "first_mamba": True, "gpu": True}, Level.WARNING, "never tried"),
        ("model", {"sparse": True}, Level.WARNING, "index"),
        ("weights", {"weight_bytes": None}, Level.WARNING, "would not start"),
        ("groups", {"vllm": "0.26.0"}, Level.OK, "layer by layer"),
        ("groups", {"layers": {FULL: 5, WINDOW: 25}}, Level.OK, "in the background"),
        ("groups", {"layers": {FULL: 5, WINDOW: 25}, "vllm": "0.29.0"}, Level.ERROR, "refuses"),
        ("groups", {"layers": {WINDOW: 30}, "vllm": "0.28.0"}, Level.ERROR, "refuses"),
        ("groups", {"layers": {WINDOW: 30}, "vllm": "0.29.0"}, Level.OK, "layer by layer"),
        ("bytes", {}, Level.OK, "23,040 bytes a token in bfloat16, 2,949,120 bytes a block of 128 tokens"),
        ("bytes", {"gpu": True}, Level.OK, "368,640 bytes a block of 16 tokens"),
        ("bytes", {"layers": {RECURRENT: 8}}, Level.NOTE, "not known"),
        ("room", {}, Level.OK, "46,603 tokens: 5.7 prompts of 8,192"),
        ("room", {"longest": 131_072}, Level.NOTE, "0.4 prompts"),
        ("room", {"longest": 0}, Level.OK, "46,603 tokens."),
        ("room", {"config": Config(host_bytes=1 << 20)}, Level.ERROR, "45 tokens, less than a block of 128"),
        ("cache", {}, Level.NOTE, "nearly all memory"),
        ("ranks", {"layers": {LATENT: 30}}, Level.OK, "all of it"),
        ("drafts", {"drafts": 1}, Level.NOTE, "one block shorter"),
    ],
)
def test_each_trouble_has_its_level_and_says_what_was_found(name, changes, level, says):
    check = finding(name, **changes)
    assert check.level is level
    assert says in check.found
    assert check.advice or level in (Level.OK, Level.NOTE)


@pytest.mark.parametrize("model", [LLAMA, HYBRID])
@pytest.mark.parametrize("gpu", [True, False])
def test_the_memory_that_is_advised_holds_the_longest_prompt(model, gpu):
    at = msgspec.structs.replace(HERE, gpu=gpu, config=Config(host_bytes=1 << 20))
    advised = from_mapping({"host_bytes": finding("room", model, at).advice.split("host_bytes=")[1]}).host_bytes
    assert finding("room", model, at, config=Config(host_bytes=advised)).level is Level.OK
    assert finding("room", model, at, config=Config(host_bytes=advised - (1 << 20))).level is Level.NOTE


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("gib", [1, 2, 8, 64])
def test_no_more_memory_is_advised_than_is_found_to_be_enough(gpu, gib):
    facts = gather(None, {}, ["host_bytes=1048576"])
    at = msgspec.structs.replace(HERE, gpu=gpu, memory_free=gib << 30, config=Config(host_bytes=1 << 20))
    room = finding("room", msgspec.structs.replace(LLAMA, longest=1 << 20), at)
    facts = msgspec.structs.replace(
        facts, memory_free=gib << 30, config=Config(host_bytes=room.advice.split("host_bytes=")[1])
    )
    assert next(check for check in judge(facts) if check.name == "memory").level is Level.OK


def test_where_memory_is_too_small_already_no_more_of_it_is_advised():
    assert finding("room", longest=1 << 20, memory_free=1 << 30).advice == ""


def test_on_a_cpu_prompts_that_do_not_fit_beside_the_slab_are_cut_in_the_command():
    long, at = msgspec.structs.replace(LLAMA, longest=1 << 20), msgspec.structs.replace(HERE, memory_free=8 << 30)
    words, _ = parsed(serve_command("m", long, at))
    most = int(words[words.index("--max-model-len") + 1])
    assert int(words[words.index("--kv-cache-memory-bytes") + 1]) == 2 * most * 30 * 768 <= 4 << 30
    assert str(most) in finding("cache", long, at).advice
    assert "--max-model-len" not in serve_command("m", LLAMA, at)


def test_a_hybrids_block_is_long_enough_that_its_attention_is_no_smaller_than_a_state():
    at = msgspec.structs.replace(HERE, gpu=True)
    tokens = block_tokens(HYBRID, at)
    assert tokens % 16 == 0
    assert tokens * HYBRID.token_bytes >= HYBRID.state_bytes > (tokens - 16) * HYBRID.token_bytes
    assert bytes_per_token(HYBRID, at) == pytest.approx(4 * 768 + 36 * 400_000 / tokens)


def parsed(command):
    words = shlex.split(command)
    return words, json.loads(words[words.index("--kv-transfer-config") + 1])


def test_the_command_has_what_differs_from_the_defaults_and_can_be_typed():
    at = msgspec.structs.replace(HERE, config=Config(host_bytes=1 << 30, lease_s=5.0, disk_path="/it's here"))
    words, transfer = parsed(serve_command("my model", LLAMA, at, "kv_consumer"))
    assert words[:3] == ["vllm", "serve", "my model"]
    assert "--mamba-cache-mode" not in words
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_consumer", "recompute")
    assert from_mapping(transfer["kv_connector_extra_config"]) == at.config
    assert "kv_connector_module_path" not in transfer


def test_sizes_in_the_command_and_in_advice_have_units():
    at = msgspec.structs.replace(HERE, config=Config(host_bytes=20 << 30, disk_bytes=2_500_000_000))
    _, transfer = parsed(serve_command("m", LLAMA, at))
    assert transfer["kv_connector_extra_config"] == {"host_bytes": "20GiB", "disk_bytes": "2.5GB"}
    room = finding("room", config=Config(host_bytes=1 << 20))
    assert room.advice.endswith("iB")
    assert str(1 << 20) not in room.found


def test_a_hybrid_gets_the_flags_that_keep_its_states_and_an_unseen_plugin_its_module():
    words, transfer = parsed(serve_command("m", HYBRID, msgspec.structs.replace(HERE, plugin=False)))
    assert words[words.index("--mamba-cache-mode") + 1] == "align"
    assert "--enable-prefix-caching" in words
    assert transfer["kv_connector_module_path"] == MODULE


def test_the_place_is_looked_at_through_the_environment_that_is_given(tmp_path):
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    closed = {"VLLM_PLUGINS": "others", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    at = gather(None, home | closed, ())
    assert (at.allowed, at.expandable) == (False, True)
    assert gather(None, home | {"VLLM_PLUGINS": "a,layercast"}, ()).allowed
    assert gather(None, home, ()).allowed


def test_on_a_cpu_vllms_own_cache_is_bounded_and_still_holds_the_longest_prompt():
    words, _ = parsed(serve_command("m", msgspec.structs.replace(LLAMA, longest=131_072), HERE))
    assert int(words[words.index("--kv-cache-memory-bytes") + 1]) == 2 * 131_072 * 30 * 768
    assert "--kv-cache-memory-bytes" not in serve_command("m", LLAMA, ON_GPU)
    assert finding("cache", at=ON_GPU) is None
