"""The cast policy on every kind of layer, hooks that copy and go away, nested inputs, and half training of a composite model."""
import collections, copy, io, pickle, typing, warnings

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence

from mpcourse import half
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.formats import same_bits
from mpcourse.half import (NORMS, ClampInfinite, cast, half_dtype, cast_policy, clamp_hooks, clamp_infinite, is_norm, model_bytes,
                           model_to_float, model_to_half, saved_bytes)
from mpcourse.toys import char_transformer, digits
from mpcourse.zoo import captions, cnn, two_towers

pytestmark = pytest.mark.library
WHOLE = not torch.__version__.startswith('2.6.')     # torch 2.6 breaks the graph at a regular expression
H, B, S, D = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALVES = pytest.mark.parametrize('dtype', [H, B], ids=['fp16', 'bf16'])


def rand(*shape, seed=0, dtype=S, scale=1.): return (torch.randn(shape, generator=torch.Generator().manual_seed(seed))*scale).to(dtype)
def tensors(model): return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
def floats(model): return {n: t for n, t in tensors(model).items() if t.is_floating_point()}
def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in vars(m)) for m in model.modules())
def snapshot(model): return {n: (t.dtype, t.detach().clone(), id(t)) for n, t in tensors(model).items()}


def unchanged(model, before):
    now = snapshot(model)
    return now.keys() == before.keys() and all(same_bits(now[n][1], before[n][1]) and now[n][2] == before[n][2] for n in now)


class HandRMS(nn.Module):
    "As language models write it; no subclass of torch's"
    def __init__(self, d=8): super().__init__(); self.weight = nn.Parameter(torch.ones(d))
    def forward(self, x): return x/(x.pow(2).mean(-1, keepdim=True) + 1e-8).sqrt()*self.weight


class LlamaRMSNorm(HandRMS): pass
class T5LayerNorm(HandRMS): pass
class LayerNorm2d(HandRMS): pass
class FrozenBatchNorm2d(HandRMS): pass


class PreNorm(nn.Module):
    "A container with Norm in its name: its parts decide"
    def __init__(self): super().__init__(); self.norm, self.fn = nn.LayerNorm(8), nn.Linear(8, 8)
    def forward(self, x): return self.fn(self.norm(x))


NORM_LAYERS = {
    'batch1d': (lambda: nn.BatchNorm1d(8), (4, 8)), 'batch2d': (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3)),
    'batch3d': (lambda: nn.BatchNorm3d(8), (4, 8, 2, 2, 2)), 'batch, no weights': (lambda: nn.BatchNorm1d(8, affine=False), (4, 8)),
    'instance1d': (lambda: nn.InstanceNorm1d(8), (4, 8, 5)), 'instance2d': (lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), (4, 8, 3, 3)),
    'instance3d': (lambda: nn.InstanceNorm3d(8), (4, 8, 2, 2, 2)), 'layer': (lambda: nn.LayerNorm(8), (4, 8)),
    'layer, no weights': (lambda: nn.LayerNorm(8, elementwise_affine=False), (4, 8)), 'group': (lambda: nn.GroupNorm(2, 8), (4, 8, 3)),
    'rms': (lambda: nn.RMSNorm(8, eps=1e-8), (4, 8)), 'local response': (lambda: nn.LocalResponseNorm(2), (4, 8, 3)),
    'cross map': (lambda: nn.CrossMapLRN2d(2), (4, 8, 3, 3)), 'llama': (LlamaRMSNorm, (4, 8)), 't5': (T5LayerNorm, (4, 8)),
    '2d': (LayerNorm2d, (4, 8)), 'frozen': (FrozenBatchNorm2d, (4, 8))}
all_norms = pytest.mark.parametrize('kind', NORM_LAYERS)


# --- norms ---

@all_norms
@HALVES
def test_a_norm_stays_in_fp32_and_computes_in_it(kind, dtype):
    make, shape = NORM_LAYERS[kind]
    norm, x = make(), rand(*shape, scale=300., dtype=dtype)
    twin = copy.deepcopy(norm)
    net = model_to_half(nn.Sequential(norm, nn.Linear(2, 2)), dtype)
    assert is_norm(norm) and all(t.dtype == S for t in floats(norm).values()) and net[1].weight.dtype == dtype
    assert same_bits(norm(x), twin(x.float()).to(dtype))
    keyword = 'x' if isinstance(norm, (HandRMS, nn.RMSNorm)) else 'input'
    assert same_bits(norm(**{keyword: x}), twin(x.float()).to(dtype))


