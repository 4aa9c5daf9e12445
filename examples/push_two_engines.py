"""One engine computes a prompt and pushes each layer to another, which answers. Over a local socket.

python examples/push_two_engines.py
Both engines live in this process for brevity; the ticket is a plain value, so it may as well cross to another one.
"""

import secrets

import torch
from save_and_hit import tiny_llama

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import Engine
from layercast.connector.transformers.requests import Params, Result
from layercast.transport.socket import SocketTransport


def finished(engine: Engine) -> Result:
    while True:
        for output in engine.step():
            if output.result is not None:
                return output.result


def main() -> None:
    model, config = tiny_llama(), Config(host_bytes=32 << 20)
    prompt = torch.randint(3, 512, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    secret = secrets.token_bytes(32)  # both sides prove that they know it
    with (
        open_engine(model, config, transport=SocketTransport(secret)) as prefill,
        open_engine(model, config, transport=SocketTransport(secret)) as decode,
    ):
        ticket = decode.offer(prompt, Params(max_tokens=8))
        print(f"ticket for {ticket.tokens} tokens, to {ticket.address.host} port {ticket.address.port}")
        prefill.submit(prompt, push=ticket)
        sent, answer = finished(prefill), finished(decode)
        for engine in (prefill, decode):
            engine.drain(timeout_s=10)
        (alone,) = decode.generate([prompt], Params(max_tokens=8, load=False))
    print(f"prefill: {sent.receipt.sentence}, {sent.finish}")
    print(f"decode: {answer.receipt.sentence}, answer {answer.tokens}")
    print(f"the same answer without a push: {alone.tokens == answer.tokens}")


if __name__ == "__main__":
    main()
