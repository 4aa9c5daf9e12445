import json

import pytest

from layercast.doctor.model import config_of, model_of, weight_bytes
from layercast.errors import BadSetting, Missing
from layercast.spec.groups import GroupKind

FULL, WINDOW, LATENT, RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.LATENT, GroupKind.RECURRENT
BASE = {
    "architectures": ["X"],
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_n_groups": 2}


@pytest.mark.parametrize(
    ("told", "layers"),
    [
        ({}, {FULL: 8}),
        ({"sliding_window": 512}, {WINDOW: 8}),
        ({"sliding_window": 512, "use_sliding_window": False}, {FULL: 8}),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, {WINDOW: 6, FULL: 2}),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4}, {WINDOW: 4, FULL: 4}),
        ({"layer_types": ["sliding_attention"] * 6 + ["full_attention"] * 2, "num_kv_shared_layers": 3}, {WINDOW: 5}),
        ({"kv_lora_rank": 512}, {LATENT: 8}),
        ({"full_attention_interval": 4}, {RECURRENT: 6, FULL: 2}),
        ({"attn_layer_indices": [1, 5]}, {RECURRENT: 6, FULL: 2}),
        ({"attn_layer_period": 4, "attn_layer_offset": 2}, {RECURRENT: 6, FULL: 2}),
        ({"hybrid_override_pattern": "M-M*E"}, {RECURRENT: 2, FULL: 1}),
        ({"model_type": "mamba2"}, {RECURRENT: 8}),
        ({"model_type": "falcon_h1"}, {FULL: 8, RECURRENT: 8}),
        ({"text_config": {"num_hidden_layers": 3}}, {FULL: 3}),
    ],
)
def test_layers_are_counted_by_kind_however_the_config_tells_them(told, layers):
    assert model_of(BASE | told).layers == layers


@pytest.mark.parametrize(
    ("told", "width"),
    [
        ({}, 2 * 4 * 64),
        ({"head_dim": 128}, 2 * 4 * 128),
        ({"num_key_value_heads": None}, 2 * 16 * 64),
        ({"multi_query": True}, 2 * 64),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 576),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "item"), [({}, 2), ({"dtype": "float32"}, 2), ({"dtype": None, "torch_dtype": "float16"}, 2)]
)
def test_a_token_is_as_wide_as_its_heads_or_its_latent(told, width, dtype, item):
    assert model_of(BASE | told | dtype).token_bytes == width * item


@pytest.mark.parametrize(
    ("told", "nbytes"),
    [
        ({"layer_types": ["mamba"] * 8, **MAMBA2}, 2 * (3 * (8 * 16 + 2 * 2 * 32) + 8 * 16 * 32)),
        ({"layer_types": ["mamba"] * 8, **MAMBA2, "mamba_ssm_dtype": "float32"}, 2 * 3 * 256 + 4 * 8 * 16 * 32),
        ({"layer_types": ["conv"] * 8, "conv_L_cache": 3}, 2 * 2 * 1024),
        (
            {
                "full_attention_interval": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 16,
                "linear_num_value_heads": 4,
                "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 4,
            },
            2 * (3 * (2 * 2 * 16 + 4 * 8) + 4 * 8 * 16),
        ),
        ({"layer_types": ["mamba"] * 8}, 0),
        ({}, 0),
    ],
)
def test_a_state_is_its_convolution_and_its_recurrence(told, nbytes):
    assert model_of(BASE | told).state_bytes == nbytes


@pytest.mark.parametrize(
    ("told", "first"),
    [
        ({"model_type": "mamba"}, True),
        ({"model_type": "falcon_mamba"}, True),
        ({"model_type": "jamba", "attn_layer_period": 4}, True),
        ({"model_type": "new", "layers_block_type": ["mamba", "attention"], "mamba_dt_rank": 8}, True),
        ({"model_type": "mamba2", "time_step_rank": 8}, False),
        ({"layer_types": ["mamba"] * 8, **MAMBA2}, False),
        ({}, False),
    ],
)
def test_mamba_1_is_told_from_its_successor(told, first):
    assert model_of(BASE | told).first_mamba is first


def test_a_layer_of_an_unknown_kind_is_named():
    found = model_of(BASE | {"layer_types": ["chunked_attention", "full_attention"] * 4})
    assert (found.unknown, found.layers) == (("chunked_attention",), {FULL: 4})


@pytest.mark.parametrize("wrong", [{}, {"hidden_size": 8}, {"num_hidden_layers": "many"}])
def test_what_is_no_language_models_config_is_refused(wrong):
    with pytest.raises(BadSetting, match="num_hidden_layers"):
        model_of(wrong)


def test_a_model_is_found_as_a_folder_a_file_or_a_name_in_the_cache_and_nowhere_else(tmp_path):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(BASE))
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    for name in (str(snapshot), str(snapshot / "config.json"), "some/model"):
        assert config_of(name, environ) == BASE
    assert config_of("some/model", {"HF_HOME": str(tmp_path)}) == BASE
    with pytest.raises(Missing, match="neither a folder with a config"):
        config_of(str(tmp_path), {})
    with pytest.raises(Missing, match=f"some/other.*{tmp_path}/hub.*download it first"):
        config_of("some/other", environ)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_file_that_is_no_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadSetting, match=r"config\.json"):
        config_of(str(tmp_path), {})


def test_weights_count_as_their_index_tells_or_else_as_the_files_do(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weight_bytes(str(tmp_path), {}) is None
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(70))
    assert weight_bytes(str(tmp_path / "config.json"), {}) == 70
    for part in (1, 2):
        (tmp_path / f"model-0000{part}-of-00002.safetensors").write_bytes(bytes(30))
    (tmp_path / "old.bin").write_bytes(bytes(9))
    assert weight_bytes(str(tmp_path), {}) == 60
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 50}}')
    assert weight_bytes(str(tmp_path), {}) == 50
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BadSetting, match=r"index\.json"):
        weight_bytes(str(tmp_path), {})
