"The sums of tensor cores: outputs of real GPUs, a simulator's, and the rule as a plain loop"
import base64, gzip, json, math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from conftest import ROOT, each
from mpcourse.formats import get_format, same_bits
from mpcourse.rounding import quantize
from mpcourse.tensorcore import CORES, Core, as_gpu, gpu_matmul

pytestmark = pytest.mark.library
GOLDEN = json.loads(gzip.decompress((Path(__file__).parent/'golden/tensorcores.json.gz').read_bytes()))
DTYPES = dict(fp16=torch.float16, bf16=torch.bfloat16, tf32=torch.float32, fp32=torch.float32, e4m3=torch.float8_e4m3fn, e5m2=torch.float8_e5m2)
NAMES = dict(float16='fp16', bfloat16='bf16', float32='tf32', float8_e4m3fn='e4m3', float8_e5m2='e5m2')
ROW_OF = dict(A2='A100', Ada='RTX 4090', L40S='RTX 4090', H200='H100')     # the same arithmetic
AMD = {row for row, core in CORES.items() if core.rule != 'cut'}
KINDS = [(gpu, fmt) for gpu, fmt, acc in CORES if acc == 'fp32' and fmt not in ('mxfp8', 'nvfp4') and (gpu, fmt, acc) not in AMD]


@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def read(text, dtype, *shape):
    "A stored array"
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).view(*shape)


def cut_tf32(x): return (x.view(torch.int32) >> 13 << 13).view(torch.float32)


def on_gpu(f, a, b, c):
    "Dot products as a row computes them; the files of Hopper's and Blackwell's FP8 add c afterwards, or have none"
    gpu, fmt = ROW_OF.get(f['gpu'], f['gpu']), f['fmt']
    late = fmt in ('e4m3', 'e5m2') and gpu in ('H100', 'B200')
    start = torch.zeros_like(c) if late else c
    got = gpu_matmul(a[:, None], b[:, :, None], gpu, fmt, c=start[:, None, None], acc=f['out'])[:, 0, 0]
    return got + c if late and gpu == 'B200' else got


# --- outputs of real GPUs, and the simulator's ---

def gpu_files(): return [f for f in GOLDEN['gpus'] if (ROW_OF.get(f['gpu'], f['gpu']), f['fmt'], f['out']) in CORES]


@each('f', gpu_files())
def test_equal_to_real_gpus(f):
    a, b = (read(f[k], DTYPES[f['fmt']], f['n'], f['k']).float() for k in 'ab')
    c, want = (read(f[k], DTYPES[f['out']], f['n']) for k in 'cd')
    assert same_bits(on_gpu(f, a, b, c.float()).to(want.dtype), want)


def test_the_files_cover_all_rows():
    seen = {(ROW_OF.get(f['gpu'], f['gpu']), f['fmt'], f['out']) for f in gpu_files()}
    assert set(CORES) - seen - AMD == {('B200', 'mxfp8', 'fp32'), ('B200', 'nvfp4', 'fp32')}
    assert len(gpu_files()) == 42 and len(GOLDEN['gpus']) == 48     # FP8 with FP16 sums on H100, H200, B200: no row


