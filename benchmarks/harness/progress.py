"""A progress bar for people on a terminal; a line now and then for logs. Always on stderr."""
import sys
import time


class Progress:
    def __init__(self, total, stream=sys.stderr):
        self.total = max(1, total)
        self.done = 0
        self.stream = stream
        self.terminal = stream.isatty()
        self.begin = time.monotonic()
        self.next_line = 0.0

    def show(self, text):
        elapsed = time.monotonic() - self.begin
        left = elapsed / self.done * (self.total - self.done) if self.done else 0.0
        share = min(1.0, self.done / self.total)
        clock = f"{int(elapsed) // 60:3d}:{int(elapsed) % 60:02d}"
        if self.terminal:
            bar = "#" * int(30 * share)
            self.stream.write(f"\r[{bar:<30}] {share:4.0%} {clock} left {left / 60:.1f} min  {text:<40.40}")
            self.stream.flush()
        elif elapsed >= self.next_line:
            self.stream.write(f"{share:4.0%} {clock} {text}\n")
            self.stream.flush()
            self.next_line = elapsed + 20.0

    def advance(self, text, amount=1):
        self.done += amount
        self.show(text)

    def grow(self, amount):
        self.total += amount

    def close(self):
        if self.terminal:
            self.stream.write("\n")
        self.stream.flush()
