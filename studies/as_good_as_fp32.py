"""Does the callback cost accuracy? (chapter 12)

A row is a toy and a scheme: a Learner in FP32, and the same one after `to_mixed`.
"""
import random

import numpy as np
import torch
from fastai.basics import Learner

from mpcourse.callback import quiet_fit, tensor_dls
from mpcourse.scaler1 import StaticScaler
from mpcourse.toys import accuracy, get_toy, seed as run_seed

ROWS = {f'{toy}, {d}': (toy, d) for toy in ('cnn', 'char_lm') for d in ('fp32', 'fp16', 'bf16')}
SEEDS = range(5)


def training_part(name):
    "Digits, or windows of text that do not overlap"
    train = get_toy(name).data().train
    return train if name == 'cnn' else tuple(t[::64] for t in train)


def run(row, seed):
    "Validation loss and accuracy"
    name, scheme = ROWS[row]
    toy, n = get_toy(name), run_seed(seed)
    for draw_from in (torch.manual_seed, random.seed, np.random.seed): draw_from(n)
    dls = tensor_dls(training_part(name), toy.data().valid, toy.bs)
    model = toy.model(seed=seed)
    learn = Learner(dls, model, loss_func=toy.loss_func, lr=5e-3, wd=0., metrics=accuracy)
    if scheme != 'fp32':
        learn.to_mixed(StaticScaler(2.**10) if scheme == 'fp16' else None, scheme)
    quiet_fit(learn, 4 if name == 'cnn' else 2)
    return dict(zip(('loss', 'acc'), learn.recorder.values[-1][1:]))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