def test_no_shortcut_passes_over_a_norm(monkeypatch):
    "In evaluation torch's encoder layer has a kernel of its own, which asks only for hooks; as on a GPU, where LayerNorm takes no half numbers"
    monkeypatch.setattr(half, 'MIXED', {})
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    was = net.activation_relu_or_gelu
    model_to_half(net)
    seen, plain = [], net.norm1.forward.plain
    net.norm1.forward.plain = lambda x: seen.append(x.dtype) or plain(x)
    with torch.no_grad(): assert net(rand(2, 3, 8, dtype=H)).dtype == H
    assert seen == [S] and was and not net.activation_relu_or_gelu
    assert model_to_float(net).activation_relu_or_gelu == was


def test_sync_batchnorm_and_lazy_ones_are_norms():
    assert is_norm(nn.SyncBatchNorm(4)) and is_norm(nn.LazyBatchNorm1d()) and is_norm(nn.LazyInstanceNorm2d())
    assert set(cast_policy(nn.SyncBatchNorm(4)).values()) == {S} and all(isinstance(c, type) for c in NORMS)


class Ours(nn.LayerNorm): pass
class Channels(nn.BatchNorm2d): pass
class Windows(nn.LocalResponseNorm): pass


def test_subclasses_under_another_name_are_norms():
    assert is_norm(Ours(2)) and is_norm(Channels(2)) and is_norm(Windows(2)) and is_norm(nn.CrossMapLRN2d(2))
    wrapped = Ours(2)
    wrapped.act = nn.Linear(2, 2)                     # a norm with parts, as in timm: the parts are within it
    assert set(cast_policy(nn.Sequential(wrapped, nn.Linear(1, 1)))) and set(cast_policy(wrapped).values()) == {S}


def test_a_container_called_norm_is_none():
    net = PreNorm()
    assert not is_norm(net) and not is_norm(nn.Identity()) and not is_norm(nn.Softmax(-1)) and not is_norm(nn.PairwiseDistance())
    assert cast_policy(net) == {'norm.weight': S, 'norm.bias': S, 'fn.weight': H, 'fn.bias': H}


@HALVES
def test_a_forward_of_the_instance_is_wrapped_and_comes_back(dtype):
    "As hooks of other libraries, and `simulate_fp8`, put it on a module"
    net, x = nn.Sequential(LlamaRMSNorm(), nn.Linear(8, 8)), rand(4, 8, scale=300., dtype=dtype)
    plain = net[0].forward
    def twice(x): return plain(x)*2
    net[0].forward = twice
    want = net[0](x.float()).to(dtype)
    assert same_bits(model_to_half(net, dtype)[0](x), want)
    assert model_to_float(net)[0].forward is twice and 'forward' not in vars(net[1])


def test_hand_written_norm_is_cured():
    h = torch.tensor([[300.]*8, [0.]*8]).half()
    sick, well = LlamaRMSNorm().half()(h), model_to_half(nn.Sequential(LlamaRMSNorm()))(h)
    assert (sick[0] == 0).all() and sick[1].isnan().all()
    assert (well[0] == 1).all() and (well[1] == 0).all()


def test_batchnorm_statistics_beyond_half():
    x = rand(64, 4, scale=1000.)
    for net, finite in ((nn.Sequential(nn.BatchNorm1d(4)).half(), False), (model_to_half(nn.Sequential(nn.BatchNorm1d(4))), True)):
        for _ in range(20): net(x.half())
        assert net[0].running_var.isfinite().all() == finite
        assert net[0].num_batches_tracked == 20 and net[0].num_batches_tracked.dtype == torch.int64


def test_hooks_of_others_still_fire_and_see_what_passes_outside():
    norm, seen = nn.RMSNorm(8), []
    norm.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    before = norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model_to_half(nn.Sequential(norm, nn.Linear(8, 2)))(rand(2, 8, dtype=H))
    assert seen == [H, H]
    before.remove()
    assert len(norm._forward_hooks) == 1


def grouped():
    "A net whose norm has to be cast for"
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def test_batchnorm_takes_half_numbers_as_they_are():
    net = model_to_half(cnn())
    assert net[1].weight.dtype == net[1].running_var.dtype == S and net(rand(4, 1, 8, 8, dtype=H)).dtype == H
    net[1].register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype))); seen = []
    net(rand(4, 1, 8, 8, dtype=H, scale=3000.))
    assert seen == [(H, H)] and net[1].running_var.isfinite().all()     # half in, half out, statistics in FP32


# --- what is cast ---

