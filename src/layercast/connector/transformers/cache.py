"""A transformers `Cache` in paged memory: `update` waits for the layer, writes its rows, hands them off and gathers.

Lengths are known before data: masks and positions come from the view of the forward, rows from the blocks. Recurrent
layers have no call that always fires, so their gate is where the model asks for their state, and their hand-off is the
end of the forward. Runs on transformers 5.17 and later. Does not know requests or what moves.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from layercast.connector.transformers.geometry import Geometry, LayerGeometry, Part
from layercast.connector.transformers.memory import PagedMemory
from layercast.connector.transformers.view import ForwardView, GroupView
from layercast.flow.step import Step


class Moment:
    """What all layers share during one forward: its view, its step, and the layers whose gate was passed."""

    def __init__(self) -> None:
        self.view: ForwardView | None = None
        self.step: Step | None = None
        self._passed: set[int] = set()

    def begin(self, view: ForwardView, step: Step) -> None:
        """Start a forward."""
        self.view, self.step = view, step
        self._passed.clear()

    @property
    def continues(self) -> bool:
        """Whether this forward continues from cached tokens."""
        return self.view is not None and self.view.longest > 0

    def wait(self, layer: int) -> None:
        """Pass the layer's gate; once a forward, however often the model asks."""
        if self.step is not None and layer not in self._passed:
            self._passed.add(layer)
            self.step.wait(layer)

    def written(self, layer: int) -> None:
        """Hand the layer off."""
        if self.step is not None:
            self.step.written(layer)


class PagedLayer(CacheLayerMixin):
    """Per-token rows of one layer in paged memory."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, part: Part, group: int, memory: PagedMemory, moment: Moment) -> None:
        super().__init__()
        self.rows_id, self.group, self.moment = part.id, group, moment
        self.pool_keys, self.pool_values = memory.rows(part.id)
        self.is_sliding = part.window is not None
        self.is_initialized = True

    @property
    def view(self) -> GroupView:
        """The group's indices in this forward."""
        assert self.moment.view is not None
        view = self.moment.view.groups[self.group]
        assert view is not None
        return view

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the memory exists before the first token."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New rows `[B, heads, T, width]` in; all rows that the queries see out, `[B, heads, columns, width]`."""
        view = self.view
        self.moment.wait(self.rows_id)
        self.pool_keys[view.write_block, view.write_offset] = key_states.transpose(1, 2)
        self.pool_values[view.write_block, view.write_offset] = value_states.transpose(1, 2)
        self.moment.written(self.rows_id)
        return _gather(self.pool_keys, view), _gather(self.pool_values, view)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, position of the first column)."""
        return self.view.columns, self.view.offset

    def get_seq_length(self) -> int:
        """Tokens of the longest request before this forward."""
        return self.moment.view.longest if self.moment.view else 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def get_max_cache_shape(self) -> int:
        """As `get_max_length`; still abstract in transformers 5.17."""
        return -1


class StateLayer(LinearAttentionLayer):
    """The running state of one recurrent layer: a view of its block for one request, a gathered copy for several."""

    is_compileable = False

    def __init__(self, part: Part, memory: PagedMemory, moment: Moment) -> None:
        super().__init__()
        self.state_id, self.moment = part.id, moment
        self.pool_conv, self.pool_recurrent = memory.states(part.id)
        self.device, self.dtype = part.device, part.contents[0].dtype

    def enter(self) -> None:
        """Pass the gate, then present the states of this forward's requests to the model."""
        self.moment.wait(self.state_id)
        view = self.moment.view
        assert view is not None
        if self.conv_states[0] is not None:
            return
        self.conv_states[0] = _select(self.pool_conv, view.states)
        self.conv_kernel_size[0] = self.pool_conv.shape[-1]
        self.is_conv_states_initialized[0] = True
        self.has_previous_state[0] = self.moment.continues
        if self.pool_recurrent is not None:
            self.recurrent_states[0] = _select(self.pool_recurrent, view.states)
            self.is_recurrent_states_initialized[0] = True

    def leave(self) -> None:
        """Bring the states of several requests back to their blocks; those of one request are there already."""
        view = self.moment.view
        assert view is not None
        if len(view.states) > 1:
            blocks = torch.tensor(view.states)
            self.pool_conv[blocks] = self.conv_states[0]
            if self.pool_recurrent is not None:
                self.pool_recurrent[blocks] = self.recurrent_states[0]
        self.forget()

    def forget(self) -> None:
        """Present no state until the next `enter`."""
        self.conv_states[0] = self.recurrent_states[0] = None
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = False
        self.has_previous_state[0] = False


