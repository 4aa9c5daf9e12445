import pytest
import torch

from layercast.connector.transformers.geometry import read_geometry
from layercast.connector.transformers.memory import PagedMemory
from layercast.spec.groups import GroupKind
from layercast.spec.planes import PlaneKind

FAMILIES = ["llama", "gemma3", "deepseek_v3", "granite4", "falcon_h1"]


def memory_of(model, block_major=False):
    geometry = read_geometry(model)
    specs = geometry.specs(16, 64)
    return PagedMemory(geometry, specs, [5 + index for index in range(len(specs))], block_major=block_major)


@pytest.mark.parametrize("block_major", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_planes_name_every_element_of_every_tensor_once(models, family, block_major):
    memory = memory_of(models(family), block_major)
    seen = set()
    for group in memory.layout.groups:
        for plane in group.planes:
            tensor = memory.tensors[plane.layer][plane.kind]
            assert plane.blocks == tensor.shape[0]
            assert plane.block_bytes == tensor[0].numel() * tensor.element_size()
            for block in range(plane.blocks):
                assert tensor[block].data_ptr() == plane.base + block * plane.block_stride
                assert tensor[block].is_contiguous()
                span = range(tensor[block].data_ptr(), tensor[block].data_ptr() + plane.block_bytes)
                assert seen.isdisjoint((span[0], span[-1]))
                seen.update((span[0], span[-1]))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_keys_and_values_of_a_block_lie_side_by_side(models, family):
    (group,) = memory_of(models(family)).layout.groups
    for layer in group.layers:
        first, second = group.planes_of(layer)
        assert second.base == first.base + first.block_bytes
        assert first.block_stride == second.block_stride == group.layer_bytes(layer)


def test_block_major_puts_all_layers_of_a_block_together(models):
    (group,) = memory_of(models("llama"), block_major=True).layout.groups
    assert {plane.block_stride for plane in group.planes} == {group.block_bytes}


def test_latent_planes_have_no_head_to_cut_and_states_no_token(models):
    (latent,) = memory_of(models("deepseek_v3")).layout.groups
    assert {plane.kind for plane in latent.planes} == {PlaneKind.LATENT, PlaneKind.ROPE}
    assert all(plane.axis("head") is None and plane.axis("token") is not None for plane in latent.planes)
    recurrent = memory_of(models("granite4")).layout.groups[1]
    assert {plane.kind for plane in recurrent.planes} == {PlaneKind.CONV, PlaneKind.STATE}
    assert all(plane.axis("token") is None for plane in recurrent.planes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_poisoned_block_is_nan_in_every_layer_and_its_neighbours_are_not(models, dtype):
    memory = memory_of(models("granite4", dtype))
    for index, group in enumerate(memory.layout.groups):
        memory.poison(index, [2])
        for plane in group.planes:
            tensor = memory.tensors[plane.layer][plane.kind]
            assert tensor[2].isnan().all()
            assert not tensor[[0, 1, 3]].isnan().any()


def test_a_state_copied_onto_another_block_is_equal_in_every_layer(models):
    memory = memory_of(models("granite4"))
    at = next(i for i, spec in enumerate(memory.specs) if spec.kind is GroupKind.RECURRENT)
    for layer in memory.specs[at].layers:
        for tensor in memory.tensors[layer].values():
            tensor.normal_()
    memory.copy_block(at, 1, 3)
    for layer in memory.specs[at].layers:
        for tensor in memory.tensors[layer].values():
            assert torch.equal(tensor[1], tensor[3])
            assert not torch.equal(tensor[1], tensor[2])
