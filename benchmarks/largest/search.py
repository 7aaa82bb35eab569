"""The largest size for which a try succeeds, with few tries: each takes minutes."""


def largest(attempt, start, limit, ceiling, resolution=1, known=()):
    """Doubles from `start` until a try fails or two have told how the peak grows; goes to where that line meets the limit, at most
    fourfold at a time; widens its stride from there until a failure and a success enclose the answer; bisects.

    @param attempt     size -> (fits, peak); the peak counts for those that fit.
    @param limit       of the peak, in its unit.
    @param ceiling     never more.
    @param resolution  stops once the smallest that failed is at most so much above the largest that fits.
    @param known       what earlier tries gave: (size, fits, peak) of each.
    @return The largest size that fitted, or 0, and the smallest that failed, or None.
    """
    peaks = {}
    fits, fails = 0, None

    def note(size, good, peak):
        nonlocal fits, fails
        if good:
            peaks[size] = peak
            fits = max(fits, size)
        else:
            fails = size if fails is None else min(fails, size)

    for size, good, peak in known:
        note(size, good, peak)
    size = start
    while fails is None and len(peaks) < 2 and size <= ceiling:
        if size not in peaks:
            note(size, *attempt(size))
        size *= 2
    stride = resolution
    tried_guess = None
    while fits < ceiling and (fails is None or fails - fits > resolution):
        guess = min(_meets(peaks, limit), 4 * fits) if len(peaks) >= 2 else 0
        if guess > fits and (fails is None or guess < fails) and guess != tried_guess and stride == resolution:
            size = tried_guess = guess
        elif fails is None:  # Upwards from the last success.
            size, stride = fits + stride, 2 * stride
        elif peaks and fails - fits > 2 * stride:  # Downwards from the last failure.
            size, stride = fails - stride, 2 * stride
        else:
            size = (fits + fails) // 2
        size = min(size, ceiling)
        if fails is not None:
            size = min(max(size, fits + 1), fails - 1)
        note(size, *attempt(size))
    return fits, fails


def _meets(peaks, limit):
    (a, peak_a), (b, peak_b) = sorted(peaks.items())[-2:]
    slope = (peak_b - peak_a) / (b - a)
    return int(b + (limit - peak_b) / slope) if slope > 0 else 4 * b