LAYERS = {'conv': (lambda: nn.Conv2d(3, 4, 3), lambda: (rand(2, 3, 8, 8),)), 'transposed': (lambda: nn.ConvTranspose1d(3, 4, 2), lambda: (rand(2, 3, 8),)),
          'linear': (lambda: nn.Linear(8, 4), lambda: (rand(2, 8),)), 'bilinear': (lambda: nn.Bilinear(3, 4, 5), lambda: (rand(2, 3), rand(2, 4))),
          'embedding': (lambda: nn.Embedding(9, 4), lambda: (torch.arange(6),)), 'bag': (lambda: nn.EmbeddingBag(9, 4, mode='sum'), lambda: (torch.arange(6).view(2, 3),)),
          'prelu': (lambda: nn.PReLU(), lambda: (rand(2, 3),)),
          'lstm': (lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), lambda: (rand(2, 3, 4),)), 'gru': (lambda: nn.GRU(4, 5), lambda: (rand(2, 3, 4),)),
          'rnn': (lambda: nn.RNN(4, 5), lambda: (rand(2, 3, 4),)), 'cell': (lambda: nn.LSTMCell(4, 5), lambda: (rand(2, 4),)),
          'attention': (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda: (rand(2, 3, 8),)*3),
          'encoder': (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.), lambda: (rand(2, 3, 8),)),
          'transformer': (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True, dropout=0.), lambda: (rand(2, 3, 8), rand(2, 4, 8)))}


def first(out):
    while not isinstance(out, torch.Tensor): out = out[0]
    return out


@pytest.mark.parametrize('kind', LAYERS)
@pytest.mark.parametrize('training', [True, False], ids=['train', 'eval'])
def test_layers(kind, training):
    torch.manual_seed(0)
    make, inputs = LAYERS[kind]
    net = make().train(training)
    want = first(net(*inputs()))
    ids = {n: id(p) for n, p in net.named_parameters()}
    half = model_to_half(net)
    policy = cast_policy(net)
    assert policy == {n: t.dtype for n, t in floats(net).items()}
    assert all((t == S) == ('norm' in n) for n, t in policy.items())
    with warnings.catch_warnings(), fp32_accumulate():
        warnings.simplefilter('error')
        out = first(half(*cast(inputs(), H)))
        (out.float().pow(2).sum()).backward()
        with torch.no_grad(): again = first(half(*cast(inputs(), H)))
    assert out.dtype == again.dtype == H and (out - want).abs().max() < .02*(1 + want.abs().max())
    assert (again - out).abs().max() < .01
    assert {n: id(p) for n, p in net.named_parameters()} == ids
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in net.parameters())


@HALVES
def test_buffers_stay_fp32(dtype):
    net = nn.Linear(2, 2)
    net.register_buffer('scale', torch.tensor(1.1))
    net.register_buffer('ids', torch.arange(3))
    net.register_buffer('mask', torch.ones(2, dtype=torch.bool))
    net.register_buffer('temp', torch.tensor(2., dtype=D), persistent=False)
    net.register_buffer('none', None)
    net.register_buffer('z', torch.zeros(2, dtype=torch.complex64))
    assert cast_policy(net, dtype) == dict(weight=dtype, bias=dtype, scale=S, temp=S)
    model_to_half(net, dtype)
    assert [net.scale.dtype, net.temp.dtype, net.ids.dtype, net.mask.dtype, net.z.dtype] == [S, S, torch.int64, torch.bool, torch.complex64]


class Gain(nn.Module):
    "An FP32 buffer as factor: the product meets the next layer"
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8); self.register_buffer('gain', torch.full((8,), 1.1))
    def forward(self, x): return self.b(self.a(x)*self.gain)


class Table(nn.Module):
    "Positions that are added, in a module of their own, between layers; no layer before the norm"
    def __init__(self): super().__init__(); self.register_buffer('pe', torch.linspace(0, 1, 8))
    def forward(self, x): return x + self.pe


class Kernel(nn.Module):
    "A buffer as operand of a product, and one that forward writes to"
    def __init__(self): super().__init__(); self.lin = nn.Linear(8, 8); self.register_buffer('k', torch.eye(8)*1.5); self.register_buffer('seen', torch.tensor(1/3))
    def forward(self, x): self.seen += 1; return self.lin(x @ self.k)


class Blocks(nn.Module):
    "Buffers below a list, which has no forward"
    def __init__(self): super().__init__(); self.blocks = nn.ModuleList([Gain(), Gain()])
    def forward(self, x): return self.blocks[1](self.blocks[0](x))


WITH_BUFFERS = {'gain': Gain, 'list': Blocks, 'table': lambda: nn.Sequential(nn.Linear(8, 8), Table(), nn.Linear(8, 4)),
                'table first': lambda: nn.Sequential(Table(), nn.LayerNorm(8), nn.GRU(8, 4)), 'kernel': Kernel, 'linear': lambda: with_buffer(nn.Linear(8, 4))}
def with_buffer(m): m.register_buffer('rate', torch.tensor(.1)); return m


