"""Does a factor for each layer lose fewer gradients than one scale for all, and train better?
(chapter 20)

Four nets: eight sigmoid layers, 24 of them (which learn in no format), convolutions, a small
transformer. Every twenty steps the batch's gradient is computed in FP32, too; a weight's flushed
share is the share of its gradient that is zero in FP16 only. `worst`: of the layer that loses
most, on average over the training. `measured`: the largest gradient of the first batch lies at
2^13.
"""
import time
from dataclasses import replace
from functools import partial

import torch
from torch.func import functional_call

import mpcourse.zoo  # noqa: F401
from mpcourse.als import ALSScaler
from mpcourse.failures import flushed
from mpcourse.layerwise import LayerwiseScaler
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, deep_sigmoid, get_toy, plain_step, train_toy

NETS = {'8 sigmoids': (get_toy('deep_sigmoid'), 600), 'CNN': (get_toy('cnn'), 200),
        'text': (get_toy('char_lm'), 150),
        '24 sigmoids': (replace(get_toy('deep_sigmoid'), model=partial(deep_sigmoid, depth=24)),
                        100)}
measured = partial(StaticScaler.measured, target=2.**13)


def layerwise(model, batch, loss_func, **config):
    "Measured factors, and the loss scale of the row `measured`"
    start = max(1., measured(model, batch, loss_func).scale.item())
    return LayerwiseScaler.measured(model, batch, loss_func,
                                    **{'init_scale': start, 'cap': 2.**100, **config})


SCHEMES = {'FP32': None, 'static 1': lambda *_: StaticScaler(1.), 'measured': measured,
           'ALS': lambda *_: ALSScaler(), 'layer-wise, from 1': lambda model, *_: LayerwiseScaler(model),
           'layer-wise, measured': layerwise, 'layer-wise, every 100': partial(layerwise, every=100)}
# what keeps the gradients of the deep net: the start, or room for large factors?
CAUSES = {'layer-wise, from 1, no cap': lambda model, *_: LayerwiseScaler(model, cap=2.**100),
          'layer-wise, measured, cap 2^10': lambda *given: layerwise(*given, cap=2.**10)}
ROWS = {f'{net}: {scheme}': (net, scheme) for net in NETS for scheme in SCHEMES}
ROWS |= {f'24 sigmoids: {scheme}': ('24 sigmoids', scheme) for scheme in CAUSES}
SEEDS = range(3)
EVERY = 20


def fp32_gradients(model, xb, yb, loss_func):
    "Gradients of the weights of layers; the model's buffers stay as they are"
    ps = {n: p for n, p in model.named_parameters() if n.endswith('weight') and p.dim() > 1}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    pred = functional_call(model, buffers, xb if isinstance(xb, tuple) else (xb,))
    return dict(zip(ps, torch.autograd.grad(loss_func(pred, yb), list(ps.values()))))


def looked_at(step, looks):
    "The step; every so often it notes each weight's flushed share"
    count = 0
    def go(model, xb, yb, opt, loss_func):
        nonlocal count
        due, count = count % EVERY == 0, count + 1
        exact = fp32_gradients(model, xb, yb, loss_func) if due else {}
        rec = step(model, xb, yb, opt, loss_func)
        got = dict(model.named_parameters())
        if due and not (isinstance(rec, dict) and rec['skipped']):
            looks.append({n: flushed(g, got[n].grad) for n, g in exact.items()})
        return rec
    return go


def milliseconds(toy, scheme, seed, steps=30):
    "Shortest time of a step without looks, the processor's"
    model, times, first = toy.model(seed=seed), [], next(batches(toy.data(), toy.bs, 1, seed))
    make = {**SCHEMES, **CAUSES}[scheme]
    step = MixedStep(make(model, first, toy.loss_func)) if make else plain_step
    opt = toy.opt(model.parameters())
    for xb, yb in batches(toy.data(), toy.bs, steps, seed):
        start = time.process_time()
        step(model, xb, yb, opt, toy.loss_func)
        times.append(time.process_time() - start)
    return 1000*min(times)


def run(row, seed):
    "Loss, accuracy, skipped steps, layers that lose over 1 % at first, flushed shares, time of a step"
    net, scheme = ROWS[row]
    (toy, steps), looks = NETS[net], []
    first = next(batches(toy.data(), toy.bs, 1, seed))
    make = {**SCHEMES, **CAUSES}[scheme]
    step = MixedStep(make(toy.model(seed=seed), first, toy.loss_func)) if make else plain_step
    res = train_toy(toy, looked_at(step, looks), seed, steps=steps)
    names = list(looks[0])
    mean = {n: sum(look[n] for look in looks)/len(looks) for n in names}
    return dict(loss=res.loss, acc=res.acc, skipped=sum(res.history.get('skipped', [0.])),
                harmed=sum(s > .01 for s in looks[0].values()), worst=max(mean.values()),
                ms=milliseconds(toy, scheme, seed), **{f'first {n}': looks[0][n] for n in names},
                **{f'mean {n}': mean[n] for n in names})


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
