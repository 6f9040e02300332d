"""Does fine-tuning in few bits keep what FP32 learns, or are its steps rounded away? (chapters 07
and 21)

A small GPT learns to predict the help texts of Python, then for 200 steps the source code of
Python's library, with Adam and a small learning rate (or for fewer steps, where a row says so).
Both passes are in FP32 (with masters, on weights rounded to BF16); a row says in which format the
weights are kept between the steps, and at which rate.
"""
import inspect
from functools import cache

import torch
from torch.func import functional_call

from mpcourse.rounding import quantize
from mpcourse.toys import ALPHABET, Data, batches, encode_text, evaluate, fit, get_toy, train_toy, windows

KINDS = ['FP32', 'BF16', 'FP16', 'BF16 beside FP32 masters', 'BF16, rounded stochastically']
RATES = {'1e-5': 1e-5, '1e-4': 1e-4, '1e-3': 1e-3, '3e-3': 3e-3}
COSINE = '3e-3, by a cosine to 0'
SHORT = ['1e-4, 15 steps', '1e-4, 40 steps', '1e-3, 2 steps', '1e-3, 4 steps', '3e-3, 2 steps']
ROWS = [f'{kind}, lr {lr}' for lr in RATES for kind in KINDS]
ROWS += [f'{kind}, lr {lr}' for lr in (COSINE, *SHORT) for kind in ('FP32', 'BF16')]
SEEDS = range(10)


@cache
def source_code():
    "The source of five modules of Python's library as windows of 64 symbols, a tenth of it to judge"
    import argparse, ast, subprocess, typing
    text = ''.join(inspect.getsource(m) for m in (argparse, typing, ast, inspect, subprocess))
    ids = encode_text(''.join(c for c in text if c in ALPHABET))
    cut = len(ids)*9//10
    return Data('source_code', windows(ids[:cut], 64, 1), windows(ids[cut:], 64, 64), len(ALPHABET))


@cache
def pretrained(seed):
    "The state of a net that has read help texts for 200 steps"
    return train_toy('char_lm', seed=seed, steps=200).model.state_dict()


def store(kind, w, generator):
    "A weight as it is kept between two steps"
    if kind in ('BF16', 'FP16'): return quantize(w, kind.lower())
    return quantize(w, 'bf16', 'stochastic', generator=generator) if 'stochastically' in kind else w


def run(row, seed):
    "Losses on new source code and on the old help texts, before and after, and the share of weights that moved"
    kind, lr = row.split(', lr ')
    model, data, gen = get_toy('char_lm').model(seed=seed, device='cpu'), source_code(), torch.Generator().manual_seed(seed)
    model.load_state_dict(pretrained(seed))
    old_text = get_toy('char_lm').data()
    before, old_before = evaluate(model, data)['loss'], evaluate(model, old_text)['loss']

    def seen():
        return {n: quantize(p, 'bf16') if 'masters' in kind else p
                for n, p in model.named_parameters()}

    def step(model, xb, yb, opt, loss_func):
        low = {n: p + (q - p).detach()
               for (n, p), q in zip(model.named_parameters(), seen().values())}
        loss = loss_func(functional_call(model, low, (xb,)), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if lr == COSINE: schedule.step()
        with torch.no_grad():
            for p in model.parameters(): p.copy_(store(kind, p, gen))
        return loss.detach()

    with torch.no_grad():
        for p in model.parameters(): p.copy_(store(kind, p, gen))
        start = {n: p.clone() for n, p in seen().items()}
    opt = torch.optim.Adam(model.parameters(), lr=RATES[lr.split(',')[0]], betas=(.9, .99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)
    steps = int(lr.split()[1]) if lr in SHORT else 200
    fit(model, batches(data, 16, steps, seed), opt, step=step)
    with torch.no_grad():
        moved = torch.cat([(p != start[n]).flatten()
                           for n, p in seen().items()]).float().mean().item()
        for p, q in zip(model.parameters(), list(seen().values())): p.copy_(q)
    after, old_after = evaluate(model, data)['loss'], evaluate(model, old_text)['loss']
    return dict(before=before, after=after, moved=moved, old_before=old_before, old_after=old_after)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
