"""Which blocks an engine with layercast's connector saves and loads, and whether the bytes come back, group by group.

What is compared are the engine's own tensors, whole blocks of them, and nothing that layercast makes of them.
`lift` takes hybrid models where the connector refuses them: vLLM before 0.29 and 0.30.
"""

import logging

import torch
from vllm.v1.kv_cache_interface import MambaSpec
from vllm_layercast import Ours

from layercast.connector.vllm import connector, saves, scheduler, versions
from layercast.connector.vllm.worker import WorkerHooks
from layercast.errors import UnsupportedModel
from layercast.observe.receipts import receipts_in

LIFTED = []
"""Why the connector refused the model that runs here all the same."""
STATES = {}
"""Recurrent groups to the tokens of their blocks."""


class Moves(Ours):
    """An engine whose saves and loads are noted."""

    def __init__(self, engine):
        super().__init__(engine)
        self.saved, self.loaded, self.lines = [], [], []
        begin = self.worker_side._worker.begin

        def noted(orders, after=()):
            self.saved += [pairs for save in orders.saves for pairs in save.pairs]
            self.loaded += [pairs for load in (*orders.loads, *orders.background) for pairs in load.pairs]
            return begin(orders, after)

        self.worker_side._worker.begin = noted
        log, handler = logging.getLogger("layercast"), logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        caches, layers = self.scheduler.kv_cache_config, self.core.vllm_config.compilation_config.static_forward_context
        self.blocks = caches.num_blocks
        self.tensors = [
            [tensor for name in group.layer_names for tensor in flat(layers[name].kv_cache)]
            for group in caches.kv_cache_groups
        ]
        self.modules = [layers[name] for group in caches.kv_cache_groups for name in group.layer_names]

    def facts(self):
        specs = self.scheduler_side.side.specs
        return {
            **super().facts(),
            "layout": self.scheduler_side._layout,
            "groups": [f"{spec.kind}: {len(spec.layers)} layers, blocks of {spec.block_size}" for spec in specs],
            "tensors": sorted({f"{tuple(t.shape)} {t.stride()} {t.dtype}" for each in self.tensors for t in each}),
            "backends": sorted({module.get_attn_backend().get_name() for module in self.modules}),
            "refused": LIFTED,
        }

    def moved(self, prefix, new, tokens, count):
        """Hits from the connector: the bytes they load beside those saved, and tokens beside a hit in GPU memory."""
        return {"runs": [self._moved(prefix, new, tokens) for _ in range(count)], "troubles": self.troubles()}

    def _moved(self, prefix, new, tokens):
        base = self.tokens(prefix)
        ids, kept, ended = [*base, *self.tokens(new)], {}, self.scheduler_side.outcomes
        ended.clear()
        self.lines.clear()
        for prompt in (base, ids):
            self.saved.clear()
            self.answer(prompt)
            self.idle(0.3)
            kept |= self._bytes(self.saved)  # now: blocks that are free may be others' by the next answer
        near = [self.answer(ids, tokens)[1] for _ in range(2)]
        self._emptied()
        self.loaded.clear()
        self.answer(ids)
        loaded = self._bytes(self.loaded)
        self._emptied()
        far = self.answer(ids, tokens)[1]
        self.settle(0.3)
        self.forget()
        outcomes = list(ended)
        first, second, last = (reply.outputs[0].token_ids for reply in (*near, far))
        return {
            "bytes": [self._compared(kept, loaded, group) for group in range(len(self.tensors))],
            "reproducible": first == second,
            "tokens_equal": second == last,
            "distinct": len(set(last)),
            "cached": [reply.num_cached_tokens for reply in (*near, far)],
            "loads": [counts(end) for end in outcomes if hasattr(end, "end")],
            "saves": [counts(end) for end in outcomes if hasattr(end, "saved")],
            "receipts": [f"{r.layout}: {r.sentence}" for r in receipts_in(self.lines, "") if r.loaded_tokens],
        }

    def _compared(self, kept, loaded, group):
        """Of one group's loaded blocks: how many, their bytes, and whether all are those that were saved."""
        pairs = [(kept.get(key), rows) for key, rows in loaded.items() if key[0] == group]
        return {
            "blocks": len(pairs),
            "bytes": sum(row.numel() for _, rows in pairs for row in rows),
            "equal": all(
                saved is not None and all(torch.equal(a, b) for a, b in zip(saved, rows, strict=True))
                for saved, rows in pairs
            ),
            "not_zero": sum(bool(row.any()) for _, rows in pairs for row in rows),
        }

    def _bytes(self, moved):
        """(group, slot) to what the engine's block holds now, tensor by tensor."""
        self._synchronised()
        found = {}
        for pairs in moved:
            index = torch.tensor(pairs.blocks, device=self.device)
            held = [
                tensor.unflatten(0, (self.blocks, -1))[index].flatten(1).view(torch.uint8)
                for tensor in self.tensors[pairs.group]
            ]
            found |= {(pairs.group, slot): [rows[at] for rows in held] for at, slot in enumerate(pairs.slots)}
        return found

    def _emptied(self):
        """Forget what the GPU holds, and change every byte of it: what is not loaded is to be seen."""
        self.settle(0.3)
        self.forget()
        self._synchronised()
        for tensor in (tensor for each in self.tensors for tensor in each):
            tensor.mul_(-1).add_(1)
        self._synchronised()

    def _synchronised(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def flat(caches):
    """One layer's tensors: states come as several."""
    return [caches] if isinstance(caches, torch.Tensor) else [tensor for cache in caches for tensor in flat(cache)]


def counts(end):
    """What the metrics count of a load or save."""
    how = str(end.end) if hasattr(end, "end") else "saved" if end.saved else "not saved"
    return f"{how}: {end.nbytes} bytes, {end.layers} layers, {end.pieces} pieces"


class Followed(versions.Tables):
    """Tables that know where a step leaves recurrent states: chunks end at block boundaries ("align")."""

    def step(self, output):
        super().step(output)
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self._ends = {name: tokens + scheduled[name] for name, tokens in before.items()}

    def snapshots(self, name):
        end, tables = self._ends[name], self.of(name)
        return [(group, tables[group][end // size - 1], end) for group, size in STATES.items() if end % size == 0]


def lift():
    """Run what the connector refuses in this version. A load that fails ends the engine then: for proofs only.

    Recurrent states, which older versions register as views of a page, are registered as the page.
    """
    refuse, register = connector.refuse, WorkerHooks.register_kv_caches

    def noted(config, caches):
        try:
            refuse(config, caches)
        except UnsupportedModel as error:
            LIFTED[:] = [str(error)]
        for index, group in enumerate(caches.kv_cache_groups):
            if isinstance(group.kv_cache_spec, MambaSpec):
                STATES[index] = group.kv_cache_spec.block_size

    def paged(self, tensors):
        register(self, {name: page(tensor) for name, tensor in tensors.items()})

    connector.refuse, WorkerHooks.register_kv_caches = noted, paged
    if not versions.TELLS_TABLES:
        scheduler.Tables = saves.Tables = Followed


def page(tensors):
    """One layer's tensor: of states, which lie behind one another in each block, all of a block's bytes."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    first = tensors[0]
    nbytes = first.stride(0) * first.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    return whole.as_strided(
        (len(first), 1, 1, nbytes), (nbytes, nbytes, nbytes, 1), first.data_ptr() - whole.data_ptr()
    )
