"The master path, fused, against the torch kernels that it must call; and what half weights within forward cost."
import torch, torch.nn as nn
from harness import Row, medians, ratio
from mpcourse.half import model_to_half
from mpcourse.master import get_master, to_master_grads, to_model_params

# 30 layers: 60 tensors, with BIG features 10 million parameters
BIG, SMALL, LAYERS = 576, 64, 30


def net(width, device='cpu'):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)]).to(device)


def bench_master_path():
    "10 M parameters in 60 tensors: gradients up and unscaled, weights down. The kernels alone are copies and products, called bare"
    device, rows = 'cuda' if torch.cuda.is_available() else 'cpu', []
    done = torch.cuda.synchronize if device == 'cuda' else lambda: None
    for flat in (False, True):
        model = net(BIG, device)
        groups, masters = get_master([list(model.parameters())], flat)
        model_to_half(model)
        for p in model.parameters(): p.grad = torch.randn_like(p)
        ps, gs, k = list(model.parameters()), [p.grad for p in model.parameters()], 2.**-10
        ms, up = [torch.zeros(p.shape, device=device) for p in ps], [torch.zeros(p.shape, device=device) for p in ps]
        def ours():
            to_master_grads(groups, masters, k, flat)
            to_model_params(groups, masters, flat)
            done()
        @torch.no_grad()
        def kernels():
            torch._foreach_copy_(up, gs)
            torch._foreach_mul_(up, k)
            torch._foreach_copy_(ps, ms)
            done()
        t = medians({'ours': ours, 'kernels': kernels}, repeats=31)
        n, shape = sum(p.numel() for p in ps), 'flat masters' if flat else 'masters'
        rows += [ratio(f'{shape}: up and down / its kernels', t, 'ours', 'kernels',
                       at_most=None if flat else 1.3),
                 Row(f'{shape}: 12 bytes a weight, moved at', 12*n/t['ours']/1e9, unit='GB/s')]
    big = torch.empty(n*3, device=device)
    def copy(): big.copy_(src); done()
    src = torch.zeros_like(big)
    t |= medians({'copy': copy}, repeats=31)
    # the time of 12 bytes a weight at the speed of a plain copy
    floor = 12*n/(2*big.numel()*4/t['copy'])
    return rows + [Row('masters: time / the time to move 12 bytes a weight', t['ours']/floor,
                       at_most=1.5 if device == 'cuda' else None)]
