"""Who brings the two towers through the storm, which layers go dark, and who was warned? (chapter
17)

A row is a policy (a crew) and the step at which ten bad batches begin; a collector looks at the
gradients. The small CNN flies through the same storm. Learnt: the loss ends below 1.5 (the CNN's
below .1). `warned` is the rule of the article on CLIP: the mean flushed share of the weights'
gradients is 10 %, or 5 % and rising.
"""
from contextlib import nullcontext
from functools import partial
from math import log2, nan

import pandas as pd
import torch

import mpcourse.zoo  # noqa: F401
from mpcourse.als import ALSScaler
from mpcourse.dynamic import DynamicScaler
from mpcourse.monitor import TensorCollector
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, fit, get_toy
from mpcourse.underflow import note_flushed, share_table
from storm_study import corrupt, fp32_step


def grow(start=2.**16, interval=2000, **kw):
    "Torch's policy, tuned"
    return lambda: DynamicScaler(start, growth_interval=interval, skip_nonfinite_loss=False, **kw)


CREWS = {'FP32': None, 'BF16': lambda: StaticScaler(1.), 'torch': grow(),
         'start 2^24': grow(2.**24),
         'interval 100': grow(interval=100), 'interval 10': grow(interval=10),
         'interval 1': grow(interval=1), 'Megatron': lambda: get_policy('megatron', init_scale=2.**16),
         'metaseq': lambda: get_policy('metaseq', init_scale=2.**16), 'floor 2^12': grow(min_scale=2.**12),
         'static 2^16': lambda: StaticScaler(2.**16), 'ALS': partial(ALSScaler, skip_nonfinite_loss=False),
         'ALS, saturating': partial(ALSScaler, saturate=True, skip_nonfinite_loss=False)}
STORMS = {'calm': None, 'at 30': 30, 'at 300': 300}
ROWS = {f'{crew}, {when}': (crew, at) for crew in CREWS for when, at in STORMS.items()}
ROWS |= {'CNN, calm': ('torch', None), 'CNN, at 30': ('torch', 30)}
SEEDS = range(5)
WATCHED = tuple(f'image.{k}.weight' for k in range(1, 14, 2)) + ('words.1.weight',)


def crew_step(name):
    "The step of a crew, and its scaler"
    if name == 'FP32': return fp32_step(1.), None
    scaler, how = CREWS[name](), 'saturate' if 'saturating' in name else 'inf'
    if name == 'BF16':
        return MixedStep(scaler, torch.bfloat16, compute=nullcontext, clip=1.), scaler
    return MixedStep(scaler, compute=partial(fp32_accumulate, how), clip=1.), scaler


def corrupt_batches(batches, bad, seed):
    "Batches, with pictures that are far too bright where it storms"
    gen = torch.Generator().manual_seed(seed)
    for i, (xb, yb) in enumerate(batches):
        yield (corrupt(xb, generator=gen) if i < len(bad) and bad[i] else xb), yb


def looked_at(at=None):
    "When the collector looks: every 20 steps; with a storm every 10 around its beginning, and every 60"
    if at is None: return frozenset(range(0, 600, 20))
    return frozenset(range(at - 30, at + 60, 10)) | frozenset(range(0, 600, 60)) | {590}


def clip_storm(crew, at=None, seed=0, toy='two_towers', steps=None):
    "One training with a collector: its frame, and the history with the loss as if nothing had divided it"
    divide = 1024. if toy == 'two_towers' else 1.
    toy, (step, scaler) = get_toy(toy), crew_step(crew)
    steps = steps or toy.steps
    bad = [at is not None and at <= i < at + 10 for i in range(steps)]
    model = toy.model(seed)
    data = corrupt_batches(batches(toy.data(), toy.bs, steps, seed), bad, seed)
    rows, opt = [], toy.opt(model.parameters())
    def probed(model, xb, yb, opt, loss_func):
        if scaler is not None:
            note_flushed(c, (xb, yb), loss_func, dtype=step.dtype, compute=step.compute)
        return step(model, xb, yb, opt, loss_func)
    with TensorCollector(model, looked_at(at).__contains__, 'weight_grad',
                         stats=('zeros', 'overflow'), scaler=scaler) as c:
        def look(i, rec):
            c.step()
            rows.append({k: float(rec[k]) for k in ('loss', 'scale', 'skipped')})
        fit(model, data, opt, lambda p, y: toy.loss_func(p, y)/divide, probed,
            toy.schedule(toy.steps), look)
    frame = c.frame()
    return frame if 'flushed' in frame else frame.assign(flushed=nan), {k: [r[k]*(divide if k == 'loss' else 1) for r in rows] for k in rows[0]}


def first_warning(frame, window=30, low=.01, high=.05):
    "The step at which the article's rule would first have warned; NaN if it never did"
    rates = share_table(frame).mean(axis=1)
    for n in range(3, len(rates) + 1):
        some = rates.to_numpy()[max(0, n - window):n]
        third = -(-len(some)//3)
        late = some[-third:].mean()
        if late >= 2*high or late >= high and late - some[:third].mean() > low:
            return float(rates.index[n - 1])
    return nan


def shares(frame, step, what):
    "A statistic of the watched layers in the last finite collection up to a step"
    df = frame[(frame.step <= step) & (frame.overflow == 0) & frame.name.isin(WATCHED)]
    last = df.groupby('name', sort=False)[what].last()
    return {n: float(last.get(n, nan)) for n in WATCHED}


def moves_at(losses, below=2.2):
    "The first step from which the mean of ten losses lies below a guesser's; NaN if it never does"
    mean = pd.Series(losses).rolling(10).mean()
    return float((mean < below).idxmax()) if (mean < below).any() else nan


def run(row, seed):
    "Loss, whether it learnt, steps lost, scales, when the verdict came and the loss moved, shares of layers"
    (crew, at), cnn = ROWS[row], row.startswith('CNN')
    frame, h = clip_storm(crew, at, seed, 'cnn' if cnn else 'two_towers')
    loss, log = sum(h['loss'][-20:])/20, [log2(s) for s in h['scale']]
    out = dict(loss=loss, learnt=loss < (.1 if cnn else 1.5), skipped=sum(h['skipped']),
               lowest=min(log),
               end=log[-1], moves=moves_at(h['loss']),
               warned=nan if crew == 'FP32' else first_warning(frame))
    if cnn: return out
    after = (30 if at is None else at) + 30
    for what in ('zeros',) if crew == 'FP32' else ('zeros', 'flushed'):
        for when, step in (('before', after - 31), ('after', after), ('end', 600)):
            out |= {f'{what} {when} {n}': v for n, v in shares(frame, step, what).items()}
    return out


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
