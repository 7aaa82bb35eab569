"""A lane is one contender: `world` processes that stay up and measure when told to.

Protocol, one line each way: the process says {"event": "ready", ...} once, then answers each "run K" on its stdin with
{"event": "ran", "times": [...], "losses": [...], "cpu": s, "peak_kb": k, ...}, and ends at "quit" or end of input.
Only one lane works at a time; the others wait for input and use no processor.
"""
import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time


class LaneError(Exception):
    pass


class Rank:
    """One process of a lane."""

    def __init__(self, argv, env, log_path):
        self.argv = argv
        self.log_path = log_path
        with open(log_path, "wb") as log:
            self.process = subprocess.Popen(
                argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.replies = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.replies.put(line)
        self.replies.put(None)

    def tell(self, command):
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise LaneError(self.describe_failure()) from None

    def reply(self, deadline):
        """The next line that is a message; anything else a library prints goes by."""
        while True:
            try:
                line = self.replies.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise LaneError("no answer in time\n" + self.describe_failure()) from None
            if line is None:
                raise LaneError(self.describe_failure())
            if line.startswith("{"):
                return json.loads(line)

    def describe_failure(self):
        with open(self.log_path, errors="replace") as log:
            tail = log.read()[-3000:]
        return f"{' '.join(self.argv)}\nexit code {self.process.poll()}, last of its stderr:\n{tail}"

    def stop(self):
        if self.process.poll() is None:
            try:
                self.process.stdin.write("quit\n")
                self.process.stdin.close()
            except (BrokenPipeError, ValueError, OSError):
                pass

    def reap(self, deadline):
        try:
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Lane:
    """`argv` starts one rank; it finds its place in the environment, as under torchrun."""

    def __init__(self, name, world, argv, timeout=300.0):
        self.name = name
        self.world = world
        self.argv = argv
        self.timeout = timeout
        self.ranks = []
        self.ready = []
        self.folder = None

    def start(self):
        self.folder = tempfile.TemporaryDirectory(prefix="ebb-bench-")  # mode 0700
        env = dict(
            os.environ,
            OMP_NUM_THREADS="1",
            MKL_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            WORLD_SIZE=str(self.world),
            LOCAL_WORLD_SIZE=str(self.world),
        )
        env.setdefault("EBB_LOG", "warn")
        for rank in range(self.world):
            env.update(RANK=str(rank), LOCAL_RANK=str(rank))
            argv, placed = self.place(rank, env)
            self.ranks.append(Rank(argv, placed, os.path.join(self.folder.name, f"rank{rank}.log")))
        self.ready = self._replies("ready")

    def place(self, rank, env):
        """Command and environment of a rank; here all ranks are on this host."""
        return self.argv, env

    def _replies(self, event):
        deadline = time.monotonic() + self.timeout
        replies = []
        for index, rank in enumerate(self.ranks):
            try:
                reply = rank.reply(deadline)
            except LaneError as error:
                raise LaneError(f"{self.name}, rank {index} of {self.world}: {error}") from None
            if reply.get("event") != event:
                raise LaneError(f"{self.name}, rank {index}: expected '{event}', got {reply}")
            replies.append(reply)
        return replies

    def ask(self, command, event):
        for rank in self.ranks:
            rank.tell(command)
        return self._replies(event)

    def run(self, steps):
        """One reply per rank, and what the loopback interface carried meanwhile, in bytes."""
        before = loopback_bytes()
        replies = self.ask(f"run {steps}", "ran")
        return replies, loopback_bytes() - before

    def stop(self):
        for rank in self.ranks:
            rank.stop()
        deadline = time.monotonic() + 20.0
        for rank in self.ranks:
            rank.reap(deadline)
        self.ranks = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def loopback_bytes():
    with open("/proc/net/dev") as table:
        for line in table:
            name, _, rest = line.partition(":")
            if name.strip() == "lo":
                return int(rest.split()[8])
    return 0


def available_memory_gb():
    with open("/proc/meminfo") as table:
        for line in table:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / 1e9
    return 0.0