@pytest.mark.parametrize('kind', WITH_BUFFERS)
@pytest.mark.parametrize('how', ['as it is', 'deepcopy', 'pickle', 'compile', 'part'])
@HALVES
def test_fp32_buffers_meet_half_numbers(kind, how, dtype):
    torch.manual_seed(0)
    net, x = WITH_BUFFERS[kind](), rand(4, 8)
    buffers = {n: b.clone() for n, b in net.named_buffers()}
    want, half = first(copy.deepcopy(net)(x)), model_to_half(net, dtype)
    assert all(same_bits(b, buffers[n]) for n, b in half.named_buffers())
    run = {'deepcopy': copy.deepcopy, 'pickle': lambda m: pickle.loads(pickle.dumps(m)),
           'compile': lambda m: torch.compile(m, backend='eager', fullgraph=WHOLE)}.get(how, lambda m: m)(half)
    if how == 'compile' and isinstance(net[-1] if isinstance(net, nn.Sequential) else net, nn.GRU): pytest.skip('dynamo does not compile a GRU whole')
    if how == 'part' and isinstance(net, nn.Sequential): run = lambda v: first(net[2](first(net[1](net[0](v)))))
    out = first(run(x.to(dtype)))
    out.float().sum().backward()
    assert out.dtype == dtype and (out - want).abs().max() < (.02 if dtype == H else .1)
    assert not torch.is_autocast_enabled('cpu')
    model_to_float(half)
    assert first(half(x)).dtype == S and 'forward' not in vars(half) and hooks(half) == 0
    torch._dynamo.reset()


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError])
def test_autocast_ends_with_an_exception(error):
    class Bomb(Gain):
        def forward(self, x): raise error
    with pytest.raises(error): model_to_half(Bomb())(rand(2, 8, dtype=H))
    assert not torch.is_autocast_enabled('cpu')


