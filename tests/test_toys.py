"What holds for the toys: their data and intervals, the loop and its steps"
import builtins, hashlib, math, subprocess, sys

import pytest, torch, torch.nn as nn
from mpcourse import toys
from mpcourse.toys import (ALPHABET, TOYS, Data, accuracy, batches, char_text, cross_entropy, digits, encode_text, evaluate, fit,
                           get_toy, half_pass, plain_step, predict, relu_mlp, train_toy, warmup_cosine, windows)
from mpcourse.zoo import NAMES, captions, cnn, contrastive
from tools.imagenette import imagenette

pytestmark = pytest.mark.library


def sha(t): return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:16]


# data

def test_digits_are_the_same_everywhere():
    d = digits()
    assert (sha(d.train[0]), sha(d.train[1])) == ('61e089afa766583f', '7de9845e8ce023a5')
    assert d.train[0].dtype == torch.float32 and 0 <= d.train[0].min() and d.train[0].max() == 1


def test_digits_split_is_disjoint_and_complete():
    from sklearn.datasets import load_digits
    d = digits()
    parts = [[(tuple(map(round, (x * 16).flatten().tolist())), y.item()) for x, y in zip(*p)] for p in (d.train, d.valid)]
    assert (len(parts[0]), len(parts[1])) == (1437, 360)
    pixels, classes = load_digits(return_X_y=True)
    whole = sorted((tuple(map(round, x)), int(y)) for x, y in zip(pixels.tolist(), classes))
    assert sorted(parts[0] + parts[1]) == whole and not set(parts[0]) & set(parts[1])


def test_text_alphabet_and_split():
    t = char_text(context=16)
    (x, y), (vx, vy) = t.train, t.valid
    assert t.n_out == len(ALPHABET) == len(set(ALPHABET)) == 96
    assert torch.equal(x[1:], y[:-1]) and 0 <= x.min() and x.max() < 96
    assert torch.equal(vx.flatten()[1:][:15], vy.flatten()[:15])
    train_text, valid_text = (''.join(ALPHABET[i] for i in s) for s in (torch.cat([x[::16].flatten()]), vx.flatten()))
    assert valid_text[:2000] not in train_text
    assert 'the' in train_text and (t.note == '' or 'differ' in t.note and sys.version_info[:3] != (3, 11, 7))   # the study's text


def test_text_says_when_it_differs(monkeypatch):
    monkeypatch.setattr(toys, '_topics', lambda: 'another text, ' * 40_000)
    t = char_text()
    assert 'differ' in t.note and t.note in repr(t) and t.note.count('.') <= 3


def test_encode_text_refuses_what_it_does_not_know():
    assert encode_text('\n ~').tolist() == [0, 1, 95]
    with pytest.raises(ValueError, match="'é' is not in the alphabet"): encode_text('é')


def test_windows_are_views():
    ids = torch.arange(20)
    x, y = windows(ids, 4, 3)
    assert x.tolist() == [[i, i+1, i+2, i+3] for i in range(0, 16, 3)] and torch.equal(y, x + 1)
    assert x.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_captions_spell_the_names():
    c = captions()
    assert [''.join(ALPHABET[i] for i in row).strip() for row in c.extra[0]] == NAMES
    (images, names), y = next(batches(c, 8, 1))
    assert images.shape == (8, 1, 8, 8) and names.shape == (10, 5) and y.shape == (8,)


@pytest.mark.parametrize('bs', [1, 64, 1437])
def test_batches_are_shuffled_epochs(bs):
    d, per = digits(), 1437 // bs
    ids = Data('ids', (torch.arange(1437), torch.arange(1437)), d.valid, 10)
    one = torch.cat([y for _, y in batches(ids, bs, per, seed=5)])
    assert len(one.unique()) == per * bs and (bs == 1437 or not torch.equal(one, one.sort().values))
    assert torch.equal(one, torch.cat([y for _, y in batches(ids, bs, per, seed=5)]))
    assert per * bs < 2 or not torch.equal(one, torch.cat([y for _, y in batches(ids, bs, per, seed=6)]))


