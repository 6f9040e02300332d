"""Which rule warns of a training that FP16 harms, and which cries wolf? (chapter 17)

A row is a training. In every tenth step before the update a collector looks at the gradients, and
a replay of the batch in FP32 says what was flushed. For each rule and each threshold the result
names the first step at which it would have warned (NaN: never); each rule sees the past only.
Harmed: the drawings have an error above .1; the GPT's loss ends .1 above FP32's; the other toys
end above what FP32 reaches (chapter 03).
"""
from dataclasses import replace
from math import log2, nan

import mpcourse.zoo  # noqa: F401
from mpcourse.monitor import TensorCollector
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from clip_study import corrupt_batches
from mpcourse.step import MixedStep
from mpcourse.toys import batches, drawings, fit, get_toy, heads_loss, heads_score, plain_step, train_toy, two_heads
from mpcourse.underflow import note_flushed

import torch

HEADS = replace(get_toy('relu_mlp'), name='two heads', data=drawings, model=two_heads, bs=256,
                steps=150, loss_func=heads_loss,
                opt=lambda ps: torch.optim.Adam(ps, lr=3e-3))
GPT = replace(get_toy('char_lm'), name='GPT', steps=100)
TOYS = {'heads': HEADS, 'GPT': GPT, 'ReLU net': get_toy('relu_mlp'), 'CNN': get_toy('cnn'),
        'towers': get_toy('two_towers')}
# toy, scale or policy, divisor of the loss, whether ten bad batches come at step 30
ROWS = {'heads, scale 1': ('heads', 1., 1, False), 'heads, scale 4': ('heads', 4., 1, False),
        'heads, scale 2^12': ('heads', 2.**12, 1, False),
        'GPT, 524,288 tokens': ('GPT', 1., 512, False), 'GPT, 131,072 tokens': ('GPT', 1., 128, False),
        'GPT, 16,384 tokens': ('GPT', 1., 16, False), 'GPT, 1,024 tokens': ('GPT', 1., 1, False),
        'GPT, 524,288 tokens, scale 2^15': ('GPT', 2.**15, 512, False),
        'ReLU net, scale 1': ('ReLU net', 1., 1, False), 'CNN, scale 1': ('CNN', 1., 1, False),
        'ReLU net, torch': ('ReLU net', 'torch', 1, False), 'heads, torch': ('heads', 'torch', 1, False),
        'towers, scale 1': ('towers', 1., 1, False), 'towers, storm, torch': ('towers', 'torch', 1024, True),
        'towers, storm, static': ('towers', 2.**16, 1024, True)}
SEEDS = range(6)
EVERY = 10
GRID = {'flushed, weights': (.025, .05, .1, .2, .4),
        'flushed, outputs': (.1, .2, .3, .4, .5, .6, .7, .8, .9),
        'flushed, worst output': (.3, .5, .7, .8, .9, .95, .99, .999), 'zeros rose, weights': (.05, .1, .2, .3, .4),
        'zeros rose, outputs': (.05, .1, .2, .3, .4), 'zeros, outputs': (.2, .3, .4, .5, .6, .7, .8, .9),
        'zeros, worst output': (.3, .5, .7, .8, .9, .95, .99, .999),
        'scale fell': (4, 6, 8, 10), 'skips in a row': (3, 5, 10)}


def late(values, n=3):
    "Mean of the latest collections"
    return sum(values[-n:])/n


def first(steps, values, threshold):
    "The first step at which the mean of the last three collections reaches a threshold; NaN if it never does"
    for i in range(2, len(values)):
        if late(values[:i + 1]) >= threshold: return float(steps[i])
    return nan


def rises(values):
    "By how much each value lies above the run's own start, the mean of its first three"
    return [v - sum(values[:3])/3 for v in values]


def trained(toy, policy, divisor, storm, seed):
    "Series of what was collected, history of the steps, and the model"
    step = MixedStep(get_policy(policy) if isinstance(policy, str) else StaticScaler(policy),
                     clip=1. if storm else None)
    def loss_func(pred, y): return toy.loss_func(pred, y)/divisor
    model, series = toy.model(seed=seed), {k: [] for k in ('step', 'fw', 'fo', 'worst', 'zw', 'zo', 'zworst')}
    bad = [storm and 30 <= i < 40 for i in range(toy.steps)]
    data = [*corrupt_batches(batches(toy.data(), toy.bs, toy.steps, seed), bad, seed)]
    opt, history = toy.opt(model.parameters()), []
    with TensorCollector(model, EVERY, ('weight_grad', 'activation_grad'),
                         stats=('zeros', 'overflow'), scaler=step.scaler) as c:
        def probed(model, xb, yb, opt, loss_func):
            note_flushed(c, (xb, yb), loss_func)
            return step(model, xb, yb, opt, loss_func)
        def look(i, rec):
            c.step()
            history.append({k: float(rec[k]) for k in ('loss', 'scale', 'skipped')})
            if i % EVERY or rec['skipped']: return
            frame = c.frame(1)
            weights, outputs = frame[frame.kind == 'weight_grad'], frame[frame.kind == 'activation_grad']
            found = dict(step=i, fw=weights.flushed.mean(), fo=outputs.flushed.mean(),
                         worst=outputs.flushed.max(),
                         zw=weights.zeros.mean(), zo=outputs.zeros.mean(),
                         zworst=outputs.zeros.max())
            for k, v in found.items(): series[k].append(v)
        fit(model, data, opt, loss_func, probed, toy.schedule(toy.steps), look)
    return series, history, model


def harm(name, toy, divisor, history, model, seed):
    "Was the training harmed, beside FP32?"
    loss = divisor*sum(h['loss'] for h in history[-20:])/20
    if name == 'heads': return heads_score(model, toy.data())[1] > .1
    if name == 'GPT': return not loss < train_toy(toy, plain_step, seed).loss + .1
    return not loss <= toy.loss[1]


def run(row, seed):
    "Whether it was harmed, and the step of each rule's first warning"
    name, policy, divisor, storm = ROWS[row]
    toy = TOYS[name]
    series, history, model = trained(toy, policy, divisor, storm, seed)
    out = dict(harmed=harm(name, toy, divisor, history, model, seed), steps=len(history))
    found = {'flushed, weights': series['fw'], 'flushed, outputs': series['fo'],
             'flushed, worst output': series['worst'],
             'zeros rose, weights': rises(series['zw']), 'zeros rose, outputs': rises(series['zo']), 'zeros, outputs': series['zo'],
             'zeros, worst output': series['zworst']}
    for rule, values in found.items():
        out |= {f'{rule} {t}': first(series['step'], values, t) for t in GRID[rule]}
    start, in_row = log2(history[0]['scale']), 0
    fell, skips = {t: nan for t in GRID['scale fell']}, {t: nan for t in GRID['skips in a row']}
    for i, h in enumerate(history):
        in_row = in_row + 1 if h['skipped'] else 0
        for t in fell:
            if fell[t] != fell[t] and log2(h['scale']) <= start - t: fell[t] = float(i)
        for t in skips:
            if skips[t] != skips[t] and in_row >= t: skips[t] = float(i)
    return out | {f'scale fell {t}': v for t, v in fell.items()} | {f'skips in a row {t}': v for t, v in skips.items()}


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
