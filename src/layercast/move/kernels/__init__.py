"""Triton kernels, each beside a reference that must equal it bit for bit. Importable without Triton or a device."""
