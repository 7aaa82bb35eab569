"""Network namespaces as hosts: each has one interface, on a bridge in a namespace of its own, and sends at a limited rate."""
import contextlib
import os
import pathlib
import shutil
import subprocess

PREFIX = "ebb-net-"
INTERFACE = "eth0"


class Unavailable(Exception):
    """This process may not make namespaces, or the kernel cannot limit rates; says why."""


class CommandError(Exception):
    pass


def command(*argv):
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"{' '.join(argv)}: {error}") from None
    if done.returncode != 0:
        raise CommandError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _namespaces():
    return [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()]


def remove_abandoned():
    """Those of runs that were killed."""
    for name in _namespaces():
        owner = name[len(PREFIX) :].partition("-")[0]
        if name.startswith(PREFIX) and not pathlib.Path("/proc", owner).exists():
            with contextlib.suppress(CommandError):
                command("ip", "netns", "del", name)


class Hosts:
    """`count` hosts, 10.77.0.1 and so on. remove() takes them down; their processes must have ended."""

    def __init__(self, count):
        self.count = count
        self.switch = f"{PREFIX}{os.getpid()}-switch"
        self.names = [f"{PREFIX}{os.getpid()}-{i}" for i in range(count)]
        self.delay_us = 0
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self):
        for name in [self.switch, *self.names]:
            command("ip", "netns", "add", name)
        command("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            port = f"port{i}"
            command("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            command("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")
            command("ip", "-n", name, "address", "add", f"{self.address(i)}/24", "dev", INTERFACE)
            for interface in ["lo", INTERFACE]:
                command("ip", "-n", name, "link", "set", interface, "up")

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def limit(self, gbit, delay_us=0):
        """What each host sends from now on, in Gb/s: a token bucket on its interface. Receiving is not limited but by
        what the others send. A delay of packets on top where the kernel has netem; self.delay_us says whether."""
        burst = max(128 << 10, int(gbit * 1e9 / 8 * 2e-3))  # 2 ms: timers of 250 Hz kernels and above keep the rate.
        self.delay_us = delay_us
        for name in self.names:
            tc = ["tc", "-n", name, "qdisc"]
            with contextlib.suppress(CommandError):
                command(*tc, "del", "dev", INTERFACE, "root")
            command(*tc, "add", "dev", INTERFACE, "root", "handle", "1:", "tbf",
                    "rate", f"{int(gbit * 1000)}mbit", "burst", str(burst), "latency", "50ms")  # fmt: skip
            if self.delay_us:
                try:
                    command(*tc, "add", "dev", INTERFACE, "parent", "1:1", "handle", "10:", "netem",
                            "delay", f"{delay_us}us", "limit", "20000")  # fmt: skip
                except CommandError:
                    self.delay_us = 0

    def inside(self, host, argv):
        """`argv` to be run on a host; the process that is started is the program itself."""
        return ["ip", "netns", "exec", self.names[host], *argv]

    def remove(self):
        for name in [*self.names, self.switch]:
            with contextlib.suppress(CommandError):
                command("ip", "netns", "del", name)


def sent_bytes(pid):
    """What the interface of the process's host has sent: frames with all headers, without the preamble and checksum that
    only a real wire has."""
    for line in pathlib.Path("/proc", str(pid), "net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == INTERFACE:
            return int(rest.split()[8])
    raise CommandError(f"process {pid} sees no interface {INTERFACE}")


def require():
    """@raises Unavailable"""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces are made by root; run it as root")
    missing = [tool for tool in ["ip", "tc"] if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not found; install iproute2")
    try:
        remove_abandoned()
        hosts = Hosts(2)
    except CommandError as error:
        raise Unavailable(f"network namespaces are not allowed here: {error}") from None
    try:
        hosts.limit(1.0)
    except CommandError as error:
        raise Unavailable(f"the kernel does not limit rates by tbf: {error}") from None
    finally:
        hosts.remove()
