"""Does the callback cost accuracy? (chapter 12)

A row is a toy and a scheme: a Learner in FP32, and the same one after `to_mixed`. The deep sigmoid
net needs a loss scale, the two others do not.
"""
import random
from functools import partial

import fastai.callback.schedule  # noqa: F401, gives a Learner fit_one_cycle
import numpy as np
import torch
from fastai.basics import Adam, Learner

from mpcourse.callback import quiet_fit, tensor_dls
from mpcourse.scaler import StaticScaler
from mpcourse.toys import accuracy, get_toy, seed as run_seed

SCHEMES = {'fp32': None, 'scale 1': dict(scaler=1.), 'fp16': dict(scaler=2.**11),
           'bf16': dict(dtype='bf16')}
EPOCHS = dict(deep_sigmoid=60, cnn=4, char_lm=2)
ROWS = {f'{toy}, {scheme}': (toy, scheme) for toy in EPOCHS for scheme in SCHEMES}
SEEDS = range(5)


def training_part(name):
    "Digits, or windows of text that do not overlap"
    train = get_toy(name).data().train
    return tuple(t[::64] for t in train) if name == 'char_lm' else train


def run(row, seed):
    "Validation loss and accuracy"
    name, scheme = ROWS[row]
    toy, n, scheme = get_toy(name), run_seed(seed), SCHEMES[scheme]
    for draw_from in (torch.manual_seed, random.seed, np.random.seed): draw_from(n)
    dls = tensor_dls(training_part(name), toy.data().valid, toy.bs)
    learn = Learner(dls, toy.model(seed=seed), loss_func=toy.loss_func, lr=5e-3, wd=0.,
                    metrics=accuracy,
                    opt_func=partial(Adam, eps=1e-8))
    if scheme:
        if 'scaler' in scheme: scheme = dict(scaler=StaticScaler(scheme['scaler']))
        learn.to_mixed(**scheme)
    quiet_fit(learn, EPOCHS[name], method='fit_one_cycle' if name == 'deep_sigmoid' else 'fit')
    return dict(zip(('loss', 'acc'), learn.recorder.values[-1][1:]))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
