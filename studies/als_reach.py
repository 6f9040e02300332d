"""Who finds a scale that fits, when the loss is divided by more and more? (chapter 21)

The training of als_table.py. `measured` is the power of two that lifts the largest gradient of the first
batch to 2^13, and stays.
"""
from functools import partial

from als_table import ending, seven_sigmoids
from mpcourse.als import ALSScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, cross_entropy, deep_sigmoid, digits

POLICY_STARTS = {'torch': partial(get_policy, 'torch'),
                 'interval 100': partial(get_policy, 'torch', growth_interval=100),
                 'Megatron': partial(get_policy, 'megatron'), 'measured': None, 'ALS': ALSScaler}
ROWS = {f'{n}, / 2^{k}': (n, k) for k in (4, 18, 22, 34) for n in POLICY_STARTS}
SEEDS = range(5)


def measured(seed, divide):
    "A scale measured on the first batch"
    first = next(iter(batches(digits(), 256, 1, seed)))
    return StaticScaler.measured(deep_sigmoid(seed, depth=7), first, lambda p, y: cross_entropy(p, y)/divide, 2.**13)


def run(row, seed):
    "As als_table"
    name, k = ROWS[row]
    scaler = measured(seed, 2.**k) if name == 'measured' else POLICY_STARTS[name]()
    return ending(seven_sigmoids(MixedStep(scaler), seed, 2.**k), 2)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
