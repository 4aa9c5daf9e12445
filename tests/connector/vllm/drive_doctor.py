"""What vLLM registers of a few models, beside what `layercast doctor` foretells from their configs."""

import sys

from lab import Engine, model, tell, without_checkpoints

from layercast.config import Config
from layercast.doctor.machine import Facts
from layercast.doctor.model import config_of, model_of
from layercast.doctor.vllm import block_tokens

SETTINGS = {
    "llama": {},
    "gpt_oss": {},
    "granite4h": {"enable_prefix_caching": True, "mamba_cache_mode": "align"},
    "deepseek_v3": {},
}
FLOAT32 = 2
"""Times what vLLM would take by itself: these tests compute in float32."""
HERE = Facts(config=Config(host_bytes=1 << 30))
without_checkpoints()
found = {}
for name, settings in SETTINGS.items():
    path = model(sys.argv[1], name)
    foretold = model_of(config_of(path, {}))
    engine = Engine(path, dtype="float32", **({"block_size": None} | settings))
    groups = engine.slab.layout.groups
    attention = [group for group in groups if group.spec.kind != "recurrent"]
    found[name] = {
        "layers": [
            foretold.layers,
            {k: sum(len(g.layers) for g in groups if g.spec.kind == k) for k in foretold.layers},
        ],
        "token_bytes": [
            FLOAT32 * foretold.token_bytes * foretold.attention_layers,
            sum(group.block_bytes // group.spec.block_size for group in attention),
        ],
        "state_bytes": [
            FLOAT32 * foretold.state_bytes * foretold.recurrent_layers,
            sum(group.block_bytes for group in groups if group not in attention),
        ],
        "block_tokens": [block_tokens(foretold, HERE), max(group.spec.block_size for group in groups)],
    }
    del groups, attention
    assert engine.close() == []
tell(found)
