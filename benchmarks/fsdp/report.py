"""From what the contenders measured to a table for people and one JSON object for programs. MB are 10^6 bytes."""
import statistics

from harness.stats import against, ratio, summary

NOTES = {
    "step": "a turn's value: median over its steps, of the slowest rank; forward, backward, AdamW and zero_grad",
    "tflops": "per rank: (6 x parameters x tokens + 12 x layers x dim x length x tokens) / step, the usual count, which "
    "takes attention as unmasked and counts the tied head once",
    "memory": "peak resident memory during the measured steps (VmHWM, reset through clear_refs) above the same process's "
    "resident memory after set-up of the process group and one step of a tiny model; the worst rank",
    "sent": "per rank and step, on the loopback interface, headers included; what ranks of one host read from each other's "
    "memory does not go over it and is in sent_counted_mb, ebb's own count of payload",
    "floor": "the same program without communication, on as many processes at a time; it updates all parameters where a "
    "sharded rank updates its part",
    "fallback": "processor time of one operator that reads one resident parameter, over the same on a plain tensor",
    "cases": "ebb's full_shard beside FSDP2, each with the same step without communication; "
    "beyond_floor is (step - floor) of ebb over that of FSDP2, of medians; losses are compared as everywhere",
    "formula": "16 bytes a parameter / ranks + frames + gradient buffers (both as the engine reports them) + activations "
    "(the floor's peak of live tensor bytes without parameters, optimizer state and finished gradients)",
}


def flops_per_step(model, parameters, size):
    tokens = size[0] * size[1]
    return 6 * parameters * tokens + 12 * model["layers"] * model["dim"] * size[1] * tokens


def mode_entry(contender, model):
    parameters = contender.lane.ready[0]["parameters"]
    step = summary([1e3 * s for s in contender.step_s], digits=3)
    entry = {
        "mode": contender.mode,
        "ranks": contender.world,
        "batch": contender.size[0],
        "length": contender.size[1],
        "step_ms": step,
        "tflops_per_rank": round(flops_per_step(model, parameters, contender.size) / (step["median"] * 1e-3) / 1e12, 4),
        "cpu_ms": summary([1e3 * s for s in contender.cpu_s], digits=3),
        "peak_mb": summary([kb * 1024 / 1e6 for kb in contender.peak_kb], digits=2),
        "idle_mb": round(max(ready["idle_kb"] for ready in contender.lane.ready) * 1024 / 1e6, 2),
        "sent_mb": summary([b / 1e6 for b in contender.sent], digits=3),
        "loss_deviation": contender.worst_deviation,
    }
    reports = contender.replies[0].get("facts", {})
    if reports:
        entry["engine"] = reports
    if "bytes_sent_per_step" in reports:
        entry["sent_counted_mb"] = round(reports["bytes_sent_per_step"] / 1e6, 3)
    if contender.activation_bytes is not None:
        entry["activation_mb"] = round(contender.activation_bytes / 1e6, 2)
    return entry


def memory_formula_mb(full_shard, floor):
    facts = full_shard.replies[0]["facts"]
    parameters = full_shard.lane.ready[0]["parameters"]
    held = 16 * parameters / full_shard.world + facts["frame_bytes"] + facts["gradient_buffer_bytes"]
    return (held + floor.activation_bytes) / 1e6


def targets(contenders):
    """The figures that have targets, of the first size at 2 ranks."""
    first = contenders[0].size
    at = {(c.mode, c.world): c for c in contenders if c.size == first}
    out = {}

    def put(name, target, numerator, denominator, series="step_s", **kind):
        if numerator in at and denominator in at:
            value = ratio(getattr(at[numerator], series), getattr(at[denominator], series))
            out[name] = against(value, target, **kind) if target is not None else value

    put("vs_fsdp2", 0.60, ("full_shard", 2), ("fsdp2", 2))
    put("vs_fsdp1", 0.70, ("full_shard", 2), ("fsdp1", 2))
    put("vs_ddp", 1.00, ("full_shard", 2), ("ddp", 2))
    put("replicate_vs_ddp", 0.90, ("replicate", 2), ("ddp", 2))
    put("vs_floor", 1.20, ("full_shard", 2), ("floor", 2))
    put("memory_vs_fsdp2", 0.40, ("full_shard", 2), ("fsdp2", 2), "peak_kb")
    if ("full_shard", 2) in at and at["full_shard", 2].replies[0].get("facts") and ("floor", 2) in at:
        formula = memory_formula_mb(at["full_shard", 2], at["floor", 2])
        value = summary([kb * 1024 / 1e6 / formula for kb in at["full_shard", 2].peak_kb], digits=4)
        out["memory_vs_formula"] = against(value, 1.05) | {"formula_mb": round(formula, 2)}
    put("weak_scaling_2", 0.83, ("full_shard", 1), ("full_shard", 2), lower_is_better=False)
    # What the machine itself allows: two processes that do not talk, against one.
    put("floor_scaling_2", None, ("floor", 1), ("floor", 2))
    return out