def test_batches_do_not_touch_the_global_random_state():
    torch.manual_seed(1)
    a = torch.rand(1)
    torch.manual_seed(1)
    list(batches(digits(), 64, 3)), relu_mlp(seed=4)
    assert torch.equal(a, torch.rand(1))


@pytest.mark.parametrize('bs', [0, -1, 1438])
def test_batches_refuse_an_impossible_size(bs):
    with pytest.raises(ValueError, match=f'batch of {bs} .* 1 to 1437'): next(batches(digits(), bs, 1))


def test_batches_cast_floats_and_bytes_but_not_symbols():
    assert next(batches(digits(), 4, 1, dtype=torch.bfloat16))[0].dtype == torch.bfloat16
    assert next(batches(char_text(), 4, 1, dtype=torch.float16))[0].dtype == torch.int64
    photos = Data('p', (torch.full((4, 1), 255, dtype=torch.uint8), torch.zeros(4)), None, 1)
    assert next(batches(photos, 4, 1, dtype=torch.float16))[0].tolist() == [[1.]] * 4


def missing(monkeypatch, name):
    "Make `import name` fail"
    real = builtins.__import__
    def fake(n, *a, **kw):
        if n == name or n.startswith(name + '.'): raise ImportError(f'No module named {n!r}')
        return real(n, *a, **kw)
    monkeypatch.setattr(builtins, '__import__', fake)


def test_missing_extras_are_a_sentence(monkeypatch):
    with monkeypatch.context() as m:
        missing(m, 'sklearn')
        with pytest.raises(ImportError, match=r"pip install scikit-learn"): digits()
    with monkeypatch.context() as m:
        missing(m, 'pydoc_data')
        with pytest.raises(ImportError, match='full standard library'): char_text()
    with monkeypatch.context() as m:
        missing(m, 'fastai')
        with pytest.raises(ImportError, match='pip install fastai'): imagenette()


def test_imagenette_without_a_network(monkeypatch, tmp_path):
    from fastai.data import external
    from urllib.error import URLError
    def fail(url): raise URLError('Name or service not known')
    monkeypatch.setattr(external, 'untar_data', fail)
    with pytest.raises(ConnectionError, match=r'could not be downloaded .*digits\(\)'): imagenette()
    with pytest.raises(ValueError, match='160 and 320, not 100'): imagenette(100)
    with pytest.raises(FileNotFoundError, match='no class folders'): imagenette(path=tmp_path)


def test_imagenette_reads_squares_in_class_order(tmp_path):
    from PIL import Image
    for part, n in (('train', 3), ('val', 1)):
        for k, c in enumerate(('a', 'b')):
            (tmp_path/part/c).mkdir(parents=True)
            for i in range(n): Image.new('RGB' if i else 'L', (30 + 7*i, 20), 100*k).save(tmp_path/part/c/f'{i}.png')
    d = imagenette(12, path=tmp_path)
    assert d.train[0].shape == (6, 3, 12, 12) and d.train[0].dtype == torch.uint8 and d.train[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert d.train[0][3, 0].eq(100).all() and len(imagenette(12, limit=2, path=tmp_path).train[1]) == 2
    assert imagenette(12, limit=2, path=tmp_path).train[1].tolist() == [0, 1]
    assert evaluate(nn.Sequential(nn.Flatten(), nn.Linear(432, 10)), d)['acc'] in (0., .5, 1.)


def test_no_fastai_and_no_torchvision():
    code = "import sys; import mpcourse.toys, mpcourse.failures; print([m for m in ('fastai', 'torchvision', 'sklearn') if m in sys.modules])"
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert out.stdout.strip() == '[]', out.stdout + out.stderr


# models and losses

@pytest.mark.parametrize('name', TOYS)
def test_models_are_seeded(name):
    a, b, c = (TOYS[name].model(seed=s, device='cpu') for s in (3, 3, 4))
    same = lambda m, n: all(torch.equal(p, q) for p, q in zip(m.parameters(), n.parameters()))
    assert same(a, b) and not same(a, c)


@pytest.mark.parametrize('name', TOYS)
def test_device_reaches_data_model_and_loop(name):
    toy = TOYS[name]
    d, m = toy.data(device='meta'), toy.model(seed=0, device='meta')
    assert {t.device.type for t in (*d.train, *d.valid, *d.extra)} == {'meta'} == {p.device.type for p in m.parameters()}
    xb = d.train[0][:4] if not d.extra else (d.train[0][:4], *d.extra)
    assert predict(m, xb).device.type == 'meta'


def test_the_transformer_is_causal():
    m, x = toys.char_transformer().eval(), char_text().train[0][:2].clone()
    before = m(x)
    x[:, 40:] = 5
    after = m(x)
    assert torch.allclose(before[:, :40], after[:, :40], atol=1e-6) and not torch.allclose(before[:, 40:], after[:, 40:])


def test_attention_is_torchs():
    torch.manual_seed(0)
    a, x = toys.Attention(16, 4), torch.randn(2, 7, 16)
    q, k, v = a.qkv(x).view(2, 7, 3, 4, 4).permute(2, 0, 3, 1, 4)
    want = a.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 7, 16))
    assert torch.allclose(a(x), want, atol=1e-6)


