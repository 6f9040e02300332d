"""Which schemes train the net that fails on demand, and at what price? (chapter 29)

A row is a toy and one of `mpcourse.compare`'s schemes; the numbers are those of `measure_scheme`.
"""
from mpcourse.compare import CONTENDERS, measure_scheme

ROWS = [f'deep_sigmoid: {name}' for name in CONTENDERS]
SEEDS = range(3)


def run(row, seed):
    "What `compare` tells of a training"
    toy, name = row.split(': ')
    return measure_scheme(name, seed, toy)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
