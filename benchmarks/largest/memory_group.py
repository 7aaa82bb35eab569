"""Memory cgroups, version 1 or 2: a limit for each rank, and whether the kernel killed it for that."""
import contextlib
import os
import pathlib
import time


class Unavailable(Exception):
    """This process may not make memory cgroups; says why."""


def _read(path):
    try:
        return path.read_text()
    except OSError:
        return ""


def _mounts():
    """(mount point, path of the mount within its hierarchy, file system, options of the superblock)"""
    for line in _read(pathlib.Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split()[:3]
        yield pathlib.Path(fields[4]), fields[3], kind, options.split(",")


def _own_folder(mount, root, controller):
    """Where this process is, below `mount`; `controller` is "" for version 2."""
    for line in _read(pathlib.Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if (controller in controllers.split(",")) if controller else (number == "0"):
            if root != "/" and path.startswith(root):
                path = path[len(root) :]
            folder = mount / path.lstrip("/")
            return folder if folder.is_dir() else mount
    return mount


def _parent_v1():
    for mount, root, kind, options in _mounts():
        if kind == "cgroup" and "memory" in options:
            return _own_folder(mount, root, "memory")
    return None


def _parent_v2():
    """The nearest group above this process that gives memory limits to its children: one with processes in it cannot."""
    for mount, root, kind, _ in _mounts():
        if kind != "cgroup2":
            continue
        folder = _own_folder(mount, root, "")
        while True:
            if "memory" in _read(folder / "cgroup.subtree_control").split():
                return folder
            if folder == mount:
                break
            folder = folder.parent
        if "memory" in _read(mount / "cgroup.controllers").split():
            try:
                (mount / "cgroup.subtree_control").write_text("+memory")
            except OSError as error:
                raise Unavailable(f"{mount} does not pass the memory controller on to new groups: {error}") from None
            return mount
    return None


PREFIX = "ebb-largest-"


def _parent():
    """Where groups are made, and the version. @raises Unavailable"""
    for find, version in [(_parent_v1, 1), (_parent_v2, 2)]:
        parent = find()
        if parent is not None:
            return parent, version
    raise Unavailable("no memory controller is mounted (neither cgroup v1 'memory' nor cgroup v2 with 'memory')")


class MemoryGroup:
    """One cgroup with a limit of `limit_bytes`, swap excluded. remove() it when its processes have ended."""

    def __init__(self, name, limit_bytes):
        parent, self.version = _parent()
        self.folder = parent / f"{PREFIX}{os.getpid()}-{name}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise Unavailable(f"cannot make a group in {parent}: {error.strerror}; run as root") from None
        try:
            if self.version == 1:
                self._set("memory.limit_in_bytes", limit_bytes)
                self._set("memory.swappiness", 0, optional=True)
                self._set("memory.memsw.limit_in_bytes", limit_bytes, optional=True)
            else:
                self._set("memory.max", limit_bytes)
                self._set("memory.swap.max", 0, optional=True)
        except OSError as error:
            self.remove()
            raise Unavailable(f"cannot set a memory limit in {parent}: {error.strerror}") from None

    def _set(self, name, value, optional=False):
        try:
            (self.folder / name).write_text(str(value))
        except OSError:
            if not optional:  # Kernels without swap accounting have no file for it.
                raise

    def enter(self):
        """Moves the calling process into the group. For between fork and exec."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def _counter(self, name, field):
        for line in _read(self.folder / name).splitlines():
            key, _, value = line.partition(" ")
            if key == field:
                return int(value)
        return 0

    @property
    def oom_kills(self):
        return self._counter("memory.oom_control" if self.version == 1 else "memory.events", "oom_kill")

    @property
    def limit_hits(self):
        """How often the group was at its limit. The kernel may have found something to drop: not yet a failure."""
        if self.version == 1:
            return int(_read(self.folder / "memory.failcnt") or 0)
        return self._counter("memory.events", "max")

    @property
    def peak_bytes(self):
        return int(_read(self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")) or 0)

    def remove(self):
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)  # Ended processes leave a moment later.


def require(limit_bytes):
    """Makes a group and removes it, and those of runs that were killed. Returns the version. @raises Unavailable"""
    parent, version = _parent()
    for folder in parent.glob(PREFIX + "*"):
        owner = folder.name[len(PREFIX) :].partition("-")[0]
        if not pathlib.Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
    MemoryGroup("probe", limit_bytes).remove()
    return version
