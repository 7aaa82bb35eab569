"""make bench-network: bytes and time between hosts, which are network namespaces."""