def simulated(row):
    "The operands of a simulated instruction, and gpu_matmul's result"
    kinds, m, n, k = row['dtypes'], row['m'], row['n'], row['k']
    d = {name: getattr(torch, kinds[name]) for name in kinds}
    packed = 2 if 'e2m1' in row['instruction'] else 1
    a, b = read(row['a'], d['a'], m, k//packed), read(row['b'], d['b'], k//packed, n)
    c = read(row['c'], d['c'], m, n).float()
    if 'block' not in row['instruction']:
        a, b = a.float(), b.float()
        if 'tf32' in row['instruction']: a, b = cut_tf32(a), cut_tf32(b)
        fmts = NAMES[kinds['a']], NAMES[kinds['b']]
        return gpu_matmul(a, b, row['gpu'], fmts, c=c, acc='fp16' if kinds['d'] == 'float16' else 'fp32')
    per = 16 if packed == 2 else 32
    scales = tuple(read(row[f'scale_{x}'], d[f'scale_{x}'], *shape).float() for x, shape in (('a', (m, k//per)), ('b', (k//per, n))))
    if packed == 1: return gpu_matmul(a.float(), b.float(), 'B200', 'mxfp8', c=c, scales=scales)
    four = get_format('e2m1').decode
    a = torch.stack([a & 15, a >> 4], -1).flatten(1)
    b = torch.stack([b & 15, b >> 4], 1).flatten(0, 1)
    a, b = (four(x.long()).float() for x in (a, b))
    return gpu_matmul(a, b, 'B200', 'nvfp4', c=c, scales=scales)


@each('row', GOLDEN['simulator'])
def test_equal_to_the_simulator(row):
    want = read(row['d'], getattr(torch, row['dtypes']['d']), row['m'], row['n'])
    assert same_bits(simulated(row).to(want.dtype), want)


def test_all_stored_outputs_of_the_full_files():
    "125 of each file, where the data is at hand"
    path = ROOT.parent/'shared/data/gpu_outputs.json.gz'
    if not path.exists(): pytest.skip('the full files are not beside the clone')
    equal = Counter()
    for f in json.loads(gzip.decompress(path.read_bytes()))['files']:
        f['fmt'] = f['format']
        if (ROW_OF.get(f['gpu'], f['gpu']), f['fmt'], f['out']) not in CORES: continue
        a, b, c, want = (torch.tensor(f[k], dtype=torch.int64).to(torch.uint32).view(torch.float32) for k in 'abcd')
        if f['out'] == 'fp16': c = c.half().float()
        equal[f['gpu']] += int((on_gpu(f, a, b, c).view(torch.int32) == want.view(torch.int32)).sum())
    assert equal == dict(V100=250, A100=500, A2=500, Ada=1000, L40S=750, H100=750, H200=750, B200=750)


# --- the rule, once more, as a loop over exact fractions ---

def exponent(x, emin):
    "⌊log2|x|⌋, at least emin, which zero has"
    if not x: return emin
    top, low = abs(x).as_integer_ratio()
    e = top.bit_length() - low.bit_length()
    if Fraction(2)**e > abs(x): e -= 1
    return max(e, emin)


def kept(total, core):
    "A sum as the core hands it on"
    emin, keep = (-14, 10) if core.keep is None else (-126, core.keep)
    grid = Fraction(2)**(exponent(total, emin) - keep)
    s = (round if core.keep is None else math.trunc)(total/grid)*grid
    if abs(s) >= (65520 if core.keep is None else 2**128): return math.copysign(math.inf, s)
    return s


def rule(a, b, c, emins, core):
    "c + the sum of a[i]*b[i]"
    s = Fraction(c)
    for i in range(0, len(a), core.group):
        if math.isinf(s): return s
        pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a[i:i+core.group], b[i:i+core.group]) if x and y]
        tops = [exponent(x, emins[0]) + exponent(y, emins[1]) for x, y in pairs]
        unit = Fraction(2)**(max([*tops, exponent(s, -126)]) - core.bits)
        s = kept((sum(math.trunc(x*y/unit) for x, y in pairs) + math.trunc(s/unit))*unit, core)
    return float(s)


def drawn(fmt, shape, spread, gen):
    "Numbers of a format: any codes, or normal ones over some octaves; some zeros"
    if spread is None:
        codes = torch.randint(2**8, (*shape, DTYPES[fmt].itemsize), generator=gen).to(torch.uint8)
        x = codes.view(DTYPES[fmt])[..., 0].float().nan_to_num(0., 0., 0.)
        return cut_tf32(x) if fmt == 'tf32' else x
    x = torch.randn(shape, generator=gen)*2.**torch.randint(-spread, spread + 1, shape, generator=gen)
    x = torch.where(torch.rand(shape, generator=gen) < .1, 0., x)
    return quantize(x, fmt, 'toward_zero')


@given(st.sampled_from(sorted(set(CORES) - AMD - {('B200', 'mxfp8', 'fp32'), ('B200', 'nvfp4', 'fp32')})), st.integers(1, 80),
       st.sampled_from([None, 0, 3, 9]), st.sampled_from(['none', 'small', 'any']), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_equal_to_the_loop(row, k, spread, start, seed):
    gpu, fmt, acc = row
    gen = torch.Generator().manual_seed(seed)
    a, b = drawn(fmt, (3, k), spread, gen), drawn(fmt, (k, 2), spread, gen)
    c = {'none': torch.zeros(3, 2), 'small': torch.randn(3, 2, generator=gen), 'any': drawn('fp32' if acc == 'fp32' else 'fp16', (3, 2), None, gen)}[start]
    if acc == 'fp16': c = c.half().float()
    got, emin = gpu_matmul(a, b, gpu, fmt, c=c, acc=acc), get_format(fmt).emin
    want = [[rule(x.tolist(), y.tolist(), c[i, j].item(), (emin, emin), CORES[row]) for j, y in enumerate(b.T)] for i, x in enumerate(a)]
    assert same_bits(got, torch.tensor(want, dtype=torch.float64).float())


@given(st.sampled_from([('e4m3', 'e5m2'), ('e5m2', 'e4m3')]), st.integers(1, 80), st.sampled_from([None, 0, 9]), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_mixed_formats_equal_the_loop(fmts, k, spread, seed):
    gen = torch.Generator().manual_seed(seed)
    a, b = drawn(fmts[0], (3, k), spread, gen), drawn(fmts[1], (k, 2), spread, gen)
    emins = tuple(get_format(f).emin for f in fmts)
    want = [[rule(x.tolist(), y.tolist(), 0., emins, CORES['H100', 'e4m3', 'fp32']) for y in b.T] for x in a]
    assert same_bits(gpu_matmul(a, b, 'H100', fmts), torch.tensor(want))


# --- what is special ---

@each('gpu, fmt', KINDS)
def test_infinities_and_nan(gpu, fmt):
    inf, nan = torch.inf, torch.nan
    if fmt == 'e4m3': inf = nan     # it has no infinity
    a = torch.tensor([[inf, 1.], [inf, 0.], [nan, 1.], [2., 3.], [inf, inf]])
    b = torch.tensor([[1., 0., 1.], [1., 1., -1.]])
    assert same_bits(gpu_matmul(a, b, gpu, fmt), a @ b + 0.)
    c = torch.tensor([torch.inf, -torch.inf, torch.nan]).expand(5, 3)
    assert same_bits(gpu_matmul(a, b, gpu, fmt, c=c), a @ b + c)


@each('gpu, fmt', KINDS)
def test_zeros_and_empty_sums(gpu, fmt):
    a, b = -torch.zeros(2, 40), torch.ones(40, 3)
    assert same_bits(gpu_matmul(a, b, gpu, fmt), torch.zeros(2, 3))         # +0
    tiny = torch.full((2, 3), 2.**-149)
    small = CORES[gpu, fmt, 'fp32'].keep < 23
    assert same_bits(gpu_matmul(a, b, gpu, fmt, c=tiny), torch.zeros(2, 3) if small else tiny)
    assert same_bits(gpu_matmul(a[:, :0], b[:0], gpu, fmt), torch.zeros(2, 3))


def test_products_far_below_fp32_are_cut_one_by_one():
    "The unit is never below 2^(-126 - F), so eight products of 2^-152 are nothing, though their sum is an FP32 number"
    a, b = torch.full((1, 8), 2.**-76), torch.full((8, 1), 2.**-76)
    assert gpu_matmul(a, b, 'A100', 'bf16').item() == 0 and gpu_matmul(a, 4*b, 'A100', 'bf16').item() == 2.**-147


def test_a_sum_that_left_fp32_stays_infinite():
    a = torch.tensor([[2.**100]*8 + [-2.**100]*8])
    assert gpu_matmul(a, torch.full((16, 1), 2.**100), 'A100', 'bf16').item() == torch.inf
    assert gpu_matmul(-a, torch.full((16, 1), 2.**100), 'A100', 'bf16').item() == -torch.inf


def test_a_group_of_zeros_keeps_every_bit_of_the_sum():
    c = torch.full((2, 1), 2.**-60*(1 + 2.**-23))
    out = gpu_matmul(torch.tensor([[0.]*8, [1.]*8]), torch.ones(8, 1), 'A100', 'fp16', c=c)
    assert out[0] == c[0] and out[1] == 8


def test_order_matters_between_groups_alone():
    gen = torch.Generator().manual_seed(0)
    a, b = drawn('e4m3', (4, 256), 3, gen), drawn('e4m3', (256, 4), 3, gen)
    inside = torch.cat([torch.randperm(32, generator=gen) + 32*i for i in range(8)])
    across = torch.randperm(256, generator=gen)
    assert same_bits(gpu_matmul(a[:, inside], b[inside]), gpu_matmul(a, b))
    assert not same_bits(gpu_matmul(a[:, across], b[across]), gpu_matmul(a, b))


def test_a_promoted_sum_is_an_fp32_sum_of_parts():
    gen = torch.Generator().manual_seed(0)
    a, b, c = drawn('e4m3', (4, 300), 3, gen), drawn('e4m3', (300, 4), 3, gen), torch.randn(4, 4, generator=gen)
    want = c
    for i in range(0, 300, 128): want = want + gpu_matmul(a[:, i:i+128], b[i:i+128])
    assert same_bits(gpu_matmul(a, b, promote=128, c=c), want)
    with pytest.raises(ValueError, match='promote=100'): gpu_matmul(a, b, promote=100)


def test_batches_broadcast():
    gen = torch.Generator().manual_seed(0)
    a, b = drawn('fp16', (2, 1, 5, 40), 3, gen), drawn('fp16', (3, 40, 4), 3, gen)
    out = gpu_matmul(a, b, 'A100', 'fp16')
    assert out.shape == (2, 3, 5, 4)
    for i in range(2):
        for j in range(3): assert same_bits(out[i, j], gpu_matmul(a[i, 0], b[j], 'A100', 'fp16'))


@each('args, words', [
    (('GTX 970', 'fp16'), 'V100, A100'), (('V100', 'bf16'), 'fp16 with fp32 sums'), (('A100', 'e4m3'), 'tf32'), (('H100', 'mxfp8'), 'e4m3')])
def test_what_is_not_in_the_table_is_named(args, words):
    with pytest.raises(ValueError, match=words): gpu_matmul(torch.ones(2, 2), torch.ones(2, 2), *args)


def test_numbers_outside_the_format_are_refused():
    with pytest.raises(ValueError, match='0.3'): gpu_matmul(torch.tensor([[.3]]), torch.ones(1, 1))
    with pytest.raises(ValueError, match='scale for each 32'): gpu_matmul(torch.ones(2, 32), torch.ones(32, 2), 'B200', 'mxfp8')
    with pytest.raises(ValueError, match='shapes'): gpu_matmul(torch.ones(2, 32), torch.ones(32, 2), 'B200', 'mxfp8', scales=(torch.ones(2, 2),)*2)
    one = torch.ones(1, 1)
    for bad in (0., .75, -2., torch.inf, 2.**-140):
        with pytest.raises(ValueError, match='no scale of mxfp8'):
            gpu_matmul(torch.ones(1, 32), torch.ones(32, 1), 'B200', 'mxfp8', scales=(one, one*bad))
    for good in (2.**-127, 2.**127, torch.nan): gpu_matmul(torch.ones(1, 32), torch.ones(32, 1), 'B200', 'mxfp8', scales=(one, one*good))
    four = torch.ones(1, 4)
    with pytest.raises(ValueError, match='1.29.*e4m3'): gpu_matmul(torch.ones(1, 64), torch.ones(64, 1), 'B200', 'nvfp4', scales=(four*1.3, four.mT))
    with pytest.raises(ValueError, match='scales for blocks'): as_gpu('B200', 'mxfp8')


# --- any code on a GPU ---

def cast8(x, fmt):
    scale = x.abs().max()/get_format(fmt).max
    return quantize(x/scale, fmt), scale


def product8(x, w, fmts):
    (a, sa), (b, sb) = cast8(x, fmts[0]), cast8(w, fmts[1])
    return gpu_matmul(a, b, 'H100', fmts)*(sa*sb)


def test_a_layer_forward_and_backward():
    torch.manual_seed(0)
    lin, x, g = nn.Linear(70, 5), torch.randn(2, 40, 70, requires_grad=True), torch.randn(2, 40, 5)
    with as_gpu('H100', 'e4m3'):
        y = lin(x)
        y.backward(g)
    rows, grads, w = x.detach().flatten(0, 1), g.flatten(0, 1), lin.weight.detach()
    assert same_bits(y.detach().flatten(0, 1), product8(rows, w.T, ('e4m3', 'e4m3')) + lin.bias.detach())
    assert same_bits(x.grad.flatten(0, 1), product8(grads, w, ('e5m2', 'e4m3')))
    assert any(same_bits(lin.weight.grad, t) for t in (product8(grads.T, rows, ('e5m2', 'e4m3')), product8(rows.T, grads, ('e4m3', 'e5m2')).T))


@each('f', [lambda a, b: a @ b, lambda a, b: torch.einsum('bik,bkj->bij', a, b), torch.bmm, torch.matmul,
            lambda a, b: torch.baddbmm(torch.zeros(()).half(), a, b), lambda a, b: torch.stack([torch.mm(x, y) for x, y in zip(a, b)])])
def test_every_way_to_multiply(f):
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=gen, dtype=torch.float32).half() for s in ((3, 4, 50), (3, 50, 6)))
    with as_gpu('A100'): got = f(a, b)
    assert same_bits(got, gpu_matmul(a, b, 'A100', 'fp16').half())


def test_results_are_rounded_once_behind_the_bias():
    gen = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=gen).half() for s in ((4, 50), (6, 50), (6,)))
    want = gpu_matmul(x, w.T, 'H100', 'fp16') + b
    with as_gpu('H100'): assert same_bits(F.linear(x, w, b), want.half())
    with as_gpu('H100', 'fp16'): assert same_bits(F.linear(x.float(), w.float(), b.float()), want.half().float())


def test_fp32_and_fp64_stay_as_they_are():
    x = torch.randn(4, 50)
    with as_gpu('H100'): assert same_bits(x @ x.T, torch.mm(x, x.T))
    with as_gpu('H100', 'e4m3'): got = x.double() @ x.double().T
    assert same_bits(got, x.double() @ x.double().T)


def test_out_and_in_place():
    h = torch.randn(4, 4).half()
    with as_gpu('A100'):
        want, out, new = torch.addmm(h, h, h), torch.empty(0).half(), h.clone()
        torch.addmm(h, h, h, out=out)
        new.addmm_(h, h)
    assert same_bits(out, want) and same_bits(new, want)


def test_under_autocast_and_checkpoint():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5)), torch.randn(16, 40)
    def grads(f):
        net.zero_grad()
        f().square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]
    with as_gpu('H100', 'e4m3'):
        plain = grads(lambda: net(x))
        again = grads(lambda: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False))
    assert all(map(same_bits, plain, again))
    with as_gpu('H100'), torch.autocast('cpu', torch.float16): h100 = net(x)
    hidden = (gpu_matmul(x.half(), net[0].weight.half().T, 'H100', 'fp16') + net[0].bias.half()).half().relu()
    assert same_bits(h100, (gpu_matmul(hidden, net[2].weight.half().T, 'H100', 'fp16') + net[2].bias.half()).half())


