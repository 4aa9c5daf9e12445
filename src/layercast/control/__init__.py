"""Who talks to whom: directory and leases, push states, messages, and the node that owns threads."""
