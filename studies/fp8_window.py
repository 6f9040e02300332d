"""At which loss scales does the pre-norm transformer train in eight bits? (chapter 27)

The training of fp8_training.py. A row is a form and a loss scale.
"""
from fp8_training import FORMS, train

EXPONENTS = range(-16, 29, 4)
CURVES = {'regular': 'regular FP8', 'regular, unit loss': 'regular FP8, unit loss', 'unit-scaled': 'unit FP8'}
ROWS = [f'{curve} 2^{k}' for curve in CURVES for k in EXPONENTS]
SEEDS = range(3)


def run(row, seed):
    "As fp8_training"
    curve, k = row.split(' 2^')
    return train(*FORMS[CURVES[curve]][:3], 2.**int(k), 1., seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
