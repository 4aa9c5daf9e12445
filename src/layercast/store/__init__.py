"""Bytes under a key, and the slab whose slots hold them. Knows spec only."""
