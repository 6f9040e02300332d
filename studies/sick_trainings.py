"""Which remedies cure a sick training? Seven with one fault each; the solutions of six exercises
stand here (chapter 35)

A row is a training and a remedy. `measured`: a loss scale measured on the first batch. `start
2^24`: the training's own rule for the scale, from 2^24, or the course's where it has none (E:
constant). `BF16`: autocast with FP32 weights. `own`: the cure that fits the cause. `lost` is the
share of what FP32 learns without the fault, with the same seed, that is lost on new data; a
training is cured if that is less than half, as in chapter 33. The rows `nothing` and `own` also
hold the evidence of chapter 35.
"""
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch, torch.nn.functional as F
from torch import nn

from mpcourse.accumulate import NoMasterStep
from mpcourse.cases import REMEDIES, evidence, lost_by, train_patient
from mpcourse.compare import Training, converted, measured_scale
from mpcourse.dynamic import DynamicScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import BufferSnapshot, MixedStep
from mpcourse.toys import batches, cross_entropy, deep_sigmoid, digits, evaluate, mlp, plain_step, relu_mlp, seeded
from mpcourse.zoo import cnn

DATA = digits()


@dataclass
class Patient:
    "A training with one fault, and what may be done about it"
    make: Callable # (seed, repaired) -> Training; repaired: without a fault of model, data or loss
    steps: dict # 'nothing', 'own' and those of `REMEDIES` -> (Training -> step for `fit`)
    cause: str # one of `cases.CAUSES`
    cure: str # one of `cases.CURES`
    note: str # the solution, for people


def common():
    "FP32 and BF16 are the same for all"
    return {'FP32': lambda t: plain_step,
            'BF16': lambda t: MixedStep(dtype='bf16', compute=nullcontext)}


def mixed(dynamic=DynamicScaler, step=MixedStep):
    "FP16 with a scaler: the rule itself, measured once, and from 2^24"
    return common() | {'nothing': lambda t: step(dynamic()),
                       'measured': lambda t: step(measured_scale(t)),
                       'start 2^24': lambda t: step(dynamic(init_scale=2.**24))}


def hold(t): return MixedStep(DynamicScaler())


def classify(model, opt, bs, steps, seed, loss_func=cross_entropy, change=None):
    "A training on the digits, judged by the loss on new ones; `change` alters batch i"
    def drawn():
        for i, batch in enumerate(batches(DATA, bs, steps, seed)):
            yield change(i, *batch) if change else batch
    return Training(model, opt, loss_func, drawn, lambda m: evaluate(m, DATA)['loss'])


# --- stored: weights of BF16, and a small learning rate ---

def stored(seed, repaired):
    return classify(relu_mlp(seed, width=128), partial(torch.optim.Adam, lr=9e-5), 64, 400, seed)


def store(scaler, rounding='nearest'):
    "A step with weights stored in BF16"
    def begin(t):
        s = scaler(t)
        t.model.bfloat16()
        step = NoMasterStep(s, rounding)
        def cast(model, xb, *rest): return step(model, xb.bfloat16(), *rest)
        return cast
    return begin


# --- mask: one blank picture masks every key ---

class Rows(nn.Module):
    "Attention among those rows of a picture that are not empty: (N, 1, 8, 8) to logits (N, 10)"
    def __init__(self, blocked, d=32):
        super().__init__()
        self.blocked, self.inp, self.qkv, self.out = blocked, nn.Linear(8, d), nn.Linear(d, 3*d), nn.Linear(d, 10)

    def forward(self, x):
        rows = x.flatten(1, 2)
        empty = (rows == 0).all(-1)
        q, k, v = self.qkv(self.inp(rows).tanh()).chunk(3, -1)
        scores = (q @ k.mT*k.shape[-1]**-.5).masked_fill(empty[:, None], self.blocked)
        seen = (scores.softmax(-1) @ v).masked_fill(empty.all(1)[:, None, None], 0.)
        return self.out(seen.mean(1))


def blank(i, x, y):
    "In one batch of ten a picture is blank; its label is the one that the loss leaves out"
    if i % 10 != 5: return x, y
    x, y = x.clone(), y.clone()
    x[0], y[0] = 0., -100
    return x, y


def mask(seed, repaired):
    with seeded(seed): model = Rows(-1e4 if repaired else float('-inf'))
    return classify(model, partial(torch.optim.Adam, lr=3e-3), 64, 250, seed, change=blank)


def bf16_without_look(t):
    "Autocast, and no look at the gradients"
    def step(model, xb, yb, opt, loss_func):
        opt.zero_grad()
        with torch.autocast('cpu', torch.bfloat16): pred = model(xb)
        loss = loss_func(pred.float(), yb)
        loss.backward()
        opt.step()
        return loss.detach()
    return step


# --- storm: sixteen bad batches, torch's rule, small gradients ---

def glare(first, last, i, x, y, n=1):
    "Some pictures of some batches are 100,000 times too bright"
    return (torch.cat([x[:n]*1e5, x[n:]]), y) if first <= i < last else (x, y)


def storm(seed, repaired):
    def loss_func(pred, y): return cross_entropy(pred, y)/1024
    opt = partial(torch.optim.Adam, lr=6e-3, eps=1e-13)
    return classify(deep_sigmoid(seed, depth=7), opt, 128, 400, seed, loss_func,
                    partial(glare, 20, 36, n=6))


# --- init: fourteen sigmoids as PyTorch makes them ---

def init(seed, repaired):
    model = deep_sigmoid(seed, depth=14)
    with seeded(seed):
        for layer in model if repaired else ():
            if not isinstance(layer, nn.Linear): continue
            nn.init.xavier_normal_(layer.weight, gain=4.)
            nn.init.zeros_(layer.bias)
    return classify(model, partial(torch.optim.Adam, lr=2e-3), 128, 150, seed)


