"""Which operation makes a sampler in BF16 and a trainer in FP32 disagree? (chapter 38)

SmolLM2-135M, whose weights are numbers of BF16, reads a text of 128 tokens; the outputs of one kind
of module are rounded to BF16, or the whole model computes in half. The
value is the root of the mean square of the change of the tokens' log-probabilities, in nats. A
seed is a text, as in `real_formats`. *Beside*: the difference from a trainer under autocast, instead of
from FP32.
"""
import copy
from contextlib import ExitStack
from functools import cache

import torch
import torch.nn.functional as F

from mpcourse.real import rounded
from real_formats import SEEDS, loaded

KINDS = {
    'norms': '*norm', 'q k v o': 'layers.*.self_attn.*_proj',
    'gate up down': 'layers.*.mlp.*_proj', 'residual stream': [f'layers.{i}{part}' for i in range(30) for part in ('.between', '')],
    'logits': 'lm_head'}
FROM_BELOW = ['logits', 'residual stream', 'norms', 'gate up down', 'q k v o']
CURED = {' and '.join(FROM_BELOW[:n]): FROM_BELOW[n:] for n in range(1, 4)}
SOME = {'all': list(KINDS), 'residual stream, blocks 11 to 27': [],
        **{f'all but {cured}': kinds for cured, kinds in CURED.items()},
        **{f'all but {k}': [o for o in KINDS if o != k] for k in KINDS if k != 'logits'}}
ROWS = [*KINDS, *SOME, 'BF16 model', 'BF16 model, FP32 logits', 'BF16 model, FP32 stream',
        'BF16 model, FP32 stream, FP32 logits', 'FP16 model', 'autocast BF16', 'autocast FP16']
PAIRS = [f'{sampler} beside autocast {dtype}' for dtype, samplers in {
    'BF16': ('BF16 model', 'BF16 model, FP32 stream, FP32 logits', 'FP16 model'), 'FP16': ('FP16 model',)}.items() for sampler in samplers]
ROWS += PAIRS


@cache
def with_bf16_weights():
    "The model in FP32, whose weights are numbers of BF16; and texts"
    model, texts = loaded()
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters(): p.copy_(p.bfloat16())
    return model, texts


def log_probs(logits, ids):
    "Of the tokens that the text has, without the first two"
    return logits[0, 1:-1].double().log_softmax(-1).gather(-1, ids[0, 2:, None])[:, 0]


def whole(row, ids):
    "The logits of a model that is half, or under autocast"
    model, _ = with_bf16_weights()
    if 'autocast' in row:
        with torch.autocast('cpu', torch.bfloat16 if 'BF16' in row else torch.float16): return model(ids)
    low = copy.deepcopy(model).to(torch.float16 if 'FP16 model' in row else torch.bfloat16)
    if 'FP32 stream' in row: widen(low)
    if 'FP32 logits' not in row: return low(ids)
    seen = []
    low.lm_head.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    low(ids)
    return F.linear(seen[0].float(), model.lm_head.weight)


def widen(low):
    "Hooks that keep the residual stream of a model in BF16 in FP32; what the norms return is BF16 again"
    def bf16(module, args): return tuple(a.bfloat16() for a in args)
    low.embed_tokens.register_forward_hook(lambda m, args, out: out.float())
    for name, m in low.named_modules():
        if name.endswith('norm'): m.register_forward_hook(lambda m, args, out: out.bfloat16())
        if name.endswith('self_attn'): m.register_forward_pre_hook(bf16)


def run(row, seed):
    "The difference from FP32"
    model, texts = with_bf16_weights()
    ids = texts[seed:seed + 1]
    with torch.no_grad(), ExitStack() as stack:
        sampler, _, trainer = row.partition(' beside ')
        exact = log_probs(whole(trainer, ids) if trainer else model(ids), ids)
        for kind in SOME.get(row, [row]):
            if kind in KINDS: stack.enter_context(rounded(model, to_bf16, KINDS[kind], outputs=True))
        if 'blocks' in row:
            stack.enter_context(rounded(model, to_bf16, KINDS['residual stream'][22:56], outputs=True))
        logits = whole(sampler, ids) if 'model' in row or 'autocast' in row else model(ids)
        change = log_probs(logits, ids) - exact
    return dict(rms=change.square().mean().sqrt().item(), sum=change.sum().item(), worst=change.abs().max().item())


def to_bf16(t): return t.bfloat16().to(t.dtype)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