@each('f', [lambda x: F.conv2d(x, x), lambda x: F.scaled_dot_product_attention(x, x, x), lambda x: torch.cdist(x[0], x[0])])
def test_what_cannot_be_known_is_refused(f):
    x = torch.randn(2, 2, 4, 4)
    with as_gpu('H100', 'e4m3'), pytest.raises(NotImplementedError, match='as_gpu cannot compute aten'): f(x)


def test_casts_alone_and_nothing_finite():
    x = torch.randn(8, 40)
    a, scale = cast8(x, 'e4m3')
    b, other = cast8(x.T, 'e4m3')
    with as_gpu(None, 'e4m3'): assert same_bits(x @ x.T, (a @ b)*(scale*other))
    x[0, 0] = torch.inf
    with as_gpu('H100', 'e4m3'): assert (x @ x.T).isnan().all()


def test_memory_is_bounded():
    "A product of 2^27 parts, in tiles of 2^18"
    from torch.profiler import profile
    a, b = torch.ones(64, 2**15), torch.ones(2**15, 64)
    with profile(profile_memory=True) as p: gpu_matmul(a, b)
    now = peak = 0
    for e in p.profiler.kineto_results.events():
        if e.name() == '[memory]':
            now += e.nbytes()
            peak = max(peak, now)
    assert 0 < peak < 20*a.nbytes


