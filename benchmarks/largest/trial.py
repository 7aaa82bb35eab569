"""One try: so many ranks of one system train a model of so many layers, each rank under its memory limit."""
import ctypes
import dataclasses
import errno
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

from harness.lanes import free_port
from largest.memory_group import MemoryGroup

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class TrialError(Exception):
    """A rank failed for another reason than memory: nothing can be said about this size."""


@dataclasses.dataclass
class Outcome:
    layers: int
    fits: bool
    seconds: float
    parameters: int = 0
    losses: list = dataclasses.field(default_factory=list)  # by rank, each by step
    step_s: list = dataclasses.field(default_factory=list)  # of rank 0
    charged_mb: list = dataclasses.field(default_factory=list)  # by rank: what the kernel charged to the group at its peak
    failed_by: str = ""  # "oom_kill", "allocation"
    failed_after_steps: int = 0
    ranks: list = dataclasses.field(default_factory=list)  # what each rank said, events merged


class _Rank:
    def __init__(self, argv, env, folder, index, limit_bytes):
        self.index = index
        self.group = None
        if limit_bytes:
            self.group = MemoryGroup(f"rank{index}", limit_bytes)
        self.out = folder / f"rank{index}.out"
        self.err = folder / f"rank{index}.err"

        def before_exec():
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if self.group:
                self.group.enter()

        try:
            with open(self.out, "wb") as out, open(self.err, "wb") as err:
                self.process = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=before_exec,
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            if self.group:
                self.group.remove()
            raise

    def events(self):
        events = []
        for line in self.out.read_text(errors="replace").splitlines():
            if line.startswith("{") and line.endswith("}"):
                events.append(json.loads(line))
        return events

    def stderr_tail(self):
        return self.err.read_text(errors="replace")[-2000:]

    def out_of_memory(self):
        """Why, or ""."""
        if not self.group:
            return ""
        if self.group.oom_kills:
            return "oom_kill"
        code = self.process.poll()
        if code == errno.ENOMEM or (code not in (None, 0) and "annot allocate memory" in self.stderr_tail()):
            return "allocation"
        return ""

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.group:
            self.group.remove()


def run(name, argv, world, layers, limit_bytes, timeout_s, heap="fixed", say=lambda text: None):
    """@param limit_bytes  of each rank; 0: none.
    @param heap  "default": the C library's; "fixed": the same with its threshold for memory of its own mapping, 128 KiB, kept
                 from growing. It grows to the largest block that was ever freed, and whole parameters of some 10 MB then lie
                 between the shards, whose holes the heap does not give back.
    @raises TrialError"""
    begin = time.monotonic()
    env = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
    )
    env.setdefault("EBB_LOG", "warn")
    for variable in [key for key in env if key.startswith("MALLOC_") or key == "GLIBC_TUNABLES"]:
        del env[variable]
    if heap == "fixed":
        env["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)
    ranks = []
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as folder:
        try:
            for index in range(world):
                env.update(RANK=str(index), LOCAL_RANK=str(index))
                ranks.append(_Rank(argv, env, pathlib.Path(folder), index, limit_bytes))
            codes = _wait(name, ranks, begin + timeout_s, say)
            return _judge(name, ranks, codes, layers, begin)
        finally:
            for rank in ranks:
                rank.end()


def _wait(name, ranks, deadline, say):
    """Exit codes once all have ended, or a moment after the first that failed: the others only wait for it."""
    seen = -1
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if all(code is not None for code in codes):
            return codes
        if any(code for code in codes):
            time.sleep(1.0)  # Its peers report a lost connection; what counts is whose memory it was.
            return [rank.process.poll() for rank in ranks]
        if time.monotonic() > deadline:
            raise TrialError(f"{name}: no end in time; stderr of rank 0:\n{ranks[0].stderr_tail()}")
        steps = sum(event["event"] == "step" for event in ranks[0].events())
        if steps != seen:
            seen = steps
            say(f"{steps} steps done")
        time.sleep(0.2)


def _judge(name, ranks, codes, layers, begin):
    events = [rank.events() for rank in ranks]
    steps = [[event for event in mine if event["event"] == "step"] for mine in events]
    outcome = Outcome(
        layers=layers,
        fits=all(code == 0 for code in codes) and all(mine and mine[-1]["event"] == "done" for mine in events),
        seconds=round(time.monotonic() - begin, 1),
        parameters=max((e.get("parameters", 0) for mine in events for e in mine), default=0),
        losses=[[event["loss"] for event in mine] for mine in steps],
        step_s=[round(event["seconds"], 2) for event in steps[0]],
        charged_mb=[round(rank.group.peak_bytes / 1e6, 1) if rank.group else 0.0 for rank in ranks],
        ranks=[{key: value for event in mine for key, value in event.items() if key != "event"} for mine in events],
    )
    if outcome.fits:
        return outcome
    reasons = [rank.out_of_memory() for rank in ranks]
    if not any(reasons):
        tails = "\n".join(f"rank {r.index}, exit code {code}:\n{r.stderr_tail()}" for r, code in zip(ranks, codes))
        raise TrialError(f"{name}: failed, but not for memory\n{tails}")
    outcome.failed_by = "oom_kill" if "oom_kill" in reasons else "allocation"
    outcome.failed_after_steps = min(len(mine) for mine in steps)
    return outcome
