"""Schemes, comparisons in pairs that go on where they stopped, and what they say of a scheme"""
import json, math

import pytest, torch
from torch import nn

from mpcourse.compare import (SCHEMES, Training, compare_schemes, compare_html, lost_share, plot_shares, summary, toy_training,
                              train_scheme, verdict, verdicts)
from mpcourse.toys import plain_step, train_toy

pytestmark = pytest.mark.library


def small(seed): return toy_training('relu_mlp', seed, 30)


@pytest.mark.parametrize('name', SCHEMES)
def test_every_scheme_trains(name):
    got = train_scheme(name, small(0))
    slow = 'FP16 Megatron', 'FP16 weights', 'E4M3 no scale'        # they lose steps, or gradients
    assert got['before'] > 2 and (name in slow or got['score'] < got['before'] - .1)
    assert (got['skipped'] > 10) == (name == 'FP16 Megatron')


def test_an_unknown_scheme_is_refused_before_anything_is_trained(tmp_path):
    for call in (lambda: train_scheme('magic', small(0)), lambda: compare_schemes(small, ['BF16', 'magic'], 1, tmp_path/'x')):
        with pytest.raises(ValueError, match="no scheme 'magic': there are FP32"): call()
    assert not (tmp_path/'x').exists()


def test_fp32_is_the_plain_training():
    run = train_toy('relu_mlp', plain_step, 1, steps=30)
    t = toy_training('relu_mlp', 1, 30)
    train_scheme('FP32', t)
    assert all(torch.equal(p, q) for p, q in zip(t.model.parameters(), run.model.parameters()))


def test_without_a_score_the_training_loss_counts():
    t = small(0)
    losses, inner = [], t.loss_func
    def seen(pred, y):
        losses.append(inner(pred, y))
        return losses[-1]
    t.score, t.loss_func = None, seen
    got = train_scheme('FP32', t)
    assert got['before'] == losses[0].item() and math.isclose(got['score'], sum(losses[-20:]).item()/20, rel_tol=1e-5)


def test_weights_of_sixteen_bits_stay_so():
    for name, dtype in (('FP16 weights', torch.float16), ('BF16 weights Kahan', torch.bfloat16)):
        t, dtypes = small(0), []
        inner = t.batches
        def look():
            for b in inner():
                dtypes.append({p.dtype for p in t.model.parameters()})
                yield b
        t.batches = look
        train_scheme(name, t)
        assert dtypes == [{dtype}]*30


def test_a_readout_is_kept():
    t = small(0)
    SCHEMES['NVFP4 readout in FP32'](t)
    assert len(t.model.not_converted) == 1 and t.model.not_converted.popitem()[0] == [n for n, m in t.model.named_modules() if isinstance(m, nn.Linear)][-1]


def test_pairs_have_the_same_weights_and_batches(tmp_path):
    seen = {}
    def make(seed):
        t = small(seed)
        seen.setdefault(seed, []).append((t.model[1].weight.clone(), next(t.batches())[0]))
        return t
    compare_schemes(make, ['FP32 rounded once', 'BF16'], 2)
    for pairs in seen.values(): assert len(pairs) == 3 and all(torch.equal(a, b) for p in pairs for a, b in zip(p, pairs[0]))
    assert not torch.equal(seen[0][0][0], seen[1][0][0])


def test_an_interrupted_comparison_goes_on(tmp_path):
    made = []
    def stop(seed):
        if len(made) == 3: raise KeyboardInterrupt
        made.append(seed)
        return small(seed)
    def go(seed):
        made.append(seed)
        return small(seed)
    file = tmp_path/'runs'
    with pytest.raises(KeyboardInterrupt): compare_schemes(stop, ['BF16'], 2, file)
    got = compare_schemes(go, ['BF16'], 2, file)
    assert made == [0, 0, 1, 1] and [(r['scheme'], r['seed']) for r in got] == [('FP32', 0), ('FP32', 1), ('BF16', 0), ('BF16', 1)]
    assert compare_schemes(go, ['BF16'], 2, file) == got == compare_schemes(go, ['BF16'], 2) and len(made) == 8
    assert len(file.read_text().splitlines()) == 4


