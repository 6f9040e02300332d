"""At which loss scales does the pre-norm transformer train in FP16? (chapter 26)

The training of unit_sweep.py. A row is a form and a loss scale.
"""
from unit_sweep import FORMS, train

EXPONENTS = range(-20, 21, 4)
ROWS = [f'{form} 2^{k}' for form in ('regular', 'regular, unit loss', 'unit-scaled')
        for k in EXPONENTS]
SEEDS = range(3)


def run(row, seed):
    "As unit_sweep"
    form, k = row.split(' 2^')
    return train('pre-norm', *FORMS[form][:2], 2.**int(k), 1., None, seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
