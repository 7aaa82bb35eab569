"""Runs a Google Benchmark program and returns its figures."""
import json
import statistics
import subprocess


def cpu_nanoseconds(program, name_filter, repetitions=9):
    """{benchmark name: median processor time of one iteration}. Repetitions of different benchmarks are interleaved."""
    done = subprocess.run(
        [
            program,
            f"--benchmark_filter={name_filter}",
            f"--benchmark_repetitions={repetitions}",
            "--benchmark_enable_random_interleaving=true",
            "--benchmark_min_time=0.1",
            "--benchmark_format=json",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    samples = {}
    for run in json.loads(done.stdout)["benchmarks"]:
        if run["run_type"] == "iteration":
            samples.setdefault(run["run_name"], []).append(run["cpu_time"])
    return {name: statistics.median(times) for name, times in samples.items()}
