"""Where does one bad step in a hundred drive each policy? (chapter 14)

A replay of 20,000 steps from 2^16: published rules as they are, two with a window of 1,000, and
ours.
"""
from mpcourse.dynamic import DynamicScaler
from mpcourse.policies import RULES, get_policy
from mpcourse.simulator import random_burst, replay


ROWS = {**{name: name for name in RULES},
        'torch, window 1000': get_policy('torch', growth_interval=1000),
        'fastai, window 1000': get_policy('fastai', growth_interval=1000), 'hold': DynamicScaler()}
SEEDS = range(8)


def run(row, seed):
    "log2 of the scale after 5,000 steps and at the end (NaN: gave up), and whether the policy gave up"
    flight = replay({row: ROWS[row]}, random_burst(.01, 20_000, seed), start=2.**16)
    log = flight.scales[0].log2().tolist()
    return dict(at_5000=log[5000], end=log[-1], gave_up=bool(flight.stopped))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
