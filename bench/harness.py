"""What a benchmark needs: interleaved timings, and rows that know their bound."""
import multiprocessing as mp
import statistics, time
from dataclasses import asdict, dataclass, field


@dataclass
class Row:
    "One line of the table"
    name: str                     # what was measured
    value: float                  # the ratio, or another number
    at_most: float | None = None  # the bound from above; None: there is none
    at_least: float | None = None # the bound from below; None: there is none
    unit: str = 'x'               # 'x' for a ratio
    ms: dict = field(default_factory=dict) # the medians behind it, in milliseconds

    @property
    def ok(self):
        "Does the value keep its bounds? A row without bounds is there to be read"
        low_enough = self.at_most is None or self.value <= self.at_most
        return low_enough and (self.at_least is None or self.value >= self.at_least)

    @property
    def bound(self):
        return ' '.join(f'{s} {b:g}' for s, b in (('≤', self.at_most), ('≥', self.at_least))
                        if b is not None)

    def json(self):
        return asdict(self) | dict(value=round(self.value, 4), bound=self.bound, ok=self.ok)


def alone(
    f,     # (*args, pipe) -> None; it sends its result through the pipe
    *args, # for f
): # what came
    "Run a function in a process of its own, whose peak of memory is then its own"
    here, there = mp.Pipe()
    p = mp.get_context('spawn').Process(target=f, args=(*args, there))
    p.start()
    p.join()
    return here.recv()


def medians(
    fns: dict,         # name -> function without arguments
    repeats: int = 11, # timed calls of each, one after the other in turn
    number: int = 1,   # calls inside one timing, for what takes microseconds
    few: dict = {},    # name -> fewer repeats, for what takes long
    # calls before each timing, so that none pays for what the one before it left in the caches
    warm: int = 0,
) -> dict: # name -> median seconds of one call
    "Time functions in turn, so that whatever else the machine does hits all of them alike"
    times = {k: [] for k in fns}
    for f in fns.values(): f()
    for i in range(repeats):
        for k, f in fns.items():
            if i >= few.get(k, repeats): continue
            for _ in range(warm): f()
            start = time.perf_counter()
            for _ in range(number): f()
            times[k].append((time.perf_counter() - start)/number)
    return {k: statistics.median(v) for k, v in times.items()}


def ratio(
    name: str,   # of the row
    t: dict,     # what `medians` returned
    above: str,  # name of the numerator
    below: str,  # name of the denominator
    **bounds,    # at_most, at_least
) -> Row:
    "The row of a ratio of two medians out of one run"
    return Row(name, t[above]/t[below], ms={k: round(t[k]*1e3, 4) for k in (above, below)},
               **bounds)
