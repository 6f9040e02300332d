"""Which scales train the character transformer when its loss is divided by 2^12? (chapter 21)

The loss is divided as if a mean ran over so many times the tokens. A seed has learnt when its loss ends
below 3; a guesser has 4.5.
"""
from functools import partial

import torch

from als_table import ending, make_step, ramp
from mpcourse.als import ALSScaler
from mpcourse.policies import get_policy
from mpcourse.toys import batches, cross_entropy, fit, get_toy

ROWS = {'FP32': (None, ''), '2^0': (0, 'unchecked'), '2^2': (2, 'unchecked'), '2^4': (4, 'unchecked'),
        'torch': (partial(get_policy, 'torch'), 'inf'), 'Megatron': (partial(get_policy, 'megatron'), 'inf'),
        'ALS': (ALSScaler, 'inf')}
SEEDS = range(3)


def run(row, seed):
    "As als_table"
    toy, step = get_toy('char_lm'), make_step(*ROWS[row])
    model, data = toy.model(seed=seed), batches(toy.data(), toy.bs, 300, seed)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    h = fit(model, data, opt, lambda p, y: cross_entropy(p, y)/2**12, step, ramp(300, .3))
    return ending(h | dict(loss=[2**12*l for l in h['loss']]), 3)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