def test_a_model_without_buffers_has_no_autocast():
    net = model_to_half(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    assert not any(isinstance(vars(m).get('forward'), half.AutocastForward) for m in net.modules())


def test_nested_tensors_are_off_while_half():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model_to_half(model_to_half(net))
    assert not net.use_nested_tensor
    model_to_float(net)
    assert net.use_nested_tensor and '_nested' not in vars(net)


def test_the_order_and_names_are_the_models():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    assert set(cast_policy(net)) == set(floats(net)) and list(cast_policy(nn.Linear(2, 2))) == ['weight', 'bias']


def test_tied():
    net = char_transformer()
    net.head.weight = net.tok.weight
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    policy = cast_policy(net)
    assert policy['tok.weight'] == policy['head.weight'] == H and policy['ln.weight'] == policy['blocks.0.ln1.bias'] == S
    model_to_half(net)
    assert net.head.weight is net.tok.weight and net.head.weight.dtype == H
    assert [id(p) for p in opt.param_groups[0]['params']] == [id(p) for p in net.parameters()]
    model_to_float(net)
    assert net.head.weight is net.tok.weight and net.head.weight.dtype == S


def test_one_module_in_two_places_and_a_shared_buffer():
    ln = nn.LayerNorm(4)
    net, both = nn.Sequential(ln, nn.Linear(4, 4), ln, nn.Linear(4, 4)), torch.ones(3)
    net[1].register_buffer('a', both); net[3].register_buffer('b', both)
    assert cast_policy(net)['0.weight'] == cast_policy(net)['2.weight'] == S
    model_to_half(net)
    assert net[1].a is net[3].b is both and both.dtype == S and net(rand(2, 4, dtype=H)).dtype == H


def test_frozen_parameters_and_gradients():
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    net(rand(3, 2)).sum().backward()
    grads = [p.grad for p in net.parameters()]
    model_to_half(net)
    assert [p.requires_grad for p in net.parameters()] == [False]*2 + [True]*4
    for p, g in zip(net.parameters(), grads): assert (g is None and p.grad is None) or same_bits(p.grad, g.to(p.dtype))
    net(rand(3, 2, dtype=H)).sum().backward()        # accumulates into the gradients that are there


def test_channels_last_stays():
    net = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    assert model_to_half(net)[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('wrap', [parametrizations.weight_norm, parametrizations.spectral_norm], ids=['weight', 'spectral'])
def test_parametrized(wrap):
    torch.manual_seed(0)
    net = wrap(nn.Linear(4, 4))
    want = net.eval()(rand(2, 4))
    out = model_to_half(net)(rand(2, 4, dtype=H))
    assert net.weight.dtype == out.dtype == H and (out - want).abs().max() < .02
    assert all((t.dtype == S) == ('parametrizations' in n) for n, t in floats(net).items())      # what a weight is made of


def test_a_loss_inside_a_model():
    class WithLoss(nn.Module):
        def __init__(self): super().__init__(); self.lin, self.loss = nn.Linear(4, 3), nn.CrossEntropyLoss(weight=torch.tensor([1., .1, .3]))
        def forward(self, x, y): return self.loss(self.lin(x)*1000, y)
    net, x, y = WithLoss(), rand(5, 4), torch.arange(5) % 3
    want = net(x, y)
    loss = model_to_half(net)(x.half(), y)
    assert cast_policy(net)['loss.weight'] == S and loss.dtype == S and abs(loss - want) < .02*want


# --- there and back ---

def dyadic(model):
    "Weights that half precision holds exactly"
    with torch.no_grad():
        for t in floats(model).values(): t.copy_(t.half().float())
    return model


@pytest.mark.parametrize('make', [cnn, char_transformer, two_towers, lambda: nn.LSTM(3, 4, 2)], ids=['cnn', 'lm', 'towers', 'lstm'])
def test_back_to_float_bit_for_bit(make):
    net = dyadic(make())
    before, n = snapshot(net), hooks(net)
    model_to_float(model_to_half(net))
    assert unchanged(net, before) and hooks(net) == n


def test_back_to_float_keeps_rounding_and_the_norms_bits():
    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with torch.no_grad(): net[1].weight.copy_(rand(3))
    before = {n: t.detach().clone() for n, t in floats(net).items()}
    model_to_float(model_to_half(net, B))
    for n, t in floats(net).items(): assert same_bits(t.detach(), before[n] if n[0] == '1' else before[n].bfloat16().float())
    assert not same_bits(net[0].weight.detach(), before['0.weight'])


def test_twice_half_and_other_half():
    net = cnn()
    n = hooks(model_to_half(net))
    assert hooks(model_to_half(net)) == n and hooks(model_to_half(net, B)) == n
    assert net[1](rand(2, 8, 4, 4, dtype=B)).dtype == B and net[0].weight.dtype == B and net[1].weight.dtype == S
    model_to_float(net)
    assert hooks(net) == 0 and {t.dtype for t in floats(net).values()} == {S}
    assert model_to_float(net) is net


def test_a_model_that_is_half_already():
    x = rand(4, 1, 8, 8)
    for net in (cnn().half(), cnn().bfloat16(), cnn().double()):
        model_to_half(net)
        assert {n: t.dtype for n, t in floats(net).items()} == cast_policy(cnn())
        assert net(x.half()).dtype == H


def test_others_hooks_stay():
    net = cnn()
    seen = []
    net[1].register_forward_hook(lambda *a: seen.append(1))
    net[1].register_forward_pre_hook(lambda m, args, kw: seen.append(2), with_kwargs=True)
    model_to_float(model_to_half(net))(rand(2, 1, 8, 8))
    assert seen == [2, 1]


@pytest.mark.parametrize('how', ['deepcopy', 'pickle', 'save'])
def test_a_converted_model_is_copied_with_its_hooks(how):
    net = model_to_half(grouped())
    if how == 'deepcopy': twin = copy.deepcopy(net)
    elif how == 'pickle': twin = pickle.loads(pickle.dumps(net))
    else:
        f = io.BytesIO(); torch.save(net, f); f.seek(0)
        twin = torch.load(f, weights_only=False)
    x = rand(4, 1, 8, 8, dtype=H, scale=500.)
    assert same_bits(net(x), twin(x))
    model_to_float(twin)
    assert hooks(twin) == 0 and hooks(net) > 0 and net(x).dtype == H
    assert twin(x.float()).dtype == S


def test_state_dict_loads_both_ways():
    net, other = cnn(), cnn(seed=1)
    model_to_half(other).load_state_dict(net.state_dict())
    assert all(same_bits(p.data, q.data.to(p.dtype)) for p, q in zip(other.parameters(), net.parameters()))


# --- compiled ---

def test_compiled():
    net, x = cnn(), rand(4, 1, 8, 8, scale=500.)
    fast = torch.compile(net, backend='eager', fullgraph=True)
    want = fast(x)
    assert cast_policy(fast) == {f'_orig_mod.{n}': t for n, t in cast_policy(net).items()}
    assert set(cast_policy(fast)) == set(floats(fast))
    assert model_to_half(fast) is fast and net[0].weight.dtype == H and net[1].weight.dtype == S
    net.eval()
    out = fast(x.half())
    assert same_bits(out, net(x.half())) and out.dtype == H
    model_to_float(fast)
    net.train()
    assert hooks(net) == 0 and fast(x).dtype == want.dtype == S
    torch._dynamo.reset()


def test_compiled_there_and_back_twice():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), rand(3, 4)
    fast = torch.compile(net, backend='eager')
    for dtype in (H, B, H):
        assert same_bits(fast(x), net(x)) and fast(x).dtype == S
        model_to_half(net, dtype)
        assert same_bits(fast(x.to(dtype)), net(x.to(dtype))) and fast(x.to(dtype)).dtype == dtype
        model_to_float(net)
    torch._dynamo.reset()


@pytest.mark.parametrize('how', ['wrapped', 'in place'])
def test_hooks_on_a_model_that_is_compiled_already(how):
    net, x = nn.Sequential(nn.Linear(1, 1, bias=False)).half(), torch.full((1, 1), 4.).half()
    nn.init.constant_(net[0].weight, 3e4)
    if how == 'wrapped': fast = torch.compile(net, backend='eager')
    else:
        net.compile(backend='eager')
        fast = net
    assert fast(x).isinf()
    with clamp_hooks(fast): assert fast(x) == 65504
    assert fast(x).isinf()
    torch._dynamo.reset()


def test_compiled_after_casting():
    net, x = model_to_half(nn.Sequential(nn.Linear(4, 4), LlamaRMSNorm(4), nn.Linear(4, 2))), rand(3, 4, dtype=H, scale=1e3)
    assert same_bits(torch.compile(net, backend='eager', fullgraph=True)(x), net(x)) and net(x).isfinite().all()
    torch._dynamo.reset()


# --- nests ---

Pair = collections.namedtuple('Pair', 'x y')
class Typed(typing.NamedTuple):
    x: torch.Tensor
    n: int = 3


class Opaque:
    def __init__(self): self.x = torch.zeros(2)


def test_cast_every_nesting():
    f, i, o = torch.ones(2), torch.arange(2), Opaque()
    nest = {'a': [f, (f, i, None)], 'b': Pair(f, [i, 'word']), 'c': Typed(f), 'd': collections.OrderedDict(z=f), 1: 2.5, 'o': o, 'm': torch.ones(2, dtype=torch.bool)}
    got = cast(nest, H)
    assert got['a'][0].dtype == got['a'][1][0].dtype == got['b'].x.dtype == got['c'].x.dtype == got['d']['z'].dtype == H
    assert got['a'][1][1] is i and got['a'][1][2] is None and got['b'].y == [i, 'word'] and got['c'].n == 3 and got[1] == 2.5
    assert got['o'] is o and o.x.dtype == S and got['m'].dtype == torch.bool
    assert [type(got[k]) for k in 'abcd'] == [list, Pair, Typed, collections.OrderedDict] and type(got['a'][1]) is tuple
    assert f.dtype == S and nest['a'][0] is f and list(got) == list(nest)


@pytest.mark.parametrize('x', [None, 3, 2.5, 'word', b'bytes', {1, 2}, torch.arange(3), torch.tensor(True), torch.zeros(2, dtype=torch.complex64)])
def test_cast_leaves_alone(x): assert cast(x, H) is x


def test_cast_containers_keep_their_kind():
    class Rows(list): pass
    dd = collections.defaultdict(list, a=torch.ones(1))
    got = cast(dd, H)
    assert got['a'].dtype == H and got['new'] == [] and 'new' not in dd
    assert type(cast(Rows([torch.ones(1)]), H)) is Rows and cast(torch.Size([2, 3]), H) == torch.Size([2, 3])
    top = cast(torch.ones(3).max(0), H)
    assert type(top) is torch.return_types.max and top.values.dtype == H and top.indices.dtype == torch.int64
    packed = cast(pack_sequence([torch.ones(3, 4), torch.ones(2, 4)]), H)
    assert packed.data.dtype == H and packed.batch_sizes.dtype == torch.int64
    assert model_to_half(nn.GRU(4, 2))(packed)[0].data.dtype == H


def test_cast_makes_no_copy_where_none_is_needed():
    x = torch.ones(2).half()
    assert cast([x], H)[0] is x


def test_cast_is_differentiable():
    x = torch.ones(2, requires_grad=True)
    cast({'x': x}, H)['x'].sum().backward()
    assert x.grad.dtype == S


# --- the clamp ---

@pytest.mark.parametrize('dtype', [H, B, S])
def test_clamp_infinite(dtype):
    top = torch.finfo(dtype).max
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1., -0., top], dtype=dtype)
    want = torch.tensor([top, -top, torch.nan, 1., -0., top], dtype=dtype)
    assert same_bits(clamp_infinite(x), want) and same_bits(clamp_infinite((x, [3]))[0], want)
    ids = torch.arange(2)
    assert clamp_infinite(ids) is ids


