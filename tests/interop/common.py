"""What the interop tests share: a short text, and `ebb train` on it."""
import json
import os
import pathlib
import subprocess

EBB = os.environ["EBB"]
# Small enough for a second of training; every byte of the text is ASCII.
SIZES = "--layers 2 --d-model 32 --heads 2 --context 16 --steps 4 --warmup 1 --batch 2 --eval-batches 2 --sample-length 16".split()


def text(folder):
    path = pathlib.Path(folder) / "text.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(200)))
    return path


def train(folder, *arguments, launcher=(), expect=0):
    """Runs `ebb train` into `folder`; returns summary.json and stderr."""
    command = [*launcher, EBB, "train", "--data", str(text(folder)), "--run-dir", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    summary = json.loads((pathlib.Path(folder) / "summary.json").read_text()) if expect == 0 else None
    return summary, done.stderr
