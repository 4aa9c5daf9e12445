"""Measurements that a user runs on their own machine: what copies, gates and overlap cost and reach there."""
