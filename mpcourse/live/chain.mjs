// A chain of linear layers: the size of activations forward and of gradients backward, with one factor for both or with two.
//   data = {widths: [features of the input, of each layer], tokens: over which the loss takes its mean}
import { asPower, bar, fill, make, minus, plot, radios, rect, redraw, room, says, slider, ticks, words } from './base.mjs';
import { FORMATS } from './formats.mjs';

/** Standard deviation of the weights: 'torch' draws them uniformly, 'unit' leaves them at 1. */
export const RULES = {
  torch: { text: 'torch’s initialization', forward: fan => (3 * fan[0]) ** -.5, backward: fan => (3 * fan[0]) ** -.5 },
  fan_in: { text: '1/√fan-in', forward: fan => fan[0] ** -.5, backward: fan => fan[0] ** -.5 },
  fan_out: { text: '1/√fan-out', forward: fan => fan[1] ** -.5, backward: fan => fan[1] ** -.5 },
  two: { text: 'two factors', forward: fan => fan[0] ** -.5, backward: fan => fan[1] ** -.5 } };

/** log2 of the sizes: forward[i] after layer i, backward[i] of the gradient that arrives there. */
export function sizes(widths, rule, lossGradient) {
  const fans = widths.slice(1).map((out, i) => [widths[i], out]), forward = [0], backward = [lossGradient];
  for (const fan of fans) forward.push(forward.at(-1) + Math.log2(RULES[rule].forward(fan) * fan[0] ** .5));
  for (const fan of fans.toReversed()) backward.unshift(backward[0] + Math.log2(RULES[rule].backward(fan) * fan[1] ** .5));
  return { forward, backward };
}

export function mount(root, data) {
  const state = { rule: 'torch', depth: 8, ratio: 2, scale: 0, fmt: 'e4m3' }, el = {}, width0 = data.widths[0];
  const set = change => { Object.assign(state, change); draw(); };
  const widths = () => Array.from({ length: state.depth + 1 }, (_, i) => width0 * 2 ** (i % 2 ? state.ratio : 0));
  const names = Object.entries(RULES).map(([k, r]) => [k, r.text]);
  fill(root, '', radios('factors', names, state.rule, rule => set({ rule })),
    radios('format', ['fp16', 'e5m2', 'e4m3'].map(n => [n, n.toUpperCase()]), state.fmt, fmt => set({ fmt })),
    bar(slider('layers', [2, 24, 2], state.depth, n => [String(n)], depth => set({ depth })).label,
      slider('every second one wider by', [0, 4], state.ratio, asPower, ratio => set({ ratio })).label,
      slider('loss scale', [-8, 32], state.scale, asPower, scale => set({ scale })).label),
    el.plot = plot(240), el.says = says());

  function draw() {
    const f = FORMATS[state.fmt], [lo, hi] = [-40, 20], width = room(root), left = 34, base = 205, ws = widths();
    const { forward, backward } = sizes(ws, state.rule, state.scale - (state.rule === 'two' ? 0 : Math.log2(data.tokens)));
    const x = i => left + 10 + i * (width - left - 20) / state.depth, y = e => base - (e - lo) / (hi - lo) * (base - 10);
    const band = (a, b, opacity) => rect(left, y(b), width - left, y(a) - y(b), f.color, { opacity });
    const curve = (ks, color, dash) => make('path', { d: ks.map((k, i) => `${i ? 'L' : 'M'}${x(i).toFixed(1)},${y(Math.max(lo, Math.min(hi, k))).toFixed(1)}`).join(''),
      fill: 'none', stroke: color, 'stroke-width': 3, 'stroke-dasharray': dash });
    const [low, tiny, top] = [f.smallest, f.tiny, f.max].map(Math.log2);
    el.plot.setAttribute('width', width);
    el.plot.replaceChildren(band(low, tiny, .26), band(tiny, Math.min(top, hi), .1), ...ticks(lo, hi, 10, y, { x: left - 6 }),
      curve(forward, '#0072B2', ''), curve(backward, '#D55E00', '7 3'),
      words(left + 6, base + 20, `blue: activations; orange, dashed: ${width < 500 ? 'gradients' : 'their gradients; layer by layer'}`));
    const worst = Math.min(...backward), place = worst < low ? 'below everything that the format has' : worst < tiny
      ? 'where it has fewer digits' : 'in its window';
    el.says.textContent = `Activations end at 2 to the ${minus(forward.at(-1).toFixed(1))}, gradients are smallest at 2 to the ` +
      `${minus(worst.toFixed(1))}: ${place}.`;
    el.plot.setAttribute('aria-label', `Sizes over ${state.depth} layers beside the range of ${state.fmt.toUpperCase()}. ${el.says.textContent}`);
  }
  redraw(root, draw);
  draw();
  return { state, set };
}
