"""What brings two towers through a storm of bad batches? (chapters 13 and 14)

A row is a policy and a storm. A storm has ten batches from step 30 of 300, and the loss is divided
by 1,024, as a mean over so many micro-batches divides it, if nothing else is said. `loss`: one
picture of twenty is 100,000 times too bright, so in FP16 the loss is not finite; `loss / 1` and so
on: that, divided by less. `NaN`: the loss is finite, and the gradient of the logits is NaN; `NaN x
24`: in 24 batches. `large`: it is 2^20 times too large. `grown`: it is 2^14 times as large from
step 30 on, for good. `late`: as `loss`, from step 100 on. Learnt: the loss ends below 2; guessing
gives 2.30. FP32, too, skips a step whose gradients are not finite.
"""
import math
from dataclasses import replace
from itertools import count

import torch
from torch.nn.utils import clip_grad_norm_

from mpcourse.dynamic import DynamicScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, get_toy, predict, train_toy
from mpcourse.zoo import contrastive

STEPS = 300
# divisor of the loss, first bad step, how many, and the factor on the gradient of the logits (None: bright pictures)
STORMS = {'none': (1024, 30, 0, None), 'loss': (1024, 30, 10, None),
          'loss / 256': (256, 30, 10, None),
          'loss / 64': (64, 30, 10, None), 'loss / 1': (1, 30, 10, None), 'NaN': (1024, 30, 10, math.nan),
          'NaN x 24': (1024, 30, 24, math.nan), 'large': (1024, 30, 10, 2.**20),
          'grown': (1024, 30, STEPS, 2.**14), 'late': (1024, 100, 10, None)}


def corrupt(xb, share=.05, factor=1e5, generator=None):
    "A batch with a few pictures that are far too bright: finite in FP32, infinite in FP16; `xb` may be a tuple of pictures and more"
    x = xb[0] if isinstance(xb, tuple) else xb
    hit = torch.randperm(len(x), generator=generator)[:max(1, round(share*len(x)))]
    x = x.index_copy(0, hit, x[hit]*factor)
    return (x, *xb[1:]) if isinstance(xb, tuple) else x


def fp32_step(clip):
    "FP32 with clipping, which skips what is not finite"
    def step(model, xb, yb, opt, loss_func):
        opt.zero_grad()
        loss = loss_func(predict(model, xb), yb)
        loss.backward()
        fine = clip_grad_norm_(model.parameters(), clip).isfinite()
        if fine: opt.step()
        return dict(loss=loss.detach(), scale=1., skipped=float(not fine))
    return step


def torchs_step(scaler, clip):
    "A loop with torch's scaler and one line more: a batch whose loss is not finite is left out"
    def step(model, xb, yb, opt, loss_func):
        opt.zero_grad()
        scale = scaler.get_scale()
        with fp32_accumulate():
            with torch.autocast('cpu', torch.float16): pred = predict(model, xb)
            loss = loss_func(pred.float(), yb)
            # the line
            if not loss.isfinite(): return dict(loss=loss.detach(), scale=scale, skipped=1.)
            scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        return dict(loss=loss.detach(), scale=scale, skipped=float(scaler.get_scale() < scale))
    return step


def toy_of(divide):
    "The two towers, with a loss that is divided"
    return replace(get_toy('two_towers'), steps=STEPS,
                   loss_func=lambda pred, y: contrastive(pred, y)/divide)


def measured(seed, divide):
    "A scale measured on the first batch"
    toy = toy_of(divide)
    return StaticScaler.measured(toy.model(seed), next(batches(toy.data(), toy.bs, 1, seed)),
                                 toy.loss_func)


def floored(seed, divide):
    "Torch's rule from a measured scale, with a floor four octaves below it"
    scale = measured(seed, divide).scale.item()
    return DynamicScaler(scale, min_scale=scale/16, skip_nonfinite_loss=False)


# from the same 2^16, from a start of one's own, and no scaler at all
POLICIES = {'FP32': None, 'torch': lambda *_: get_policy('torch'), 'torch and the line': None,
            'hold': lambda *_: DynamicScaler(), 'floor 2^8': lambda *_: DynamicScaler(min_scale=2.**8, skip_nonfinite_loss=False),
            'floor 2^12': lambda *_: DynamicScaler(min_scale=2.**12, skip_nonfinite_loss=False),
            'patience 16': lambda *_: DynamicScaler(hysteresis=16, refill='clean', skip_nonfinite_loss=False),
            'torch from 2^24': lambda *_: get_policy('torch', init_scale=2.**24),
            'measured, floor 2^-4 of it': floored, 'measured, constant': measured}
PUBLISHED = {'Megatron from 2^16': lambda *_: get_policy('megatron', init_scale=2.**16),
             'Megatron from its own 2^32': lambda *_: get_policy('megatron'),
             'metaseq from 2^16': lambda *_: get_policy('metaseq', init_scale=2.**16),
             'metaseq from its own 4': lambda *_: get_policy('metaseq'),
             'constant 2^16': lambda *_: StaticScaler(2.**16), 'BF16': None}
INTERVALS = {f'torch, interval {n}': lambda *_, n=n: get_policy('torch', growth_interval=n) for n in (20, 5)}
ROWS = [f'{p}: {s}' for p in POLICIES for s in STORMS if s != 'late']
ROWS += [f'{p}: {s}' for p in PUBLISHED for s in ('none', 'loss')] + ['FP32: late', 'torch: late']
ROWS += [f'{p}: {s}' for p in INTERVALS for s in ('none', 'loss', 'NaN')]
SEEDS = range(10)


def step_of(policy, seed, divide):
    "The step of a policy"
    clip = 1/divide
    if policy == 'FP32': return fp32_step(clip)
    if policy == 'torch and the line': return torchs_step(torch.amp.GradScaler('cpu'), clip)
    if policy == 'BF16': return MixedStep(StaticScaler(1.), torch.bfloat16, clip=clip)
    return MixedStep((POLICIES | PUBLISHED | INTERVALS)[policy](seed, divide), clip=clip)


def in_storm(step, storm, seed, storms=STORMS):
    "The same step, with the storm's batches or gradients"
    _, first, n, factor = storms[storm]
    number, gen = count(), torch.Generator().manual_seed(seed)
    def go(model, xb, yb, opt, loss_func):
        def louder(pred, y):
            pred.register_hook(lambda g: g*factor)
            return loss_func(pred, y)
        if not first <= next(number) < first + n: return step(model, xb, yb, opt, loss_func)
        if factor: return step(model, xb, yb, opt, louder)
        return step(model, corrupt(xb, generator=gen), yb, opt, loss_func)
    return go


def run(row, seed):
    "Final loss, whether it learnt, zeros of the first layer's gradient, lowest and last log2 scale, skipped steps"
    policy, storm = row.split(': ')
    divide, zeros = STORMS[storm][0], []
    toy, step = toy_of(divide), in_storm(step_of(policy, seed, divide), storm, seed)
    def look(model, xb, yb, opt, loss_func):
        rec = step(model, xb, yb, opt, loss_func)
        if not rec['skipped']: zeros.append((model.image[1].weight.grad == 0).float().mean().item())
        return rec
    got = train_toy(toy, look, seed)
    scale = torch.tensor(got.history['scale']).log2()
    return dict(loss=divide*got.loss, learnt=divide*got.loss < 2,
                zeros=sum(zeros[-20:])/len(zeros[-20:]),
                lowest=scale.min(), end=scale[-1], skipped=sum(got.history['skipped']))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