# --- fp8: E4M3 forward, E5M2 backward, and no scale ---

def fp8(seed, repaired):
    return classify(deep_sigmoid(seed, depth=6), partial(torch.optim.Adam, lr=6e-3), 128, 300, seed)


# --- bright: one picture, one skipped step, and buffers that nobody puts back ---

class OldStep(MixedStep):
    "A skipped step leaves its traces in the buffers"
    def begin(self, model):
        super().begin(model)
        self.controller.buffers = BufferSnapshot()


def bright(seed, repaired):
    opt = partial(torch.optim.SGD, lr=.1, momentum=.9)
    return classify(cnn(seed), opt, 64, 300, seed, change=partial(glare, 50, 51))


# --- summed: squares in units of 1/255, added up ---

def summed(seed, repaired):
    def target(x): return x.flatten(1).flip(1)*255
    def error(pred, y): return F.mse_loss(pred, y) if repaired else (pred - y).square().sum()
    def drawn(): return ((x, target(x)) for x, _ in batches(DATA, 64, 300, seed))
    def score(model): return F.mse_loss(model(DATA.valid[0]), target(DATA.valid[0])).sqrt()
    model = mlp([64, 128, 128, 64], nn.ReLU, seed)
    return Training(model, partial(torch.optim.Adam, lr=2e-3), error, drawn, score)


NOTES = dict(
    A="The weights are stored in BF16 and all lie on its grid; an update of 1e-4 is less than half of its spacing there, so most "
      "weights stand still. No loss scale helps, since gradients arrive. FP32 weights do, at twice the bytes; rounding the "
      "update stochastically costs none (chapters 02 and 21).",
    B="In one batch of ten a picture is blank, so every key is masked and softmax sees minus infinity only. The loss leaves that "
      "picture out and is finite; its gradient is NaN in any format. A step that looks at gradients skips each tenth batch "
      "for ever and trains; FP32 without a look shows the bug. Mask with -1e4 (chapter 06).",
    C="From step 20 on sixteen batches are broken. Torch's rule halves the scale at each, from 2^16 down to 1, and needs 2,000 "
      "clean steps to double it; meanwhile the gradients of this net underflow. Holding the scale where the loss itself is not finite "
      "cures it. From 2^24 the scale ends at 2^8, which is enough for some seeds and not for others (chapters 10, 13 and 14).",
    D="Fourteen sigmoids with PyTorch's first weights: each layer shrinks the gradient, the first ones lie nearly forty octaves "
      "below the last, and nothing moves in FP32 either. No format is guilty. Xavier's weights with a gain of 4 (chapters 03 and 20).",
    E="Products are taken in FP8 without scales, and most gradients of the first layers are smaller than 2^-17, where E5M2 ends. One loss scale that is "
      "measured cures it; 2^24 overflows. A scale for each tensor needs no measurement (chapter 27).",
    F="One picture is far too bright in step 50. The step is skipped, but the forward pass has already left infinities in "
      "BatchNorm's running statistics; training does not use them, evaluation does. FP32 and BF16 hold such numbers, and "
      "forget them. Buffers have to go back with the weights (chapter 09).",
    G="Squares in units of 1/255 are added up over pixels and pictures: gradients soon exceed 65,504 without any scale, "
      "and the scaler has nowhere to go. A mean (chapter 08).")
PATIENTS = dict(
    A=Patient(stored,
              common() | {'nothing': store(lambda t: StaticScaler(1.)),
                          'measured': store(measured_scale),
              'start 2^24': store(lambda t: DynamicScaler(2.**24)), 'own': store(lambda t: StaticScaler(1.), 'stochastic')},
              'swallowed', 'stochastic rounding', NOTES['A']),
    B=Patient(mask, common() | {'nothing': bf16_without_look, 'own': bf16_without_look,
              'measured': lambda t: MixedStep(measured_scale(t)),
              'start 2^24': lambda t: MixedStep(DynamicScaler(2.**24))}, 'nan gradient',
              'finite mask', NOTES['B']),
    C=Patient(storm, mixed(partial(get_policy, 'torch')) | {'own': hold}, 'scale fell', 'hold', NOTES['C']),
    D=Patient(init, mixed() | {'own': hold}, 'initialisation', 'larger weights', NOTES['D']),
    E=Patient(fp8, common() | {'nothing': converted('none'), 'own': converted('tensorwise'),
              'measured': converted('none', lambda t: measured_scale(t).scale.item()),
              'start 2^24': converted('none', lambda t: 2.**24)}, 'underflow', 'tensor scales',
              NOTES['E']),
    F=Patient(bright, mixed(step=OldStep) | {'own': hold}, 'buffers', 'keep buffers', NOTES['F']),
    G=Patient(summed, mixed() | {'own': hold}, 'sum', 'mean', NOTES['G']))
ROWS = [f'{name}: {remedy}' for name in PATIENTS for remedy in ('nothing', *REMEDIES, 'own')]
SEEDS = range(10)


def judged(patients, row, seed):
    "Share of what a healthy training learns that is lost, both scores, the last loss; the evidence of `nothing` and `own`"
    name, remedy = row.split(': ')
    record, healthy = (train_patient(patients[name], r, seed) for r in (remedy, 'healthy'))
    found = dict(lost=lost_by(record, healthy), score=record.score, healthy=healthy.score,
                 loss=record.log.loss.iloc[-1])
    return found | (evidence(record) if remedy in ('nothing', 'own') else {})


def run(row, seed):
    "One case under one remedy"
    return judged(PATIENTS, row, seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