def test_clamp_hooks():
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Sequential(nn.Linear(1, 1, bias=False)))
    for p in net.parameters(): nn.init.constant_(p, 3e4)
    model_to_half(net)
    x = torch.ones(1, 1).half()
    assert net(x*4).isinf().all()
    with clamp_hooks(net) as handle:
        assert len(handle) == 4 and (net(x*4) == 65504).all() and (net(-x*4) == -65504).all()
        assert copy.deepcopy(net)(x*4) == 65504 and pickle.loads(pickle.dumps(net))(x*4) == 65504
    assert net(x*4).isinf().all()
    with clamp_hooks(net, nn.Linear) as handle: assert len(handle) == 2
    h = net.register_forward_hook(ClampInfinite())
    assert net(x*4) == 65504
    h.remove()


# --- a composite model ---

class Composite(nn.Module):
    "BatchNorm, a convolution, a tied embedding, a frozen layer, an unused parameter, a hand-written norm"
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.frozen = nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Linear(128, 16).requires_grad_(False)
        self.tok, self.norm, self.head = nn.Embedding(10, 16), LlamaRMSNorm(16), nn.Linear(16, 10, bias=False)
        self.head.weight, self.unused = self.tok.weight, nn.Parameter(torch.ones(3))
    def forward(self, batch):
        h = self.frozen(self.bn(self.conv(batch['images'])).relu().flatten(1))
        return {'logits': self.head(self.norm(h + self.tok(batch['hint'])))}


