"""Who finds a scale that fits, when the loss is divided by more and more? (chapter 21)

The training of als_table.py.
"""
from functools import partial

from als_table import ending, seven_sigmoids
from mpcourse.als import ALSScaler
from mpcourse.policies import get_policy
from mpcourse.step import MixedStep

POLICY_STARTS = {'torch': partial(get_policy, 'torch'),
                 'interval 100': partial(get_policy, 'torch', growth_interval=100),
                 'Megatron': partial(get_policy, 'megatron'), 'ALS': ALSScaler}
ROWS = {f'{n}, / 2^{k}': (n, k) for k in (4, 18, 22, 34) for n in POLICY_STARTS}
SEEDS = range(5)


def run(row, seed):
    "As als_table"
    name, k = ROWS[row]
    return ending(seven_sigmoids(MixedStep(POLICY_STARTS[name]()), seed, 2.**k), 2)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
