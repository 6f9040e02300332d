"""Does the early warning stay silent in trainings that do well without a loss scale? (chapter 20)

A row is a toy of chapter 03, trained in FP16 at scale 1 to its end; every 25th step is collected, and the verdict
asked for after each.
"""
import math

from mpcourse.monitor import TensorCollector
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, fit, get_toy
from mpcourse.underflow import count_flushed, early_warning

ROWS = ['relu_mlp', 'cnn', 'char_lm', 'two_towers']
SEEDS = range(3)


def run(row, seed):
    "Step of the first warning (NaN: none), final loss, and whether it lies within what FP32 reaches"
    toy, step = get_toy(row), MixedStep(StaticScaler(1.))
    model = toy.model(seed=seed)
    opt = toy.opt(model.parameters())
    stats = ('min', 'max', 'flushed', 'overflow', 'hist')
    with TensorCollector(model, 25, scaler=step.scaler, kinds='weight_grad', stats=stats, flush=count_flushed()) as seen:
        log = fit(model, batches(toy.data(), toy.bs, toy.steps, seed), opt, toy.loss_func, step,
                  toy.schedule(toy.steps), lambda i, rec: seen.step(rec['loss']))
    frame, loss = seen.frame(), sum(log['loss'][-20:])/20
    warned = [s for s in sorted(set(frame.step)) if early_warning(frame[frame.step <= s]).level == 'warn']
    return dict(warned=min(warned, default=math.nan), loss=loss, healthy=loss <= toy.loss[1])


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
