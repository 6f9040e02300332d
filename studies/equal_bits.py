"""When must two computations agree in every bit? (chapter 32)

`split`: the course's GPT, trained in FP32, writes 60 characters after each of 48 beginnings,
always the most probable one; each product is one sum, or four sums that are added up. Such a split
depends on the size of the batch. `sampler`: the GPT draws 64 answers of 64 characters in a format,
and an FP32 copy of it is the trainer: how far apart are their probabilities? `silent`: a term with
the root of zero in the loss, and a check that skips every step whose gradients are not finite.
"""
import copy
import math
from functools import lru_cache

import torch
from torch import nn

from mpcourse.rounding import quantize
from mpcourse.toys import batches, char_text, char_transformer, cross_entropy, fit, plain_step, seed

def exact(x): return x
def bf16(x): return x.bfloat16().float()
def fp16(x): return x.half().float()
def e4m3(w):
    "One scale for the tensor"
    scale = w.abs().max()/448
    return quantize(w/scale, 'e4m3')*scale

def e4m3_rows(w):
    "One scale for each row"
    scale = w.abs().amax(1, keepdim=True)/448
    return quantize(w/scale, 'e4m3')*scale

SPLIT = {'BF16': dict(store=bf16, part=bf16), 'FP16': dict(store=fp16, part=fp16), 'FP32': {},
         'BF16, sums kept in FP32': dict(store=bf16),
         'BF16, the same split': dict(store=bf16, part=bf16, first=4)}
SAMPLER = {'BF16': dict(weights=bf16, acts=bf16), 'FP16': dict(weights=fp16, acts=fp16),
           'E4M3 weights': dict(weights=e4m3, acts=bf16),
           'E4M3 matrices': dict(weights=lambda w: e4m3(w) if w.ndim > 1 else bf16(w), acts=bf16),
           'E4M3 matrices, a scale for each row': dict(weights=lambda w: e4m3_rows(w) if w.ndim > 1 else bf16(w), acts=bf16),
           'only the logits BF16': dict(logits=bf16)}
SILENT = {'healthy': dict(term=None), 'the root of zero': {},
          'the root of zero, no check': dict(check=False), 'the root of q + 1e-8': dict(term='epsilon')}
KINDS = dict(split=SPLIT, sampler=SAMPLER, silent=SILENT)
ROWS = {f'{kind}: {name}': (kind, kw) for kind, rows in KINDS.items() for name, kw in rows.items()}
SEEDS = range(10)


@lru_cache(maxsize=10)
@torch.enable_grad()
def trained(number):
    "The GPT after 300 steps in FP32"
    net = char_transformer(seed=number)
    fit(net, batches(char_text(), 32, 300, number), torch.optim.AdamW(net.parameters(), 3e-3),
        cross_entropy, plain_step)
    return net.eval()


class Split(nn.Module):
    "A linear layer whose products are added up in n parts"
    def __init__(self, old, n, store, part):
        super().__init__()
        self.weight, self.bias, self.n, self.store, self.part = old.weight, old.bias, n, store, part

    def forward(self, x):
        xs, ws = self.store(x).chunk(self.n, -1), self.store(self.weight).chunk(self.n, -1)
        total = self.part(xs[0] @ ws[0].T)
        for a, w in zip(xs[1:], ws[1:]): total = total + self.part(a @ w.T)
        return self.store(total + self.store(self.bias))


def split_net(net, n, store, part):
    "A copy of the net with such layers"
    net = copy.deepcopy(net)
    for name, m in list(net.named_modules()):
        if isinstance(m, nn.Linear):
            parent = net.get_submodule(name.rpartition('.')[0])
            parent.add_module(name.rpartition('.')[2], Split(m, n, store, part))
    return net


def written(net, x, n=60):
    "The most probable characters, one after the other"
    for _ in range(n): x = torch.cat([x, net(x[:, -64:])[:, -1].argmax(-1, keepdim=True)], 1)
    return x[:, 64:]


@torch.no_grad()
def split(number, store=exact, part=exact, first=1, prompts=48):
    "How many texts part, and the share of log-probabilities that are equal in every bit"
    one, four = [split_net(trained(number), n, store, part) for n in (first, 4)]
    x, y = char_text().valid
    x = x[::len(x)//prompts][:prompts]
    parted = (written(one, x) != written(four, x)).any(1)
    a, b = one(x).log_softmax(-1), four(x).log_softmax(-1)
    return dict(parted=parted.sum().item(), equal=(a == b).float().mean().item(),
                apart=(a - b).std().item())


@torch.no_grad()
def sampler(number, weights=exact, acts=exact, logits=exact, answers=64, length=64):
    "Spread of the log ratio of a character and of an answer, effective share of the answers, and the share that a limit of 2 cuts"
    g = torch.Generator().manual_seed(seed(number))
    trainer = trained(number)
    draws = copy.deepcopy(trainer)
    for p in draws.parameters(): p.copy_(weights(p))
    for m in draws.modules():
        if isinstance(m, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            m.register_forward_hook(lambda m, args, out: acts(out))
    x = char_text().valid[0][:answers]
    drawn = []
    for _ in range(length):
        log_p = logits(draws(x[:, -64:])[:, -1]).log_softmax(-1)
        new = torch.multinomial(log_p.exp(), 1, generator=g)
        drawn.append(log_p.gather(1, new))
        x = torch.cat([x, new], 1)
    true = [trainer(x[:, t:t + 64])[:, -1].log_softmax(-1).gather(1, x[:, t + 64:t + 65])
            for t in range(length)]
    log_ratio = torch.cat(true, 1) - torch.cat(drawn, 1)
    answer = log_ratio.sum(1)
    ratio = answer.exp()
    share = ratio.sum()**2/(answers*ratio.square().sum())
    return dict(token=log_ratio.std().item(), answer=answer.std().item(), effective=share.item(),
                cut=(ratio > 2).float().mean().item())


def silent(number, term='root', check=True, steps=60):
    "Steps skipped, and the logged loss at both ends (infinite: not finite)"
    net, losses, skipped = char_transformer(seed=number), [], 0
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    for x, y in batches(char_text(), 16, steps, number):
        out = net(x)
        loss = cross_entropy(out, y)
        used = torch.ones(x.shape)
        used[:, 60:] = 0.                                              # padded places
        q = out.square().mean(-1)*used
        if term == 'root': loss = loss + 1e-3*q.sqrt().mean()
        if term == 'epsilon': loss = loss + 1e-3*(q + 1e-8).sqrt().mean()
        losses.append(loss.item() if loss.isfinite() else math.inf)
        opt.zero_grad()
        loss.backward()
        finite = all(p.grad.isfinite().all() for p in net.parameters())
        if check and not finite: skipped += 1
        else: opt.step()
    return dict(skipped=skipped, first=sum(losses[:10])/10, last=sum(losses[-10:])/10)


def run(row, seed):
    "The numbers of its kind"
    kind, kw = ROWS[row]
    return dict(split=split, sampler=sampler, silent=silent)[kind](seed, **kw)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
