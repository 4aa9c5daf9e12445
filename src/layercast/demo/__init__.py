"""The demonstration: a small real model, its KV moved layer by layer, and what is shown of it."""
