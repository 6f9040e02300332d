// w + u on the number line: a weight, an update, and the numbers that a format has there.
//   data = {fmt, w, k, mode}: at first; the update is 2^k
import { asPower, bar, button, fill, line, make, menu, minus, percent, plot, powerText, radios, random, redraw, room,
  says, slider, words } from './base.mjs';
import { FORMATS, cast, exponentOf, shown, spacing } from './formats.mjs';

/** `steps` updates, each rounded; `lots` gives random numbers, or is null for rounding to nearest. */
export function walk(w, u, steps, f, lots = null) {
  for (let i = 0; i < steps; i++) w = cast(w + u, f, lots && lots());
  return w;
}

export function mount(root, data) {
  const names = ['fp16', 'bf16', 'e4m3'], el = {};
  const state = { fmt: data.fmt, w: data.w, k: data.k, mode: data.mode, taken: 0 };
  const lots = random(1), f = () => FORMATS[state.fmt], start = () => cast(state.first, f());
  state.first = data.w;
  const again = change => { Object.assign(state, change); Object.assign(state, { w: start(), taken: 0 }); draw(); };
  const take = n => () => {
    state.w = walk(state.w, 2 ** state.k, n, f(), state.mode === 'stochastic' ? lots : null);
    state.taken += n;
    draw();
  };
  fill(root, '',
    bar(radios('format', names.map(n => [n, n.toUpperCase()]), state.fmt, fmt => again({ fmt })),
      radios('rounded', [['nearest', 'to nearest'], ['stochastic', 'stochastically']], state.mode, mode => again({ mode }))),
    bar(slider('first weight', [0, 4, .125], state.first, x => [shown(x)], first => again({ first })).label,
      slider('update', [-16, -1], state.k, asPower, k => again({ k })).label),
    bar(button('one step', take(1)), button('a hundred steps', take(100)), button('back', () => again({}))),
    el.plot = plot(120), el.says = says());

  function draw() {
    const w = state.w, u = 2 ** state.k, width = room(root), step = spacing(w, f()), half = Math.max(2.6 * step, 1.5 * u);
    const target = start() + state.taken * u, x = v => width * (.5 + (v - w) / (2 * half)), parts = [];
    parts.push(line(0, 70, width, 70, 'var(--dim)'));
    let marks = 0;
    for (let v = cast(w - half, f()); v <= w + half && marks < 400; v += spacing(v, f()), marks++)
      if (x(v) >= 0) parts.push(line(x(v), 58, x(v), 82, f().color, { 'stroke-width': 2 }));
    const to = cast(w + u, f());
    parts.push(make('circle', { cx: x(w), cy: 70, r: 7, fill: f().color }), words(x(w), 104, ['w = ', shown(w)], 'middle'),
      line(x(w), 40, x(w + u), 40, 'var(--bad)', { 'stroke-width': 3 }),
      make('path', { d: `M${x(w + u)},34l9,6l-9,6z`, fill: 'var(--bad)' }),
      words(x(w + u) + 12, 44, ['w + ', ...powerText(state.k)]));
    if (state.mode === 'nearest') parts.push(make('circle', { cx: x(to), cy: 70, r: 11, fill: 'none', stroke: 'var(--bad)', 'stroke-width': 2 }));
    if (Math.abs(target - w) <= half) parts.push(line(x(target), 12, x(target), 82, 'var(--fg)', { 'stroke-dasharray': '3 3' }));
    el.plot.setAttribute('width', width);
    el.plot.replaceChildren(...parts);
    const share = u / step, chance = percent(Math.min(share, 1), 1);
    const one = state.mode === 'stochastic' && share < 1 ? `One step moves the weight with a chance of ${chance}.`
      : to === w ? 'The update is swallowed: w + u is w.' : `The next step goes to ${shown(to)}.`;
    el.says.textContent = `The numbers are ${shown(step)} apart above w. ${one} ` + (state.taken ? `After ${state.taken} ${state.taken > 1 ? 'steps' : 'step'} the weight ` +
      `moved by ${shown(w - start())}; in FP32 it would have moved by ${shown(state.taken * u)}.` : '');
    el.plot.setAttribute('aria-label', `The numbers of ${state.fmt.toUpperCase()} around the weight. ${el.says.textContent}`);
  }
  redraw(root, draw);
  again({});
  return { state, draw };
}