@pytest.mark.parametrize('shapes, fmt, kw, words', [
    (((2, 32), (64, 3)), 'e4m3', dict(promote=32), '32 columns and b 64 rows'), (((2, 64), (32, 3)), 'fp16', {}, '64 columns'),
    (((2, 32), (32, 3)), ('fp16', 'e4m3'), {}, 'fp16 by e4m3'), (((2, 32), (32, 3)), ('bf16', 'tf32'), {}, 'bf16 by tf32')])
def test_what_no_tensor_core_multiplies_is_refused(shapes, fmt, kw, words):
    with pytest.raises(ValueError, match=words): gpu_matmul(*(torch.ones(s) for s in shapes), 'H100', fmt, **kw)


def test_a_core_with_more_bits_than_are_exact_is_refused():
    a, b = torch.ones(2, 32), torch.ones(32, 3)
    with pytest.raises(ValueError, match='bits=30'): gpu_matmul(a, b, Core(32, 30, 23), 'fp32')
    assert (gpu_matmul(a, b, Core(32, 29, 23), 'fp32') == 32).all()


# --- AMD's matrix cores ---

AMD_FILES = json.loads(gzip.decompress((Path(__file__).parent/'golden/amd.json.gz').read_bytes()))['files']


@each('f', AMD_FILES)
def test_amds_sums_are_the_simulators(f):
    "Normal numbers, numbers of very different size, subnormal ones and zeros; the sum begins at c"
    a, b = read(f['a'], torch.float32, f['n'], f['k']), read(f['b'], torch.float32, f['k'], f['n'])
    c, want = (read(f[k], torch.float32, f['n'], f['n']) for k in 'cd')
    got = gpu_matmul(a, b, f['gpu'], f['fmt'], c=c)
    assert same_bits(got + 0., want + 0.)


def test_the_files_cover_amds_rows(): assert {(f['gpu'], f['fmt'], 'fp32') for f in AMD_FILES} == AMD


def test_a_layer_trains_with_amds_sums():
    x, layer = torch.randn(64, 48), nn.Linear(48, 8)
    want = torch.autograd.grad(layer(x).square().mean(), layer.weight)[0]
    for gpu in ('MI100', 'MI200', 'MI300'):
        with as_gpu(gpu, 'bf16'): got = torch.autograd.grad(layer(x).square().mean(), layer.weight)[0]
        assert 0 < (got - want).norm() < .02*want.norm()
    assert gpu_matmul(torch.full((1, 32), torch.inf), torch.ones(32, 1), 'MI300', 'fp16').item() == torch.inf
