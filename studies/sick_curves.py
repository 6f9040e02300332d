"""What do the losses of ten sick trainings look like, each beside a healthy one? (chapter 35)

A row is a patient of `sick_trainings` or `sick_today`, as it is or `healthy`: FP32 without the
fault, from the same weights and batches. Its numbers are the training losses of every fifth step.
"""
from mpcourse.cases import train_patient
from sick_today import PATIENTS as TODAY
from sick_trainings import PATIENTS


EVERY = 5
ROWS = [f'{name}: {how}' for name in [*PATIENTS, *TODAY] for how in ('nothing', 'healthy')]
SEEDS = range(3)


def run(row, seed):
    "The loss of every fifth step"
    name, how = row.split(': ')
    losses = train_patient((PATIENTS | TODAY)[name], how, seed).log.loss
    return {str(i): losses[i] for i in range(0, len(losses), EVERY)}


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
