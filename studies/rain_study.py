"""Where does one bad step in a hundred drive each policy? (chapter 16)

A replay of 20,000 steps from 2^16. `no floor` is a policy exactly as its library has it.
"""
from mpcourse.policies import POLICIES
from mpcourse.simulator import random_storm, replay


def as_published(name, **kw):
    "A policy with its library's own arithmetic, and a window of 1,000"
    return POLICIES[name](2.**16, growth_interval=1000, strict=True, **kw)


ROWS = {**{name: name for name in POLICIES}, 'torch, no floor': as_published('torch'),
        'fastai, no floor': as_published('fastai'),
        'fairseq, no floor': as_published('fairseq', floor=0., on_floor='clamp')}
SEEDS = range(8)


def run(row, seed):
    "log2 of the scale after 5,000 steps and at the end, and whether the policy gave up"
    flight = replay({row: ROWS[row]}, random_storm(.01, 20_000, seed), start=2.**16)
    log = flight.scales[0].log2().tolist()
    return dict(at_5000=log[5000], end=log[-1], gave_up=bool(flight.stopped))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