def beyond_floor(group):
    """What communication adds to each side's step, ebb's over FSDP2's: quotient of the medians, as single rounds may have
    none. A negative one means that ebb's step was no longer than its floor."""
    at = {c.mode: c.step_s for c in group}
    own = [1e3 * (step - floor) for step, floor in zip(at["full_shard"], at["floor"])]
    theirs = [1e3 * (step - floor) for step, floor in zip(at["fsdp2"], at["python_floor"])]
    below = statistics.median(theirs)
    sides = {"ebb_ms": summary(own, digits=3), "fsdp2_ms": summary(theirs, digits=3)}
    if below <= 0.0:
        return {"median": None, "target": 0.5, "met": False} | sides  # Nothing to compare with on this machine.
    return against(round(statistics.median(own) / below, 4), 0.5) | sides


def case_entry(case, facts, group, rounds, steps, model):
    """One case: ebb's full_shard beside FSDP2, each with its floor."""
    at = {c.mode: c for c in group}
    entry = {
        "what": case.what,
        **{name: facts[name] for name in ["date", "commit"]},
        "load_at_start": facts["machine"]["load_at_start"],
        "torch": group[0].lane.ready[0]["torch"],
        "ranks": case.world,
        "micro_batches": case.micro_batches,
        "rounds": rounds,
        "steps_per_turn": steps,
        "loss_tolerance": case.loss_tolerance,
        "beyond_floor_vs_fsdp2": beyond_floor(group),
        "step_vs_fsdp2": against(ratio(at["full_shard"].step_s, at["fsdp2"].step_s), 1.0),
        "memory_vs_fsdp2": against(ratio(at["full_shard"].peak_kb, at["fsdp2"].peak_kb), 0.6),
        "step_vs_floor": ratio(at["full_shard"].step_s, at["floor"].step_s),
        "fsdp2_step_vs_floor": ratio(at["fsdp2"].step_s, at["python_floor"].step_s),
        "modes": [mode_entry(c, model) for c in group],
    }
    for mode, contender in zip(entry["modes"], group):
        mode.pop("tflops_per_rank")  # The usual count holds for plain training.
        mode["trainable"] = contender.lane.ready[0]["trainable"]
    return entry


def result(facts, model, contenders, args, rounds, tolerance, fallback_ns):
    return {
        "benchmark": "fsdp",
        **facts,
        "torch": contenders[0].lane.ready[0]["torch"],
        "model": model | {"parameters": contenders[0].lane.ready[0]["parameters"]},
        "optimizer": f"AdamW, {args.optimizer}",
        "rounds": rounds,
        "steps_per_turn": args.steps,
        "loss_tolerance": tolerance,
        **targets(contenders),
        **({"fallback_ns": against(round(fallback_ns, 1), 150.0)} if fallback_ns is not None else {}),
        "modes": [mode_entry(c, model) for c in contenders],
        "notes": NOTES,
    }


COLUMNS = [
    ("mode", 14), ("ranks", 5), ("tokens", 7), ("step ms", 8), ("quartiles", 13), ("cpu ms", 8), ("TFLOPS", 7),
    ("peak MB", 8), ("idle MB", 8), ("sent MB", 8), ("counted", 8),
]  # fmt: skip


def row(mode):
    step = mode["step_ms"]
    cells = [
        mode["mode"],
        mode["ranks"],
        f"{mode['batch']}x{mode['length']}",
        f"{step['median']:.0f}",
        f"{step['q1']:.0f}-{step['q3']:.0f}",
        f"{mode['cpu_ms']['median']:.0f}",
        f"{mode['tflops_per_rank']:.4f}" if "tflops_per_rank" in mode else "",
        f"{mode['peak_mb']['median']:.1f}",
        f"{mode['idle_mb']:.1f}",
        f"{mode['sent_mb']['median']:.1f}",
        f"{mode['sent_counted_mb']:.1f}" if "sent_counted_mb" in mode else "",
    ]
    return "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS))


def verdicts(entries):
    for name, entry in entries.items():
        if isinstance(entry, dict) and "target" in entry:
            value = f"{entry['median']:8.3f}" if entry["median"] is not None else "       -"
            spread = f"({entry['q1']:.3f}-{entry['q3']:.3f})" if "q1" in entry else ""
            verdict = "met" if entry["met"] else "missed"
            yield f"{name:>22}  {value}  {spread:<15}  target {entry['target']:6.2f}  {verdict}"


def table(result):
    lines = ["  ".join(f"{name:>{width}}" for name, width in COLUMNS)]
    lines += [row(mode) for mode in result.get("modes", [])]
    lines += ["", *verdicts(result)]
    for name, case in result.get("cases", {}).items():
        lines += ["", f"{name}: {case['what']} ({case['rounds']} rounds, {case['date']}, commit {case['commit']})"]
        lines += [row(mode) for mode in case["modes"]]
        lines += verdicts(case)
    if "machine" in result:
        machine = result["machine"]
        lines.append(
            f"\n{machine['cores']} cores, {machine['cpu']}, {machine['memory_gb']} GB; torch {result['torch']}; commit "
            f"{result['commit']}; {result['date']}; rounds {result['rounds']}; {result['optimizer']}; load at start "
            f"{machine['load_at_start']}"
        )
    lines += [f"{name}: {text}" for name, text in result.get("notes", {}).items()]
    return "\n".join(lines) + "\n"
