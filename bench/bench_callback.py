"""What mixed precision costs: our callback in a Learner, against autocast and torch's GradScaler in a plain loop.

A Learner calls events, a loop does not: so its bare step in FP32 is subtracted from ours, and the loop's is added.
Both compute in the same `fp32_accumulate` on a CPU; on a GPU both run on its own kernels, and fastai's MixedPrecision stands beside them.
Judged at 25 million parameters; the small net is reported."""
from contextlib import nullcontext
from functools import partial

import torch
from fastai.basics import Learner, OptimWrapper
from fastai.callback.all import MixedPrecision
from harness import Row, medians
from mpcourse.callback import MixedPrecisionCB, tensor_dls
from mpcourse.scaler import StaticScaler
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import CharTransformer, cross_entropy, digits
from mpcourse.zoo import cnn

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


def wait():
    if DEVICE == 'cuda': torch.cuda.synchronize()


def opt_func(params, lr=1e-3, **kw):
    return OptimWrapper(params, torch.optim.SGD, lr=lr, momentum=.9)


def learner_step(make, x, y, cb=None):
    "One batch of a Learner, as `fit` would run it"
    learn = Learner(tensor_dls((x, y), (x, y), len(y), DEVICE), make(), loss_func=cross_entropy,
                    opt_func=opt_func, cbs=cb)
    learn.remove_cbs([c for c in learn.cbs if c.name == 'progress'])
    learn.create_opt()
    learn.dl, learn.n_iter, learn.n_epoch = learn.dls.train, 10**9, 1
    learn('before_fit'); learn.epoch = 0; learn('before_epoch'); learn('before_train')
    fit = cb.one_fit() if isinstance(cb, MixedPrecisionCB) else nullcontext()
    fit.__enter__()
    # the fit stays open as long as there are steps
    def step(fit=fit): learn.one_batch(0, (x, y)); wait()
    return step


def plain_step(make, x, y, amp=False):
    "The loop that everybody writes; with amp, as torch's documentation has it"
    model = make(); opt, scaler = torch.optim.SGD(model.parameters(), 1e-3, momentum=.9), torch.amp.GradScaler(DEVICE, init_scale=1024.)
    def bare():
        cross_entropy(model(x), y).backward()
        opt.step(); opt.zero_grad(); wait()
    def mixed():
        with fp32_accumulate():
            with torch.autocast(DEVICE, torch.float16): loss = cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
        scaler.step(opt); scaler.update(); opt.zero_grad(); wait()
    model.train()
    return mixed if amp else bare


def compare(name, make, x, y, repeats, bound=None):
    "Whole steps, in one run"
    fns = {'learner': learner_step(make, x, y),
           'ours': learner_step(make, x, y, MixedPrecisionCB(StaticScaler(1024.))),
           'loop': plain_step(make, x, y), 'amp': plain_step(make, x, y, amp=True)}
    if DEVICE == 'cuda': fns['fastai'] = learner_step(make, x, y, MixedPrecision())
    t = medians(fns, repeats, warm=1)
    ms = {k: round(v*1e3, 3) for k,v in t.items()}
    rows = [Row(f'{name}: our step / autocast and GradScaler',
                (t['loop'] + t['ours'] - t['learner'])/t['amp'], at_most=bound, ms=ms)]
    if DEVICE == 'cuda':
        rows.append(Row(f"{name}: our step / fastai's MixedPrecision", t['ours']/t['fastai'],
                        at_most=bound, ms=ms))
    return rows


def bench_cnn():
    "The digits CNN, 64 images"
    x, y = (t[:64].to(DEVICE) for t in digits().train)
    return compare('digits CNN', lambda: cnn(device=DEVICE), x, y, 101)


def bench_transformer():
    "A character transformer of 25 million parameters, two windows of 64 characters"
    make = partial(CharTransformer, d=420, layers=12, heads=4)
    x = torch.randint(96, (2, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    n = sum(p.numel() for p in make().parameters())
    assert n > 25_000_000, n
    return compare('transformer of 25 M', lambda: make().to(DEVICE), x, x, 15, 1.05)