class HybridLayer(StateLayer, PagedLayer):
    """A layer with both: its mixers run side by side on the same input."""

    def __init__(self, attention: Part, state: Part, group: int, memory: PagedMemory, moment: Moment) -> None:
        PagedLayer.__init__(self, attention, group, memory, moment)
        StateLayer.__init__(self, state, memory, moment)


class LayerwiseCache(Cache):
    """The cache object that a model sees; one for the engine's whole life."""

    def __init__(self, geometry: Geometry, memory: PagedMemory) -> None:
        self.moment = Moment()
        owner = {layer: index for index, spec in enumerate(memory.specs) for layer in spec.layers}
        super().__init__(layers=[_layer(layer, owner, memory, self.moment) for layer in geometry.layers])
        self.state_layers = [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def begin(self, view: ForwardView, step: Step) -> None:
        """Start a forward over `view`, whose gates and hand-offs belong to `step`."""
        self.moment.begin(view, step)
        for layer in self.state_layers:
            layer.forget()

    def leave(self) -> None:
        """After the forward: every recurrent state lies in its request's block."""
        for layer in self.state_layers:
            layer.leave()

    def hand_off_states(self) -> None:
        """Tell the step that the recurrent layers are written."""
        for layer in self.state_layers:
            self.moment.written(layer.state_id)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the layer continues from a state; the gate of recurrent layers."""
        if layer_idx is not None:
            self._enter(layer_idx)
        return self.moment.continues

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The layer's conv state, None at a sequence's start; newer versions pass the gate here."""
        layer = self._enter(layer_idx)
        return layer.conv_states[0] if self.moment.continues else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The layer's recurrent state, None at a sequence's start."""
        layer = self._enter(layer_idx)
        return layer.recurrent_states[0] if self.moment.continues else None

    def _enter(self, layer_idx: int) -> StateLayer:
        layer = self.layers[layer_idx]
        layer.enter()
        return layer


def _layer(
    layer: LayerGeometry, owner: dict[int, int], memory: PagedMemory, moment: Moment
) -> CacheLayerMixin | LinearAttentionLayer:
    attention, state = layer.attention, layer.state
    if attention and state:
        return HybridLayer(attention, state, owner[attention.id], memory, moment)
    if attention:
        return PagedLayer(attention, owner[attention.id], memory, moment)
    return StateLayer(state, memory, moment) if state else LinearAttentionLayer()


def _gather(pool: torch.Tensor, view: GroupView) -> torch.Tensor:
    """The view's rows of a pool `[blocks, tokens, heads, width]`, as `[B, heads, columns, width]`."""
    heads, width = pool.shape[2:]
    rows = pool.flatten(1).index_select(0, view.read_blocks).view(-1, heads * width)
    if view.read_rows is None:
        rows = rows[view.first_row : view.first_row + view.columns]
    else:
        rows = rows.index_select(0, view.read_rows)
    return rows.view(-1, view.columns, heads, width).transpose(1, 2)


def _select(pool: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """States `[B, ...]`; for one request a view, so that what the model changes in place lies in the block."""
    return pool[blocks[0] : blocks[0] + 1] if len(blocks) == 1 else pool[torch.tensor(blocks)]
