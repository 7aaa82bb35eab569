"""What a result depends on besides the code: machine, versions, commit."""
import datetime
import os
import platform
import subprocess


def _first_line(argv, cwd=None):
    try:
        out = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return out.splitlines()[0] if out else ""


def _cpu_model():
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gb():
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def commit(root):
    """Short hash, with "+" when the tree has changes."""
    head = _first_line(["git", "rev-parse", "--short", "HEAD"], cwd=root)
    if not head:
        return "unknown"
    return head + ("+" if _first_line(["git", "status", "--porcelain", "-uno"], cwd=root) else "")


def facts(root):
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(root),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "cpu": _cpu_model(),
            "memory_gb": _memory_gb(),
            "kernel": platform.release(),
            "system": platform.freedesktop_os_release().get("PRETTY_NAME", "") if os.path.exists("/etc/os-release") else "",
            "load_at_start": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "compiler": _first_line([os.environ.get("CXX", "g++"), "--version"]),
        },
    }
