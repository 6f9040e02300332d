"""Which formats and loss scales let the deep sigmoid net learn? (chapter 04)

A row is a format of forward and backward and a factor on the loss. A seed has learnt when its loss
ends below 2; guessing gives 2.30. *Only the flush* is FP32, in which nothing is rounded but
activation gradients below 2^-25 become zero.
"""
from dataclasses import replace

import torch

from mpcourse.failures import vanished_gradients
from mpcourse.toys import deep_sigmoid, get_toy, train_toy
from two_heads import flush_gradients

ROWS = {'fp32': (torch.float32, 0), 'bf16': (torch.bfloat16, 0), 'fp16': (torch.float16, 0),
        'fp16, loss x 2^2': (torch.float16, 2), 'fp16, loss x 2^4': (torch.float16, 4),
        'fp16, loss x 2^11': (torch.float16, 11), 'fp16, loss x 2^20': (torch.float16, 20),
        'fp32, only the flush': None}
SEEDS = range(10)


def flushed_net(seed, device):
    "The control's net"
    model = deep_sigmoid(seed, device)
    flush_gradients(model)
    return model


def run(row, seed):
    "Final loss, and whether it learnt"
    if row == 'fp32, only the flush': found = train_toy(replace(get_toy('deep_sigmoid'), model=flushed_net), seed=seed)
    else:
        dtype, k = ROWS[row]
        found = vanished_gradients(2.**k, dtype, seed=seed)
    return dict(loss=found.loss, learnt=found.loss < 2)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
