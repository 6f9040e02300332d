"quantize: billions of elements a second for a round trip (float32 to the format's grid, as float32), and against gfloat."
import gfloat
import gfloat.formats as gf
import torch
from harness import Row, medians, ratio
from mpcourse.rounding import _beyond, _native, _round_to_grid, quantize
from mpcourse.formats import get_format

N = 1_000_000
# G elements/s
FLOORS = dict(fp16=2, bf16=2, e5m2=.8, e4m3=.2, e4m3fnuz=.2, e5m2fnuz=.2, e3m4=.1, e6m9=.1, tf32=.1)


def bench_throughput():
    "A million float32, saturating, to nearest; then the other roundings"
    x = torch.randn(N)
    t = medians({f: lambda f=f: quantize(x, f) for f in FLOORS} | {r: lambda r=r: quantize(x, 'fp16', r) for r in ('stochastic', 'toward_zero')},
                repeats=21)
    return ([Row(f'quantize {f}', N/t[f]/1e9, at_least=lo, unit='G/s') for f,lo in FLOORS.items()]
            + [Row(f'quantize fp16 {r}', N/t[r]/1e9, unit='G/s')
               for r in ('stochastic', 'toward_zero')])


def bench_native_against_generic():
    "Which of torch's own casts are worth taking on this machine? Above 1: the cast is the faster way"
    x, rows = torch.randn(N), []
    for f in map(get_format, ('fp16', 'bf16', 'e5m2', 'e4m3', 'e4m3fnuz', 'e5m2fnuz')):
        t = medians({'divide': lambda: _beyond(_round_to_grid(x, f, 'nearest'), f, 'nearest', 'saturate'), 'cast': lambda: _native(x, f, 'saturate')})
        rows.append(ratio(f'{f.name}: divide, round, multiply / cast', t, 'divide', 'cast'))
    return rows


def bench_against_gfloat():
    "A hundred thousand elements; gfloat rounds numpy arrays in FP64"
    x, rows = torch.randn(100_000), []
    a = x.double().numpy()
    peers = dict(fp16=(gf.format_info_binary16, 10), bf16=(gf.format_info_bfloat16, 10),
                 e5m2=(gf.format_info_ocp_e5m2, 10),
                 e4m3=(gf.format_info_ocp_e4m3, 10), e3m2=(gf.format_info_ocp_e3m2, 5),
                 e2m1=(gf.format_info_ocp_e2m1, 5))
    for f,(info,floor) in peers.items():
        t = medians({'gfloat': lambda: gfloat.round_ndarray(info, a, sat=True),
                     'ours': lambda: quantize(x, f)}, few={'gfloat': 5})
        rows.append(ratio(f'gfloat / quantize {f}', t, 'gfloat', 'ours', at_least=floor))
    return rows
