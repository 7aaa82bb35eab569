"""From what the search found to a table for people and one JSON object for programs. MB are 10^6 bytes."""
from harness.stats import against

NOTES = {
    "fits": "3 steps of all ranks with finite losses, the first within 5 % of log(vocabulary) and equal, to 2e-5, among all "
    "systems and numbers of ranks that tried this many layers",
    "limit": "of the memory cgroup that each rank has to itself, swap excluded. It counts what the kernel charges: heap, page "
    "tables, socket buffers. Files of libraries are read once before, so that they do not count for any system",
    "fails_at": "the smallest number of layers that failed, by an out-of-memory kill (oom_kill) or a failed allocation",
    "charged_mb": "peak of what was charged to each rank's group at the largest size that fits",
    "idle_kb": "anonymous resident memory of rank 0 once it has joined the group, before the model: interpreter and libraries, which "
    "count for each system as they do for its users",
    "heap": "fixed: the C library's with MALLOC_MMAP_THRESHOLD_=131072, its initial value, for all systems; otherwise it grows as "
    "large blocks are freed, and FSDP2 loses half of its memory to holes; default: as it comes",
    "ratios": "of parameters",
}

RATIOS = [
    ("largest_vs_ddp", ("ebb", 4), ("ddp", 4), 4.0),
    ("largest_vs_fsdp2", ("ebb", 4), ("fsdp2", 4), 1.2),
    ("largest_vs_ddp_2_ranks", ("ebb", 2), ("ddp", 2), None),
    ("largest_vs_fsdp2_2_ranks", ("ebb", 2), ("fsdp2", 2), None),
    ("in_backward_vs_fsdp2_in_backward", ("ebb_in_backward", 4), ("fsdp2_in_backward", 4), None),
]


def _ratio(found, heap, numerator, denominator, target=None):
    sizes = {(e["system"], e["ranks"]): e["parameters"] for e in found if e["heap"] == heap and e["complete"]}
    if not sizes.get(numerator) or not sizes.get(denominator):
        return None
    value = round(sizes[numerator] / sizes[denominator], 4)
    return value if target is None else against(value, target, lower_is_better=False)


def result(facts, model, torch, args, cgroup_version, found, complete):
    out = {
        "benchmark": "largest",
        **facts,
        "torch": torch,
        "complete": complete,
        "model": model,
        "optimizer": "AdamW, fused",
        "limit_bytes": args.limit_mib << 20,
        "cgroup_version": cgroup_version,
        "resolution_layers": args.resolution,
    }
    for suffix, heap in [("", "fixed"), ("_default_heap", "default")]:
        for name, numerator, denominator, target in RATIOS:
            value = _ratio(found, heap, numerator, denominator, target if heap == "fixed" else None)
            if value is not None:
                out[name + suffix] = value
    return out | {"largest": found, "notes": NOTES}


def table(result):
    columns = [("system", 18), ("heap", 7), ("ranks", 5), ("layers", 6), ("Mparam", 8), ("MB", 8), ("fails at", 8), ("by", 10), ("step s", 7)]
    lines = ["  ".join(f"{name:>{width}}" for name, width in columns)]
    for entry in result["largest"]:
        steps = entry.get("step_s") or [0.0]
        cells = [
            entry["system"],
            entry["heap"],
            entry["ranks"],
            entry["layers"],
            f"{entry['parameters'] / 1e6:.1f}",
            f"{max(entry.get('charged_mb') or [0.0]):.1f}",
            entry["fails_at"] or "",
            "/".join(entry["failed_by"]),
            f"{sorted(steps)[len(steps) // 2]:.1f}",
        ]
        line = "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, columns))
        lines.append(line + ("" if entry["complete"] else f"  not finished {entry.get('error', '')}"))
    lines.append("")
    for name, entry in result.items():
        if isinstance(entry, dict) and "target" in entry:
            verdict = "met" if entry["met"] else "missed"
            lines.append(f"{name:>18}  {entry['median']:7.3f}  target {entry['target']:5.2f}  {verdict}")
        elif "_vs_" in name:
            lines.append(f"{name:>18}  {entry:7.3f}")
    machine = result["machine"]
    lines.append(
        f"\nlimit {result['limit_bytes'] / 2**20:.0f} MiB a rank; {machine['cores']} cores, {machine['cpu']}, "
        f"{machine['memory_gb']} GB; torch {result['torch']}; commit {result['commit']}; {result['date']}; "
        f"{result['optimizer']}; load at start {machine['load_at_start']}"
    )
    lines += [f"{name}: {text}" for name, text in result["notes"].items()]
    return "\n".join(lines) + "\n"
