"""Bytes between processes: one base, and a backend a file. Knows spec only."""
