"""An embedded engine on Hugging Face models: `Cache.update` is the gate and the hand-off; nothing is patched."""