def test_contrastive_against_brute_force():
    torch.manual_seed(0)
    pred, y = torch.randn(12, 5), torch.tensor([0, 1, 1, 2, 2, 2, 4, 4, 4, 4, 0, 1])      # no 3
    there = nn.functional.cross_entropy(pred, y)
    back = []
    for k in y.unique():
        p, t = pred[:, k].softmax(0), (y == k).float() / (y == k).sum()
        back.append(sum(t[i] * (t[i].log() - p[i].log()) for i in range(12) if t[i] > 0))
    assert torch.allclose(contrastive(pred, y), (there + sum(back) / len(back)) / 2, atol=1e-5)
    assert abs(contrastive(torch.zeros(20, 10), torch.arange(20) % 10) - math.log(10)) < 1e-5


def test_accuracy_and_cross_entropy_take_leading_axes():
    pred, y = torch.eye(4).expand(2, 4, 4), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]])
    assert accuracy(pred, y) == 5/8
    assert torch.allclose(cross_entropy(pred, y), nn.functional.cross_entropy(pred.reshape(8, 4), y.reshape(8)))


# the loop

def test_fit_is_the_loop_that_one_would_write():
    a, b = relu_mlp(), relu_mlp()
    oa, ob = (torch.optim.SGD(m.parameters(), lr=.1, momentum=.9) for m in (a, b))
    hist, losses = fit(a, batches(digits(), 32, 10), oa), []
    for xb, yb in batches(digits(), 32, 10):
        loss = nn.functional.cross_entropy(b(xb), yb)
        ob.zero_grad(), loss.backward(), ob.step()
        losses.append(loss.item())
    assert hist == {'loss': losses} and all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_fit_hands_the_step_what_it_promises():
    seen = []
    def step(model, xb, yb, opt, loss_func):
        seen.append((model, xb.shape, opt.param_groups[0]['lr'], loss_func, model.training))
        return {'loss': torch.tensor(2.), 'scale': 8} if len(seen) > 1 else torch.tensor(3.)
    m = relu_mlp().eval()
    opt = torch.optim.SGD(m.parameters(), lr=.5)
    hist = fit(m, batches(digits(), 4, 3), opt, 'my loss', step, schedule=lambda i: i)
    assert seen == [(m, (4, 1, 8, 8), .5 * i, 'my loss', True) for i in range(3)]
    assert hist['loss'] == [3, 2, 2] and math.isnan(hist['scale'][0]) and hist['scale'][1:] == [8, 8]


def test_on_step_may_record_and_stop():
    m = relu_mlp()
    def on_step(i, rec):
        rec['i'] = i
        return i == 2
    hist = fit(m, batches(digits(), 4, 100), torch.optim.SGD(m.parameters(), lr=.1), on_step=on_step)
    assert hist['i'] == [0, 1, 2]


