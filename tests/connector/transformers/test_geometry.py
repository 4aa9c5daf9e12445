import pytest
from transformers.cache_utils import DynamicCache

from layercast.connector.transformers.geometry import read_geometry
from layercast.errors import UnsupportedModel
from layercast.spec.groups import GroupKind
from layercast.spec.planes import PlaneKind


def groups(model):
    return [(spec.kind, spec.block_size, spec.layers, spec.window) for spec in read_geometry(model).specs(16, 64)]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [(GroupKind.FULL, 16, (0, 1, 2, 3), None)]),
        ("gemma3", [(GroupKind.WINDOW, 16, (0, 1, 3, 4), 32), (GroupKind.FULL, 16, (2, 5), None)]),
        ("deepseek_v3", [(GroupKind.LATENT, 16, (0, 1, 2, 3), None)]),
        ("granite4", [(GroupKind.FULL, 16, (2,), None), (GroupKind.RECURRENT, 64, (0, 1, 3), None)]),
        ("falcon_h1", [(GroupKind.FULL, 16, (1, 3, 5, 7), None), (GroupKind.RECURRENT, 64, (0, 2, 4, 6), None)]),
    ],
)
def test_groups_are_those_that_transformers_chooses(models, family, expected):
    assert groups(models(family)) == expected


def test_a_latent_layer_has_rows_of_two_widths(models):
    part = read_geometry(models("deepseek_v3")).layers[0].attention
    assert part.kind is GroupKind.LATENT
    assert [(each.kind, each.shape) for each in part.contents] == [
        (PlaneKind.LATENT, (1, 32)),
        (PlaneKind.ROPE, (1, 16)),
    ]


def test_a_recurrent_state_keeps_the_dtypes_that_the_model_writes(models):
    part = read_geometry(models("qwen3_next")).layers[0].state
    assert [(each.kind, each.shape) for each in part.contents] == [
        (PlaneKind.CONV, (256, 4)),
        (PlaneKind.STATE, (8, 16, 16)),
    ]


def test_mamba_1_is_refused_with_the_reason(models):
    with pytest.raises(UnsupportedModel, match=r"JambaForCausalLM.*Mamba-1.*several tokens.*wrong text"):
        read_geometry(models("jamba"))


def test_a_kind_of_layer_that_is_not_known_is_refused_by_name(models, monkeypatch):
    class SparseLayer(type(DynamicCache(config=models("llama").config).layers[0])):
        pass

    class Odd(DynamicCache):
        def __init__(self, config):
            super().__init__(config=config)
            self.layers[2].__class__ = SparseLayer

    monkeypatch.setattr("layercast.connector.transformers.geometry.DynamicCache", Odd)
    with pytest.raises(UnsupportedModel, match=r"layer 2 \(SparseLayer\)"):
        read_geometry(models("llama"))


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [("num_kv_shared_layers", 2, "read the KV of other layers"), ("layer_types", ["chunked_attention"], "chunked")],
)
def test_models_whose_layers_share_or_chunk_are_refused(models, monkeypatch, setting, value, reason):
    monkeypatch.setattr(models("llama").config, setting, value, raising=False)
    with pytest.raises(UnsupportedModel, match=reason):
        read_geometry(models("llama"))
