"""What should move: pieces, windows, deadline order, usable prefix, resharding. Pure; numpy only."""