def test_fit_refuses_no_batches():
    m = relu_mlp()
    gen = batches(digits(), 4, 1)
    fit(m, gen, torch.optim.SGD(m.parameters(), lr=.1))
    with pytest.raises(ValueError, match='used it up'): fit(m, gen, torch.optim.SGD(m.parameters(), lr=.1))


def test_evaluate_leaves_the_mode_and_judges_in_fp32():
    m, modes = cnn().half(), set()
    m.register_forward_hook(lambda m, i, o: modes.add((m.training, o.dtype, o.requires_grad)))
    got = evaluate(m, digits(), lambda p, y: torch.tensor(p.dtype == torch.float32 and len(p) == 360).float())
    assert m.training and got['loss'] == 1 and modes == {(False, torch.float16, False)}
    evaluate(m.eval(), digits())
    assert not m.training


def test_schedule():
    f = warmup_cosine(50, 10)
    assert [f(i) for i in range(10)] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(f(i) > f(i + 1) > 0 for i in range(10, 49))
    with pytest.raises(ValueError, match='warm-up of 50 steps'): warmup_cosine(50, 50)


# steps

@pytest.mark.parametrize('name', ['relu_mlp', 'cnn', 'two_towers'])
def test_half_pass_in_fp32_is_the_plain_step(name):
    a, b = (train_toy(name, s, steps=4) for s in (plain_step, half_pass(torch.float32)))
    assert a.history == b.history and all(torch.equal(p, q) for p, q in zip(a.model.state_dict().values(), b.model.state_dict().values()))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', TOYS)
def test_half_pass_rounds_gradients_only(name, dtype):
    run = train_toy(name, half_pass(dtype), steps=2)
    norms = {id(p) for m in run.model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    grads = [p.grad for p in run.model.parameters() if id(p) not in norms]
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert all(torch.equal(g, g.to(dtype).float()) for g in grads)
    assert any(not torch.equal(p, p.to(dtype).float()) for p in run.model.parameters())


def test_half_pass_gradient_is_native_halfs():
    a, b = relu_mlp(), relu_mlp().half()
    xb, yb = next(batches(digits(), 16, 1))
    half_pass()(a, xb, yb, torch.optim.SGD(a.parameters(), lr=0.), cross_entropy)
    cross_entropy(b(xb.half()).float(), yb).backward()
    assert all(torch.equal(p.grad, q.grad.float()) for p, q in zip(a.parameters(), b.parameters()))


def test_scale_is_taken_out_exactly():
    grads = []
    for s in (1., 2.**6):
        m = relu_mlp()
        half_pass(torch.bfloat16, s)(m, *next(batches(digits(), 16, 1)), torch.optim.SGD(m.parameters(), lr=0.), cross_entropy)
        grads.append([p.grad for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


# the toys' promises

@pytest.mark.sweep(3)
@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize('name', TOYS)
def test_each_toy_reaches_its_interval(name, seed):
    if name == 'char_lm' and seed: pytest.skip('one seed of the slow one')
    run = train_toy(name, seed=seed)
    assert run.toy.reached(run), run


def test_intervals_exclude_guessing():
    for toy in TOYS.values():
        n = toy.data(device='cpu').n_out
        assert toy.loss[1] < math.log(n) * .7 and toy.acc[0] > 3 / n


def test_training_is_deterministic():
    a, b, c = (train_toy('cnn', seed=s, steps=20) for s in (0, 0, 1))
    assert a.history == b.history != c.history


@pytest.mark.sweep(0)
def test_deep_sigmoid_fails_in_fp16_and_the_others_do_not():
    assert abs(train_toy('deep_sigmoid', half_pass()).loss - math.log(10)) < .02
    for name in ('relu_mlp', 'cnn'):
        run = train_toy(name, half_pass())
        assert run.toy.reached(run), run


def test_unknown_toy_names_the_known():
    with pytest.raises(ValueError, match="no toy 'resnet': there are relu_mlp, deep_sigmoid, char_lm, cnn, two_towers"): get_toy('resnet')
    assert get_toy(TOYS['cnn']) is TOYS['cnn']
