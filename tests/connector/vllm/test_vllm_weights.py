"""Weights are named by what they are: any change of them is another name, another place is not."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers

from layercast.errors import UnsupportedModel

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def digest(path, draft=None, load_format="auto"):
    from layercast.connector.vllm.weights import weights_digest

    def model(folder):
        config = (
            transformers.AutoConfig.from_pretrained(folder) if folder.is_dir() else transformers.LlamaConfig(**SMALL)
        )
        return SimpleNamespace(model=str(folder), revision=None, hf_config=config)

    return weights_digest(
        SimpleNamespace(
            model_config=model(path),
            load_config=SimpleNamespace(load_format=load_format, download_dir=None),
            speculative_config=None if draft is None else SimpleNamespace(draft_model_config=model(draft)),
        )
    )


def change(path, name, value=1.01):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_parameter(name).mul_(value)
    model.save_pretrained(path)


def test_a_copy_elsewhere_has_the_same_name(path, tmp_path):
    before = digest(path)
    shutil.copytree(path, tmp_path / "copy")
    assert digest(tmp_path / "copy") == before
    assert len(before) == 64


def test_any_tensor_that_has_changed_changes_the_name(path):
    names = [name for name, _ in transformers.AutoModelForCausalLM.from_pretrained(path).named_parameters()]
    seen = {digest(path)}
    for name in names:
        change(path, name)
        seen.add(digest(path))
    assert len(seen) == len(names) + 1 > 15


def test_the_configuration_counts(path):
    before = digest(path)
    text = (path / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in text
    (path / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert digest(path) != before


def test_a_draft_counts(path, tmp_path):
    shutil.copytree(path, tmp_path / "draft")
    before = digest(path, tmp_path / "draft")
    assert before != digest(path)
    change(tmp_path / "draft", "model.norm.weight")
    assert digest(path, tmp_path / "draft") != before


def test_made_up_weights_are_not_those_of_the_files(path):
    assert digest(path, load_format="dummy") != digest(path)


def test_a_file_of_another_form_is_sampled(path):
    torch.save({"a": torch.arange(100_000)}, path / "more.bin")
    one = digest(path)
    torch.save({"a": torch.arange(100_000) + 1}, path / "more.bin")
    assert digest(path) != one


@pytest.mark.parametrize("name", ["nobody/has-this-model", "/no/such/folder/at/all"])
def test_weights_that_are_no_files_here_are_refused(tmp_path, name):
    with pytest.raises(UnsupportedModel, match="disk_path"):
        digest(tmp_path.__class__(name))


def test_a_folder_without_weights_is_refused(path):
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="disk_path"):
        digest(path)


def test_kv_on_disk_is_named_after_the_longest_context_too(path):
    """Phi-3's long rope has other factors, and so other keys, from a length on."""
    from layercast.connector.vllm.registration import _lasting_names

    def names(tokens):
        model = SimpleNamespace(
            model=str(path), hf_config=transformers.AutoConfig.from_pretrained(path), max_model_len=tokens
        )
        load = SimpleNamespace(load_format="auto", download_dir=None)
        return _lasting_names(
            SimpleNamespace(model_config=model, load_config=load, speculative_config=None, cache_config=None)
        )

    assert names(4096) == names(4096)
    assert names(4096) != names(4097)
