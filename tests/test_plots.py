"Chapter 00: histograms that drop nothing, bands where they belong, widgets whose errors are sentences"
import json
import re
from types import SimpleNamespace

import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import pytest
import torch

from mpcourse import plots as P
from mpcourse.formats import fp16

pytestmark = pytest.mark.library


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_log2_hist_counts_like_brute_force(dtype):
    x = (torch.randn(2000, generator=torch.Generator().manual_seed(0))*2.**torch.randint(-12, 8, (2000,)).float()).to(dtype)
    x[:5] = torch.tensor([0., -0., torch.inf, -torch.inf, torch.nan]).to(dtype)
    h = P.log2_hist(x.view(40, 50))
    assert (h.n_zero, h.n_nonfinite, h.total) == (int((x == 0).sum()), 3, 2000)
    for e,c in zip(h.exponents.tolist(), h.counts.tolist()):
        a = x.double().abs(); assert c == int(((a >= 2.**e) & (a < 2.**(e + 1))).sum())


def test_log2_hist_of_nothing_and_of_zeros():
    assert P.log2_hist(torch.empty(0)).total == 0 and P.log2_hist(torch.zeros(3)).n_zero == 3
    assert P.plot_log2_hist(P.log2_hist(torch.zeros(3))) is not None; plt.close('all')


def test_band_lies_where_the_format_ends():
    ax = plt.subplots()[1]; P.log2_axis(ax); P.format_band(ax, fp16)
    xs = sorted(line.get_xdata()[0] for line in ax.lines)
    assert xs == [2.**-24, 65504.] and [t.get_text() for t in ax.texts] == ['fp16']
    ax = plt.subplots()[1]; P.format_band(ax, fp16, axis='y', scale=2.**10, label=False)
    assert sorted(line.get_ydata()[0] for line in ax.lines) == [2.**-34, 65504/2**10] and not ax.texts
    plt.close('all')


def test_ticks_are_powers_of_two():
    ax = plt.subplots()[1]; ax.plot([2.**-20, 2.**12], [1, 1]); P.log2_axis(ax, every=4); ax.figure.canvas.draw()
    labels = [t.get_text() for t in ax.get_xticklabels()]
    assert '$2^{-20}$' in labels and '$2^{-16}$' in labels and all(re.fullmatch(r'\$2\^\{-?\d+\}\$', t) for t in labels if t)
    plt.close('all')


def show(k, unit='m'):
    if k > 3: raise ValueError(f'{k} is <too> much: take 3 or less.')
    return f'<b>{k*k}{unit}</b>'


def test_explore_updates_and_says_errors():
    e = P.explore(show, k=(1, 5), unit=['m', 's'])
    e.controls['k'].value = 2; e.controls['unit'].value = 's'
    assert e.out.value == '<b>4s</b>' and e.values == dict(k=2, unit='s')
    e.controls['k'].value = 4
    assert 'role="alert"' in e.out.value and '4 is &lt;too&gt; much' in e.out.value
    e.controls['k'].value = 3; assert e.out.value == '<b>9s</b>'


def test_other_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError): P.explore(lambda k: 1/0, k=(1, 2))
    with pytest.raises(ValueError, match="control for 'k'"): P.explore(show, k=object())


def test_explore_shows_figures_and_closes_them():
    def draw(k):
        ax = plt.subplots()[1]; ax.plot([0, k]); return [ax, f'<p>{k}</p>']
    e = P.explore(draw, alt='a "line"', k=(1, 3)); first = e.out.value
    assert 'data:image/png;base64,' in first and 'alt="a &quot;line&quot;"' in first and first.endswith('<p>2</p>')
    e.controls['k'].value = 3; assert e.out.value != first and not plt.get_fignums()


def test_a_page_carries_every_frame(monkeypatch):
    e = P.explore(show, pages=dict(k=[1, 2, 4], unit=['m', 's']), k=(1, 5), unit=['m', 's'])
    e.controls['k'].value = 2
    assert 'text/html' not in e._repr_mimebundle_()
    monkeypatch.setenv('MPCOURSE_PAGES', '1')
    bundle = e._repr_mimebundle_(); page = bundle['text/html']
    assert 'application/vnd.jupyter.widget-view+json' in bundle
    data = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)[1].replace('<\\/', '</'))
    shown = [data['frames'][i] for i in data['index']]
    assert shown[:4] == ['<b>1m</b>', '<b>1s</b>', '<b>4m</b>', '<b>4s</b>'] and '4 is' in shown[4] and shown[4] == shown[5]
    assert len(data['frames']) == 5 and page.count('data-k') >= 2 and '<select' in page and 'value="1"' in page


def test_style_and_colors():
    P.use_style(); assert plt.rcParams['figure.constrained_layout.use']
    assert len({P.fmt_color(n) for n in P.COLORS}) == len(P.COLORS) and P.fmt_color('e9m9') == P.fmt_color('e9m9')


def test_any_object_with_limits_makes_a_band():
    ax = plt.subplots()[1]
    assert P.format_band(ax, SimpleNamespace(name='x', max=4., tiny=1., smallest_subnormal=.5)) is ax; plt.close('all')
