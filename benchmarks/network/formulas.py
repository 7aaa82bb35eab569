"""Payload that crosses hosts, summed over hosts, for `size` bytes on `hosts` hosts of `per_host` ranks, neighbours together.

For each collective what ebb's algorithm sends and what a ring in rank order would: each of the `hosts` links between
neighbours on different hosts carries all but one part of the data.
"""


def _pairs_across(hosts, per_host):
    return hosts * per_host * (hosts - 1) * per_host


def all_gather(size, hosts, per_host):
    """Each shard crosses to each other host once."""
    return (hosts - 1) * size


def reduce_scatter(size, hosts, per_host):
    """Directly each pair of ranks exchanges one part. In a chain one partial sum goes from host to host, and results go
    back from the last to their owners. The shorter one is taken."""
    direct = _pairs_across(hosts, per_host) * size / (hosts * per_host)
    chain = (hosts - 1) * size + size * (hosts - 1) / hosts
    return min(direct, chain)


def all_reduce(size, hosts, per_host):
    """As above, with results for everybody: two parts for each pair, or the chain and back."""
    direct = 2 * _pairs_across(hosts, per_host) * size / (hosts * per_host)
    chain = 2 * (hosts - 1) * size
    return min(direct, chain)


def ring(size, hosts, per_host):
    """An all-gather or a reduce-scatter."""
    ranks = hosts * per_host
    return hosts * size * (ranks - 1) / ranks


def step(mode, hosts, per_host, model_bytes, gathered_bytes):
    """(ebb's, the ring's) payload across hosts in one training step.

    @param model_bytes     parameters of all units; gradients have as many.
    @param gathered_bytes  of the units, each time they are gathered; full sharding alone gathers across hosts.
    """
    layout = (hosts, per_host)
    if mode == "full_shard":
        return (
            all_gather(gathered_bytes, *layout) + reduce_scatter(model_bytes, *layout),
            ring(gathered_bytes, *layout) + ring(model_bytes, *layout),
        )
    if mode == "hybrid":  # Shards within a host; each rank's shard of the gradients is summed with those of its copies.
        shard = model_bytes / per_host
        return per_host * all_reduce(shard, hosts, 1), per_host * 2 * ring(shard, hosts, 1)
    return all_reduce(model_bytes, *layout), 2 * ring(model_bytes, *layout)
