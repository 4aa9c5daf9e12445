"""Answer two prompts with one prefix: the second finds the first one's KV in the pool. A tiny model, random weights.

python examples/save_and_hit.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.requests import Params


def tiny_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def main() -> None:
    document = torch.randint(3, 512, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    questions = {"cold": [*document, 7, 8, 9], "warm": [*document, 7, 8, 9], "other question": [*document, 30, 31]}
    with open_engine(tiny_llama(), Config(host_bytes=32 << 20)) as engine:
        for name, prompt in questions.items():
            (result,) = engine.generate([prompt], Params(max_tokens=8))
            engine.drain(timeout_s=10)  # what was saved is visible once its copies have ended
            print(f"{name}: answer {result.tokens}")
            print(f"  {result.receipt.sentence}")


if __name__ == "__main__":
    main()
