"""What would go wrong: on this machine, with a model under vLLM, with another connector's settings."""
