"""How many steps does an ordinary training lose to each degree of patience? (chapter 10)

The ReLU net on digits, 1,000 steps without a bad batch, from 2^24, growing after 100 clean steps.
"""
from mpcourse.dynamic import DynamicScaler
from mpcourse.step import MixedStep
from mpcourse.toys import train_toy

ROWS = ('none', 'cumulative', 'consecutive')
SEEDS = range(10)


def patient_scaler(kind):
    "A dynamic scaler of some patience that starts at 2^24 and grows after 100 clean steps"
    start = dict(init_scale=2.**24, growth_interval=100)
    if kind == 'none': return DynamicScaler(**start)
    return DynamicScaler(**start, hysteresis=2,
                         refill='growth' if kind == 'cumulative' else 'clean')


def run(row, seed):
    "Skipped steps, those after the way down, and the final loss"
    found = train_toy('relu_mlp', MixedStep(patient_scaler(row)), seed, steps=1000)
    skipped = found.history['skipped']
    return dict(skipped=sum(skipped), later=sum(skipped[100:]), loss=found.loss)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