def compose(seed=0):
    torch.manual_seed(seed)
    return Composite()


@HALVES
def test_composite_forward_and_backward(dtype):
    x, y = digits().train
    batch, y = {'images': x[:64], 'hint': (y[:64] + 3) % 10}, y[:64]
    ref, net = compose(), model_to_half(compose(), dtype)
    loss = F.cross_entropy(ref(batch)['logits'], y)
    loss.backward()
    with fp32_accumulate():
        out = net(cast(batch, dtype))['logits']
        mine = F.cross_entropy(out.float(), y)
        (mine*256).backward()
    assert out.dtype == dtype and mine.dtype == S and abs(mine - loss) < .02*loss
    for (n, p), q in zip(net.named_parameters(), ref.parameters()):
        if q.grad is None: assert p.grad is None and n in ('unused', 'frozen.weight', 'frozen.bias'); continue
        assert p.grad.dtype == p.dtype, n
        if n == 'conv.bias': continue                 # BatchNorm takes it out again: its gradient is rounding noise
        assert (p.grad.float()/256 - q.grad).norm() < (.02 if dtype == H else .1)*q.grad.norm(), n
    assert net.bn.num_batches_tracked == 1 and (net.bn.running_var - ref.bn.running_var).abs().max() < .02


def test_composite_trains_in_half():
    x, y = digits().train
    net = model_to_half(compose())
    opt, losses = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=.05, momentum=.9), []
    frozen = net.frozen.weight.detach().clone()
    with fp32_accumulate():
        for i in range(40):
            part = slice(32*i, 32*i + 32)
            out = net(cast({'images': x[part], 'hint': torch.zeros_like(y[part])}, H))['logits']
            loss = F.cross_entropy(out.float(), y[part])
            opt.zero_grad(); loss.backward(); opt.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) < .6*sum(losses[:5]) and same_bits(net.frozen.weight.detach(), frozen)


def test_many_inputs():
    data, net = captions(), two_towers()
    ins = (data.train[0][:8], *data.extra)
    want, out = net(*ins), model_to_half(net)(*cast(ins, H))
    assert out.dtype == H and (out - want).abs().max() < .1


# --- memory ---

def test_bytes():
    net = char_transformer()
    n = sum(p.numel() for p in net.parameters())
    net.head.weight = net.tok.weight
    tied = n - net.tok.weight.numel()
    norms = 2*64*5
    assert model_bytes(net) == 4*tied and model_bytes(model_to_half(net)) == 2*tied + 2*norms
    lin = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4))
    x = rand(100, 8)[:10]
    assert saved_bytes(lin, x) == 4*(10*8 + 10*16) and saved_bytes(lin.half(), x.half()) == 2*(10*8 + 10*16)
    class Halves(nn.Module):
        def forward(self, x): return x[:4]*x[4:8]
    assert saved_bytes(Halves(), x.clone().requires_grad_()) == 4*8*8  # two slices of one storage


# --- sentences ---

def sentence(e): return str(e.value)


@pytest.mark.parametrize('dtype', [S, D, torch.int8, 'fp32', None, torch.float8_e4m3fn])
def test_refuses_what_is_not_half(dtype):
    net = nn.Linear(2, 2)
    for f in (cast_policy, model_to_half):
        with pytest.raises(ValueError, match='torch.float16 or torch.bfloat16') as e: f(net, dtype)
        assert repr(dtype) in sentence(e)
    assert net.weight.dtype == S


@pytest.mark.parametrize('make', [nn.ReLU, nn.Sequential, lambda: nn.BatchNorm1d(3, affine=False)], ids=['relu', 'empty', 'buffers only'])
def test_refuses_a_model_without_floats(make):
    for f in (cast_policy, model_to_half):
        with pytest.raises(ValueError, match='no floating-point parameter: nothing can be put in torch.float16'): f(make())


def test_refuses_a_tensor_that_must_be_both():
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1, bias=False), nn.PReLU(4))
    net[2].weight = net[0].weight
    before = snapshot(net)
    with pytest.raises(ValueError, match='0.weight and 2.weight are one tensor'): model_to_half(net)
    assert unchanged(net, before) and hooks(net) == 0


