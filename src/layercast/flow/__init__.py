"""The arms joined: layerwise load and save, push and receive, over movers, gates and transports."""
