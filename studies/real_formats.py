"""What does each format cost a real language model, and who cures it? (chapter 36)

SmolLM2-135M; only the inputs of its 210 linear layers are rounded, or, in the rows `W8A8`, their
weights too. A seed is a text of 128 tokens: eight of Python's help topics, two of its library.
The value is the mean loss of the tokens in nats, without the first two. The row `sizes` has the
largest magnitudes of the residual stream behind each block, and of what its `down_proj` is given,
at the first token and at the others; `errors of …` the mean relative error of these inputs.
"""
from contextlib import ExitStack
from functools import cache, partial

import torch
import torch.nn.functional as F

from mpcourse.fourbits import hadamard, nvfp4_scale
from mpcourse.fp8 import INT4, INT8, CastConfig, e8m0_ceil, e8m0_floor, fp32_scale
from mpcourse.real import load_smollm2, read_texts, rounded

SEEDS = range(10)
LINEAR = 'layers.*_proj'
FOUR = [f'layers.{i}.mlp.down_proj' for i in (2, 11, 28, 29)]     # the four whose own cost is the largest
TENSOR, TOKEN = None, (1, None)
INT8_TENSOR = CastConfig(INT8, TENSOR, fp32_scale)
INT8_TOKEN = CastConfig(INT8, TOKEN, fp32_scale)
CASTS = {
    'FP16': torch.Tensor.half, 'BF16': torch.Tensor.bfloat16,
    'INT8 tensor': INT8_TENSOR, 'INT8 token': INT8_TOKEN,
    'E4M3 unscaled': CastConfig('e4m3'), 'E4M3 tensor': CastConfig('e4m3', TENSOR, fp32_scale),
    'E4M3 token': CastConfig('e4m3', TOKEN, fp32_scale),
    'E5M2 tensor': CastConfig('e5m2', TENSOR, fp32_scale),
    'MXFP8': CastConfig('e4m3', (1, 32), e8m0_ceil), 'NVFP4': CastConfig('e2m1', (1, 16), nvfp4_scale),
    'MXFP4': CastConfig('e2m1', (1, 32), e8m0_ceil), 'MXFP4 floor': CastConfig('e2m1', (1, 32), e8m0_floor),
    'INT4 token': CastConfig(INT4, TOKEN, fp32_scale), 'INT4 of 16': CastConfig(INT4, (1, 16), fp32_scale),
    'E2M1 token': CastConfig('e2m1', TOKEN, fp32_scale), 'E2M1 of 16': CastConfig('e2m1', (1, 16), fp32_scale)}
CURES = ['W8A8 tensor', 'W8A8 token', 'W8A8 tensor, four layers unrounded', 'W8A8 tensor, rotated',
         'W8A8 tensor, smoothed', 'W8A8 tensor, first token unrounded', 'E4M3 W8A8 tensor']
TURNED = {f'{name}, rotated {n}': (name, n)
          for name in ('INT4 token', 'INT4 of 16', 'E2M1 token', 'E2M1 of 16', 'MXFP4', 'NVFP4') for n in (16, 64)}
KEPT = {'INT8': INT8, 'E4M3': 'e4m3', 'INT4': INT4}
WAYS = {'token': TOKEN, 'channel': (128, 1), 'channel of 32': (32, 1)}
CACHE = ['cache E4M3 unscaled', *(f'cache {fmt}, {way}' for fmt in KEPT for way in WAYS), 'cache INT4, mixed']
ONLY = {f'block {b}': [f'layers.{b}.mlp.down_proj'] for b in range(30)} | {
    'the four': FOUR, 'all down_proj': 'layers.*.down_proj'}
WRONG = [f'errors of {name}' for name in ('INT8 tensor', 'INT8 token', 'E4M3 tensor', 'NVFP4', 'MXFP4')]
ROWS = ['sizes', *WRONG, 'FP32', *CASTS, *(f'INT8 tensor, only {some}' for some in ONLY),
        'INT8 tensor, not the four', *CURES, *TURNED, *CACHE]


