"""make bench-largest: the largest model that trains under a memory limit."""
