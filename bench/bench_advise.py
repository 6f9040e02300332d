"""What `advise_schemes` costs in memory, beside a training step of its model: three times the weights, and what the largest layer needs while it is computed.

The model is a GPT trained by Adam in FP32. Memory is the growth of the process's peak (`ru_maxrss`), each taken in a process of its own:
for the training, and for advice on the schemes that are named."""
import multiprocessing as mp
import os, resource
from unittest.mock import patch

import torch
from bench_probe import SIZES, setting
from harness import Row
from mpcourse.advise import advise_schemes
from mpcourse.toys import cross_entropy, plain_step

FEW = ('BF16', 'FP16 hold')
ALL = ('BF16', 'FP16 hold', 'FP16 layer-wise', 'E4M3 per tensor', 'BF16 weights',
       'BF16 weights stochastic')


def train(model, batch, opt):
    for _ in range(2): plain_step(model, *batch, opt, cross_entropy)


def advise_few(model, batch, opt): advise_schemes(model, opt, cross_entropy, [batch]*2, schemes=FEW)
def advise_all(model, batch, opt): advise_schemes(model, opt, cross_entropy, [batch]*2, schemes=ALL)


def measured(job, pipe):
    "How many bytes the process's peak grew, and how many the weights have"
    torch.set_num_threads(1)
    kw, bs, context, _ = SIZES['160 million parameters']
    model, batch = setting(kw, bs, context)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024
    job(model, batch, torch.optim.Adam(model.parameters(), 1e-4))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024 - before
    pipe.send((grown, sum(p.nbytes for p in model.parameters())))


def alone(job):
    here, there = mp.Pipe()
    p = mp.get_context('spawn').Process(target=measured, args=(job, there))
    # what is freed goes back, so that a peak is a peak
    with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_='65536'): p.start()
    p.join()
    return here.recv()


def bench_advise():
    "Memory beyond that of an FP32 training step, in weights"
    step, weights = alone(train)
    rows = []
    for name, job in ('two schemes', advise_few), ('six, of which two store weights', advise_all):
        grown, _ = alone(job)
        rows.append(Row(f'{name}: memory beyond a training step, over the weights',
                        (grown - step)/weights, at_most=3.3))
    return rows