@cache
def loaded():
    "The model, and ten texts"
    model, tokenizer = load_smollm2()
    help_texts, code = (read_texts(tokenizer, kind) for kind in ('help', 'code'))
    texts = torch.cat([help_texts[::len(help_texts)//8][:8], code[::len(code)//2][:2]])
    return model, texts


def layers(model):
    "The linear layers with their names"
    return {n: m for n, m in model.named_modules() if n.endswith('_proj')}


def keep_first(cast, x):
    "A cast of all tokens but the first, whose part is computed once and kept"
    return torch.cat([x[:, :1], cast(x[:, 1:])], 1)


def turned(x, n=64):
    "Blocks of n numbers, spread by a Hadamard matrix; where n is 64 of 512 if they fit"
    if n == 64 and x.shape[-1] % 512 == 0: n = 512
    return (x.unflatten(-1, (-1, n)) @ hadamard(n)).flatten(-2)


def largest(model, texts):
    "The largest magnitude of each input channel of each layer, over some texts"
    seen = {}
    def look(name, module, args):
        most = args[0].abs().flatten(0, -2).amax(0)
        seen[name] = torch.maximum(seen.get(name, most), most)
    hooks = [m.register_forward_pre_hook(partial(look, n)) for n, m in layers(model).items()]
    with torch.no_grad(): model(texts)
    for h in hooks: h.remove()
    return seen


@cache
def smoothing():
    "SmoothQuant's factors: the root of largest input over largest weight, from two other texts"
    model, _ = loaded()
    _, tokenizer = load_smollm2()
    seen = largest(model, read_texts(tokenizer)[5:7])
    def factor(name, m): return (seen[name]/m.weight.abs().amax(0)).sqrt().clamp(min=1e-3)
    return {n: factor(n, m) for n, m in layers(model).items()}


def whole(row, name, module, args, out):
    "A layer with weights and inputs of eight bits"
    x, w = args[0], module.weight
    if 'four' in row and name in FOUR: return None
    by_row, cast = INT8_TOKEN, INT8_TENSOR
    if 'token' in row.split(',')[0]: cast = INT8_TOKEN
    if 'E4M3' in row: by_row, cast = CASTS['E4M3 token'], CASTS['E4M3 tensor']
    if 'smoothed' in row:
        s = smoothing()[name]
        x, w = x/s, w*s
    if 'rotated' in row: x, w = turned(x), turned(w)
    if 'first' in row: cast = partial(keep_first, cast)
    return F.linear(cast(x), by_row(w))


def turned_inputs(row, module, args, out):
    "A layer whose inputs are rotated, rounded, and multiplied by rotated weights"
    name, n = TURNED[row]
    return F.linear(CASTS[name](turned(args[0], n)), turned(module.weight, n))


def switched(row, model):
    "A context in which the row's rounding happens"
    stack = ExitStack()
    def one(cast, names, outputs=False): stack.enter_context(rounded(model, cast, names, outputs))
    def widened(x, cast): return cast(x).float()
    if row in CASTS: one(partial(widened, cast=CASTS[row]), LINEAR)
    if 'only' in row: one(INT8_TENSOR, ONLY[row.partition('only ')[2]])
    if row == 'INT8 tensor, not the four': one(INT8_TENSOR, [n for n in layers(model) if n not in FOUR])
    if row == 'cache INT4, mixed':
        one(CastConfig(INT4, WAYS['channel of 32'], fp32_scale), '*k_cache')
        one(CastConfig(INT4, WAYS['token'], fp32_scale), '*v_cache')
    elif row == 'cache E4M3 unscaled': one(CASTS['E4M3 unscaled'], '*_cache')
    elif row in CACHE:
        fmt, way = row.removeprefix('cache ').split(', ')
        one(CastConfig(KEPT[fmt], WAYS[way], fp32_scale), '*_cache')
    if row in CURES:
        for n, m in layers(model).items():
            stack.callback(m.register_forward_hook(partial(whole, row, n)).remove)
    if row in TURNED:
        for m in layers(model).values():
            stack.callback(m.register_forward_hook(partial(turned_inputs, row)).remove)
    return stack


def watched(model, ids, look):
    "What `look` makes of each block's output and of the input of its down_proj, by name"
    found = {}
    def behind(b, module, args, out): found.update(look(b, out[0], None))
    def before(b, module, args): found.update(look(b, None, args[0][0]))
    hooks = []
    for b, block in enumerate(model.layers):
        hooks.append(block.register_forward_hook(partial(behind, b)))
        hooks.append(block.mlp.down_proj.register_forward_pre_hook(partial(before, b)))
    with torch.no_grad(): model(ids)
    for h in hooks: h.remove()
    return found


def sizes(b, stream, given):
    "Largest magnitudes at the first token and at the others, and the median"
    name, x = ('stream', stream) if given is None else ('given', given)
    x = x.abs()
    return {f'{name} {b} first': x[0].max().item(), f'{name} {b} others': x[1:].max().item(),
            f'{name} {b} median': x.median().item()}


def errors(cast, b, stream, given):
    "The mean over tokens of the error's norm over the input's"
    if given is None: return {}
    wrong = (cast(given[None])[0] - given).norm(dim=1)/given.norm(dim=1)
    return {f'error {b}': wrong.mean().item()}


def run(row, seed):
    "The loss of one text, or what the row says"
    model, texts = loaded()
    ids = texts[seed:seed + 1]
    if row == 'sizes': return watched(model, ids, sizes)
    if row in WRONG: return watched(model, ids, partial(errors, CASTS[row.removeprefix('errors of ')]))
    if 'smoothed' in row: smoothing()
    with torch.no_grad(), switched(row, model): logits = model(ids)
    return dict(loss=F.cross_entropy(logits[0, 1:-1], ids[0, 2:]).item())


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
