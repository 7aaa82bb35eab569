"""Shared by ebb's benchmarks: lanes of processes run in turn, statistics, the machine's facts, a progress bar."""
