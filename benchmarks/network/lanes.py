"""Lanes whose ranks are spread over hosts (network namespaces), and what those hosts send meanwhile."""
import itertools
import pathlib
import sys

from harness.lanes import Lane
from network.hosts import INTERFACE, sent_bytes

FIRST_PORT = 29400  # On a host of its own; each lane takes another.
_ports = itertools.count(FIRST_PORT)


class HostLane(Lane):
    """`per_host` ranks on each of `hosts`, neighbours together."""

    def __init__(self, name, hosts, per_host, argv, timeout=300.0):
        super().__init__(name, hosts.count * per_host, argv, timeout)
        self.hosts = hosts
        self.per_host = per_host

    def start(self):
        self.port = next(_ports)
        super().start()

    def place(self, rank, env):
        host = rank // self.per_host
        placed = dict(
            env,
            LOCAL_RANK=str(rank % self.per_host),
            LOCAL_WORLD_SIZE=str(self.per_host),
            MASTER_ADDR=self.hosts.address(0),
            MASTER_PORT=str(self.port),
            GLOO_SOCKET_IFNAME=INTERFACE,
            EBB_HOST_ID=self.hosts.names[host],  # Else ranks of one kernel share a host, whatever their network.
        )
        return self.hosts.inside(host, self.command(host)), placed

    def command(self, host):
        return self.argv

    def sent(self):
        """Of each host so far, in bytes."""
        return [sent_bytes(rank.process.pid) for rank in self.ranks[:: self.per_host]]

    def run_counted(self, command, event):
        """One reply per rank, and what each host sent."""
        before = self.sent()
        replies = self.ask(command, event)
        return replies, [after - before for after, before in zip(self.sent(), before)]


class TransferLane(HostLane):
    """A plain TCP transfer around all hosts."""

    def __init__(self, hosts):
        super().__init__("transfer", hosts, 1, [], timeout=120.0)

    def command(self, host):
        following = self.hosts.address((host + 1) % self.hosts.count)
        script = str(pathlib.Path(__file__).with_name("transfer.py"))
        return [sys.executable, "-u", script, self.hosts.address(host), following, str(self.port)]

    def measure(self, payload):
        """Bytes on the interfaces for each byte of payload, and payload bytes a second of each host."""
        replies, sent = self.run_counted(f"go {payload}", "done")
        return sum(sent) / (payload * len(sent)), payload / max(reply["seconds"] for reply in replies)