def test_two_norms_may_share():
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    net[2].weight = net[0].weight
    assert model_to_half(net)[2].weight is net[0].weight and net[0].weight.dtype == S


def test_refuses_what_has_no_shape():
    net = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ValueError, match='1.weight has no shape yet'): model_to_half(net)
    assert net[0].weight.dtype == S
    with torch.no_grad(): net(torch.ones(1, 2))
    assert model_to_half(net)[1].weight.dtype == H


@pytest.mark.parametrize('what', [None, [nn.Linear(2, 2)], 'model'])
def test_refuses_what_is_no_model(what):
    for f in (cast_policy, model_to_half, model_to_float):
        with pytest.raises(TypeError, match='nn.Module'): f(what)


class _Scripted(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(4, 4)
    def forward(self, x): return self.lin(x)


@pytest.mark.filterwarnings('ignore:.*torch.jit')
@pytest.mark.parametrize('what', ['model_to_half', 'simulate_fp8'])
def test_torchscript_is_refused_before_anything_is_changed(what):
    from mpcourse import fp8, half
    convert = next(getattr(m, what) for m in (half, fp8) if hasattr(m, what))
    net = torch.jit.script(_Scripted())
    with pytest.raises(ValueError, match='TorchScript'): convert(net)
    assert net.lin.weight.dtype == torch.float32 and net(torch.ones(1, 4)).dtype == torch.float32


@pytest.mark.parametrize('name, norm', [('MyLayerNorm', True), ('Norm2d', True), ('RMSNorm_3d', True), ('Normalizer', False), ('Enormous', False)])
def test_norms_are_known_by_their_name(name, norm): assert is_norm(type(name, (nn.Module,), {})()) == norm


def test_a_norm_converted_on_one_device_is_asked_again_where_it_runs(monkeypatch):
    "Which norms take half inputs depends on the device; the model may be moved after it was converted"
    net = model_to_half(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    x = torch.randn(3, 4).half()
    want = net(x)
    monkeypatch.setattr(half, 'MIXED', {})                 # as on a device whose kernel wants one dtype
    assert net(x).dtype == torch.float16 and (net(x) - want).abs().max() < 1e-2
    assert isinstance(net[1].forward, half.FP32Forward)


class _Features(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(4, 4); self.register_buffer('mean', torch.zeros(4))
    def forward(self, x): return self.lin(x - self.mean)


class _Perceptual(nn.modules.loss._Loss):
    def __init__(self): super().__init__(); self.features = _Features()
    def forward(self, a, b): return (self.features(a) - self.features(b)).square().mean()


def test_a_part_with_buffers_inside_a_loss_stays_in_float32():
    loss = _Perceptual()
    a, b = 1000*torch.randn(2, 4).half(), torch.zeros(2, 4).half()
    want = loss(a.float(), b.float())
    assert want > 65504 and same_bits(model_to_half(loss)(a, b).float(), want)


def test_half_comes_out_whether_half_goes_in_by_place_or_by_name():
    class M(_Features):
        def forward(self, x): return super().forward(x)*self.mean.add(1)
    m = model_to_half(M())
    x = torch.randn(2, 4).half()
    assert m(x).dtype == m(x=x).dtype == torch.float16


def test_what_is_no_name_of_a_dtype_is_a_sentence():
    with pytest.raises(ValueError, match=r"\['fp16'\] is not a half precision"): half_dtype(['fp16'])


def test_a_part_that_a_loss_shares_with_the_model_is_named():
    class M(nn.Module):
        def __init__(self): super().__init__(); self.loss = _Perceptual(); self.stage = self.loss.features
        def forward(self, x): return self.stage(x)
    with pytest.raises(ValueError, match='part of a loss'): model_to_half(M())


def test_an_activation_may_be_shared_with_a_loss():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.loss = nn.modules.loss._Loss()
    model.loss.act = model[1]
    assert cast_policy(model)['0.weight'] == torch.float16


@pytest.mark.parametrize('norm', [nn.RMSNorm, nn.LayerNorm])
def test_a_norm_inside_a_loss_hands_on_float32(norm):
    class Loss(nn.modules.loss._Loss):
        def __init__(self): super().__init__(); self.norm, self.lin = norm(4), nn.Linear(4, 4)
        def forward(self, x): return self.lin(self.norm(x)).square().mean()
    loss, x = Loss(), torch.randn(2, 4).half()
    want = loss(x.float())
    assert same_bits(model_to_half(loss)(x).float(), want)


def test_half_comes_out_whatever_stands_before_the_tensor():
    class M(_Features):
        def forward(self, mask, x): return super().forward(x)*self.mean.add(1)
    for mask in (None, torch.ones(2, 1)): assert model_to_half(M())(mask, torch.randn(2, 4).half()).dtype == torch.float16
