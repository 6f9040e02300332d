"""Which constant scales train two towers whose loss is divided by 1,024? (chapter 10)

Chapter 10's net of pictures and words, 300 steps in FP16 without a bad batch. A row is a scale.
"""
from dataclasses import replace

from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import get_toy, train_toy
from mpcourse.zoo import contrastive

ROWS = {f'2^{k}': 2.**k for k in (6, 12, 18, 24)}
SEEDS = range(10)


def run(row, seed):
    "Mean of the last 20 losses, times 1,024"
    towers = replace(get_toy('two_towers'), loss_func=lambda pred, y: contrastive(pred, y)/1024)
    return dict(loss=1024*train_toy(towers, MixedStep(StaticScaler(ROWS[row])), seed, steps=300).loss)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
