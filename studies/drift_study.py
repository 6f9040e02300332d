"""Does the right scale move far enough during a training to matter? (chapter 19)

The ReLU net learns 128 digits by heart with Adam (eps 2^-70), so its loss, and its gradients, go
to zero. `zero`: as it is. `hot`: at fifteen times the learning rate. `cold`: the loss is
multiplied by a temperature that falls from 1 to 2^-40 in the first half; `cold, quick Adam`: the
same with betas of .5 and .9, since Adam's usual beta2 of .999 forgets one octave in 1,386 steps. A
measured scale is a constant that lifts the largest gradient of the first batch to 2^10, or to
2^13; `measured anew` measures it on every 25th batch again.
"""
from dataclasses import replace
from functools import partial

import torch
from mpcourse.als import ALSScaler
from mpcourse.dynamic import DynamicScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.simulator import Recording
from mpcourse.step import MixedStep
from mpcourse.toys import batches, digits, get_toy, train_toy
from storm_study import fp32_step

POLICIES = {'FP32': None, 'measured': 2.**10, 'measured, 2^13': 2.**13, 'measured anew': None,
            'torch': lambda: get_policy('torch'), 'fastai': lambda: get_policy('fastai'),
            'interval 100': lambda: DynamicScaler(growth_interval=100),
            'interval 10': lambda: DynamicScaler(growth_interval=10), 'ALS': ALSScaler}
KINDS = {'zero': (1000, 2e-3, (.9, .999)), 'hot': (1000, .03, (.9, .999)),
         'cold': (1000, 2e-3, (.9, .999)), 'cold, quick Adam': (1000, 2e-3, (.5, .9))}
ROWS = [f'{kind}: {policy}' for kind in KINDS for policy in POLICIES]
SEEDS = range(10)


def few(device='cpu'):
    "128 digits to learn by heart"
    whole = digits(device)
    return replace(whole, train=tuple(t[:128] for t in whole.train))


class Cooling:
    "A loss times a temperature that falls by 40 octaves in the first half of a training, and stays there"
    def __init__(self, loss_func, steps): self.loss_func, self.steps, self.at = loss_func, steps, 0

    def __call__(self, pred, y):
        loss = self.loss_func(pred, y)
        if not torch.is_grad_enabled(): return loss
        self.at += 1
        return loss*2.**(-40*min(2*(self.at - 1)/self.steps, 1))


def problem(kind):
    "The toy of a kind"
    steps, lr, betas = KINDS[kind]
    toy = replace(get_toy('relu_mlp'), data=few, bs=128, steps=steps,
                  opt=partial(torch.optim.Adam, lr=lr, betas=betas, eps=2.**-70))
    return replace(toy, loss_func=Cooling(toy.loss_func, steps)) if 'cold' in kind else toy


def measured_anew(every=25):
    "A step with a constant scale that is measured again every so often"
    done, step = 0, None
    def go(model, xb, yb, opt, loss_func):
        nonlocal done, step
        if done % every == 0:
            at = getattr(loss_func, 'at', None)
            step = MixedStep(StaticScaler.measured(model, (xb, yb), loss_func))
            if at is not None: loss_func.at = at                # a look is no step of the training
        done += 1
        return step(model, xb, yb, opt, loss_func)
    return go


def step_for(policy, toy, seed):
    "FP32, a scale measured on a batch, or a policy"
    if policy == 'FP32': return fp32_step(float('inf'))
    if policy == 'measured anew': return measured_anew()
    made = POLICIES[policy]
    if not isinstance(made, float): return MixedStep(made())
    first = next(iter(batches(toy.data(), toy.bs, 1, seed)))
    return MixedStep(StaticScaler.measured(toy.model(seed), first, get_toy(toy.name).loss_func,
                                           made))


def run(row, seed):
    "Octaves by which the largest gradient rose, then fell; log2 of the last loss; accuracy; log2 scale; skipped"
    kind, policy = row.split(': ')
    toy = problem(kind)
    rec = Recording(step_for(policy, toy, seed))
    got = train_toy(toy, rec, seed)
    log = torch.tensor(rec.amax).log2()
    log = log[log.isfinite()]
    loss = torch.tensor(got.loss*(2.**40 if 'cold' in kind else 1.)).log2()
    return dict(rose=log.max() - log[0], fell=log.max() - log[-20:].median(), loss=loss,
                acc=got.acc,
                scale=torch.tensor(got.history['scale'][-1]).log2(),
                skipped=sum(got.history['skipped']))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
