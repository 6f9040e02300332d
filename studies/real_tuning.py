"""What does a real language model keep of its fine-tuning? (chapter 37)

SmolLM2-135M learns Python's help topics: 20 steps of AdamW (no decay), each on another text of 128
tokens. Everything is computed in FP32 unless the row says otherwise. Rounded at the end: what was
trained in FP32 is saved in BF16. All BF16: torch's AdamW on BF16 weights and gradients, which keeps
its moments in BF16. A seed chooses the texts. The
values: mean loss on ten topics that no run has trained on and on ten pieces of code, before and
after; the share of weights that differ from the start; skipped steps.
"""

import torch
from torch import nn

from mpcourse.fp8 import CastConfig, fp32_scale
from mpcourse.real import load_smollm2, read_texts, text_loss
from mpcourse.rounding import quantize
from mpcourse.scaler import StaticScaler
from mpcourse.dynamic import DynamicScaler
from mpcourse.step import MixedStep

STEPS = 20
RATES = (1e-6, 1e-5, 1e-4)
STORED = {'FP32': None, 'BF16': 'nearest', 'BF16 stochastic': 'stochastic'}
ROWS = [*(f'{name}, {rate:g}' for name in STORED for rate in RATES),
        'masters, 1e-05', 'LoRA on BF16, 0.0001', 'LoRA on E4M3, 0.0001',
        'autocast BF16, 1e-05', 'FP16 measured, 1e-05', 'FP16 scale 1, 1e-05',
        'FP16 2^16 constant, 1e-05', 'FP16 2^16, 1e-05', 'FP16 2^32, 1e-05',
        'FP32, 2e-05', 'FP32, 5e-05', 'FP32 rounded at the end, 1e-05', 'FP32 rounded at the end, 0.0001',
        'LoRA on FP32, 0.0001', *(f'LoRA on BF16, {rate:g}' for rate in (2e-4, 5e-4, 1e-3)),
        'all BF16, 1e-05', 'all BF16, 0.0001']
SEEDS = range(5)
BASES = {'FP32': torch.clone, 'BF16': torch.Tensor.bfloat16, 'E4M3': CastConfig('e4m3', (1, None), fp32_scale)}


class LoRA(nn.Module):
    "A frozen layer plus a product of rank 8, which starts at zero"
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features)/base.in_features**.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x): return self.base(x) + 2*(x @ self.down.T) @ self.up.T


def adapted(model, cast):
    "Round the frozen weights of the linear layers, and add trainable products to them"
    model.requires_grad_(False)
    for name, layer in [*model.named_modules()]:
        if not name.endswith('_proj'): continue
        layer.weight.copy_(cast(layer.weight))
        owner, _, last = name.rpartition('.')
        setattr(model.get_submodule(owner), last, LoRA(layer))


def losses(model, texts):
    "The mean loss over texts"
    with torch.no_grad(): return sum(text_loss(model(t[None]), t[None]).item() for t in texts)/len(texts)


def texts(seed):
    "Texts to train on, held-out topics, and code"
    _, tokenizer = load_smollm2()
    topics, code = read_texts(tokenizer), read_texts(tokenizer, 'code')
    first = len(topics)*4//5
    g = torch.Generator().manual_seed(seed)
    train = topics[torch.randperm(first, generator=g)[:STEPS]]
    held = topics[first:][::(len(topics) - first)//10][:10]
    return train, held, code[::len(code)//10][:10]


def scaler(kind, model, first):
    "The row's scaler for FP16"
    if kind == 'measured': return StaticScaler.measured(model, (first, first), text_loss)
    if kind == 'scale 1': return StaticScaler(1.)
    if 'constant' in kind: return StaticScaler(2.**16)
    return DynamicScaler(2.**int(kind.removeprefix('2^')))


def mixed(row, model, opt, train):
    "Train by MixedStep; the skipped steps"
    kind = row.split(',')[0]
    dtype = 'bf16' if 'BF16' in row else 'fp16'
    one = train[:1]
    step = MixedStep(None, dtype=dtype) if dtype == 'bf16' else MixedStep(scaler(kind.removeprefix('FP16 '), model, one))
    skipped = 0
    for t in train:
        step(model, t[None], t[None], opt, text_loss)
        skipped += not step.outcome.stepped
    return skipped


def plain(row, model, opt, train, start):
    "Train in FP32, and store the weights as the row says"
    kind = row.split(',')[0]
    exact = [p.clone() for p in start] if kind == 'masters' else None
    params = [*model.parameters()]
    for t in train:
        if exact:
            for p, w in zip(params, exact): p.data.copy_(w.bfloat16())
        opt.zero_grad()
        text_loss(model(t[None]), t[None]).backward()
        if exact:
            for p, w in zip(params, exact): p.data.copy_(w)
        opt.step()
        if exact: exact = [p.detach().clone() for p in params]
        if rounding := STORED.get(kind):
            for p in params: p.data.copy_(quantize(p.data, 'bf16', rounding))
    return 0


def in_bf16(model, rate, train):
    "Train with torch's AdamW on BF16 copies of the weights and gradients"
    params = [*model.parameters()]
    stored = [p.detach().bfloat16() for p in params]
    opt = torch.optim.AdamW(stored, lr=rate, weight_decay=0)
    for t in train:
        model.zero_grad()
        text_loss(model(t[None]), t[None]).backward()
        for p, w in zip(params, stored): w.grad = p.grad.bfloat16()
        opt.step()
        for p, w in zip(params, stored): p.data.copy_(w)
    return 0


def run(row, seed):
    "What 20 steps have taught"
    torch.manual_seed(seed)
    model, _ = load_smollm2()
    train, held, code = texts(seed)
    rate = float(row.rpartition(', ')[2])
    with torch.no_grad():
        if 'BF16' in row and 'autocast' not in row and 'LoRA' not in row:
            for p in model.parameters(): p.copy_(p.bfloat16())
        if 'LoRA' in row: adapted(model, BASES[row.split(',')[0].removeprefix('LoRA on ')])
    start = [p.detach().clone() for p in model.parameters()]
    before = losses(model, held), losses(model, code)
    learn = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(learn, lr=rate, weight_decay=0)
    if row.startswith('all'): skipped = in_bf16(model, rate, train)
    elif 'FP16' in row or 'autocast' in row: skipped = mixed(row, model, opt, train)
    else: skipped = plain(row, model, opt, train, start)
    if 'rounded at the end' in row:
        for p in model.parameters(): p.data.copy_(p.bfloat16())
    moved = sum((p != s).sum().item() for p, s in zip(model.parameters(), start))
    return dict(before=before[0], after=losses(model, held), code_before=before[1],
                code_after=losses(model, code), skipped=skipped,
                moved=moved/sum(p.numel() for p in start))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