def test_a_net_that_a_scheme_refuses(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(64, 10, batch_first=True)
        def forward(self, x): return self.rnn(x.flatten(1)[:, None])[0][:, -1]
    def make(seed):
        t = small(seed)
        t.model = Recurrent()
        return t
    file = tmp_path/'runs'
    got = compare_schemes(make, ['E4M3 per tensor'], 1, file)
    assert got[1]['refused'].startswith('ValueError: ') and 'in one piece' in got[1]['refused'] and got[1]['score'] is None and json.loads(file.read_text().splitlines()[1]) == got[1]
    assert summary(got)['E4M3 per tensor'] == dict(verdict='refuses', score=None, skipped=None)


def test_an_error_of_the_training_is_no_refusal():
    def make(seed):
        t = small(seed)
        def loss(pred, y): raise ValueError('mine')
        t.loss_func = loss
        return t
    with pytest.raises(ValueError, match='mine'): compare_schemes(make, ['BF16'], 1)


@pytest.mark.parametrize('shares, says', [
    ([-.01, .01]*3, 'tie'), ([-.1, .1]*3, 'open'), ([0., .01, .01, .01, .01, .01], 'tie'), ([.01]*6, '+1.0%'), ([-.02]*10, '-2.0%'), ([.0009]*10, 'tie'), ([.0002]*9 + [.03], 'open'), ([.01]*5, 'open'), ([.1, -.1], 'open'),
    ([.6, -.1], 'fails 1/2'), ([.5, 0.], 'fails 1/2'), ([math.nan, .1], 'fails 1/2'), ([math.inf]*3, 'fails 3/3'), ([None]*6, 'refuses')])
def test_verdict(shares, says): assert verdict(shares) == says


def test_shares_are_of_the_same_seed():
    rows = [dict(scheme=s, seed=i, before=10., score=v, skipped=i, refused='') for s, vs in dict(FP32=(2., 4.), a=(6., 1.)).items() for i, v in enumerate(vs)]
    assert verdicts(rows) == dict(FP32=[0, 0], a=[.5, -.5]) and lost_share(10., 10., 2.) == 1
    assert all(math.isnan(lost_share(5., 2., fp32)) for fp32 in (2., 3., math.nan)), 'FP32 learnt nothing: no scheme is better than that'
    assert summary(rows) == dict(FP32=dict(verdict='', score=3., skipped=.5), a=dict(verdict='fails 1/2', score=3.5, skipped=.5))


def test_a_training_of_ones_own():
    def make(seed):
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 4, generator=gen)
        torch.manual_seed(seed)
        return Training(nn.Linear(4, 1), lambda ps: torch.optim.SGD(ps, .1), nn.functional.mse_loss, lambda: [(x, x.sum(1, keepdim=True))]*40)
    got = summary(compare_schemes(make, ['FP16 scale 1', 'BF16 weights'], 6))
    assert got['FP32']['score'] < .1 and got['FP16 scale 1']['verdict'] != 'fails 6/6'


def test_a_score_is_of_a_model_in_evaluation_mode():
    t, modes = small(0), []
    t.score = lambda model: modes.append(model.training) or 0.
    train_scheme('FP32', t)
    assert modes == [False, False] and t.model is not None


def test_a_broken_line_of_a_store_is_named(tmp_path):
    file = tmp_path/'runs'
    compare_schemes(small, ['BF16'], 1, file)
    file.write_text(file.read_text()[:-9])
    with pytest.raises(ValueError, match='broken line'): compare_schemes(small, ['BF16'], 1, file)


# --- pictures ---

def test_a_dot_for_each_seed_and_a_cross_for_no_number():
    ax = plot_shares(dict(fine=[.01, -.01], lost=[.7, math.nan, 9.], none=[None, .1], untried=()))
    dots = [(l.get_xdata()[0], l.get_ydata()[0], l.get_marker(), l.get_color()) for l in ax.lines if l.get_marker() != 'None']
    blue, red = dots[0][3], dots[2][3]
    assert dots == [(.01, 0, 'o', blue), (-.01, 0, 'o', blue), (.7, 1, 'o', red), (1.2, 1, 'x', red), (1.2, 1, 'o', red)]
    assert blue != red and [t.get_text() for t in ax.texts] == ['refuses'] and ax.texts[0].get_position() == (0, 2)
    assert [t.get_text() for t in ax.get_yticklabels()] == ['fine', 'lost', 'none', 'untried']
    assert ax.get_ylim()[0] > ax.get_ylim()[1]              # the first row is on top
    assert len(ax.patches) == 1 and ax.patches[0].get_x() == .5


def test_a_comparison_has_a_page():
    rows = [dict(scheme=s, seed=i, before=2., score=1. + d, skipped=0, refused='') for s, d in (('FP32', 0.), ('<b>', .2)) for i in range(6)]
    page = compare_html(rows)
    assert '<table' in page and 'src="data:image/png' in page and '+20.0%' in page and '&lt;b&gt;' in page
