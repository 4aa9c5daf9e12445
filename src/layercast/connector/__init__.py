"""Engine adapters: they translate an engine's hooks to the rooms below, and hold no logic of their own."""
