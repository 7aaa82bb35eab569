"""Medians, quartiles, and ratios taken round by round."""
import statistics


def quartiles(samples):
    """First quartile, median, third quartile; interpolated, ends included."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, median, third


def summary(samples, digits=6):
    first, median, third = quartiles(samples)
    return {
        "median": round(median, digits),
        "q1": round(first, digits),
        "q3": round(third, digits),
        "samples": [round(sample, digits) for sample in samples],
    }


def ratio(numerators, denominators):
    """Summary of the ratios of two series whose i-th samples come from the same round."""
    return summary([a / b for a, b in zip(numerators, denominators, strict=True)], digits=4)


def against(value, target, lower_is_better=True):
    """A result beside its target. `value` is a number or a summary."""
    number = value["median"] if isinstance(value, dict) else value
    entry = dict(value) if isinstance(value, dict) else {"median": value}
    entry["target"] = target
    entry["met"] = number <= target if lower_is_better else number >= target
    return entry
