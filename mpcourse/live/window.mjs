// The loss-scale window: recorded gradients under a loss scale 2^k, and what a cast to few bits makes of them.
// Exact: the recorder's bins are cut where the formats' edges are, in every octave.
//   data.what            words for the gradients, before the names of the layers
//   data.bins            bins in an octave; bin = exponent · bins + place
//   data.formats[name]   {color, edges: first bin that survives, is normal, overflows; low, tiny, top: log2 of the limits}
//   data.nets[i]         {name, layers, steps, rows: [step][layer] = [zeros, bin, count, bin, count, …]}
import { asPower, bar, button, clamp, drag, fill, line, make, menu, percent, plot, radios, rect, redraw, room, says,
  slider, sum, ticks, words } from './base.mjs';

export const FATES = ['lost', 'subnormal', 'normal', 'overflow'];

/** What becomes of a bin: 0 lost, 1 subnormal, 2 normal, 3 overflow. */
export const fateOf = (bin, fmt) => fmt.edges.filter(edge => bin >= edge).length;

/** Map exponent → counts of the four fates, under the scale 2^k. */
export function octaves(row, fmt, k, bins) {
  const out = new Map();
  for (let i = 1; i < row.length; i += 2) {
    const bin = row[i] + k * bins, e = Math.floor(bin / bins);
    if (!out.has(e)) out.set(e, [0, 0, 0, 0]);
    out.get(e)[fateOf(bin, fmt)] += row[i + 1];
  }
  return out;
}

/** Entries of each fate under the scale 2^k: [lost, subnormal, normal, overflow]. */
export function fates(row, fmt, k, bins) {
  const out = [0, 0, 0, 0];
  for (const counts of octaves(row, fmt, k, bins).values()) counts.forEach((n, fate) => out[fate] += n);
  return out;
}

/** The largest k in a range under which nothing overflows in any of these rows; the least k if there is none. */
export function largestSafe(rows, fmt, bins, [least, most]) {
  for (let k = most; k > least; k--) if (rows.every(r => !fates(r, fmt, k, bins)[3])) return k;
  return least;
}

const RANGE = [-10, 40], AXIS = [-48, 24];                  // scales of the slider; exponents of the axis
const CSS = `.mpx .pull{cursor:ew-resize;touch-action:pan-y}.mpx .layers [role=radiogroup]{display:grid;gap:.15rem}
.mpx .layers [role=radiogroup]>span,.mpx .layers output{color:var(--dim)}.mpx .layers svg{width:100%;height:.9rem;margin:0}
.mpx .layers label{display:grid;grid-template-columns:1.2rem minmax(6.5rem,11rem) 1fr 9.5rem;gap:.5rem}
.mpx .key{display:inline-block}.mpx .key::before{content:'';display:inline-block;width:.7em;height:.7em;margin:0 .3em 0 .8em;background:var(--c)}
@media(max-width:34rem){.mpx .layers label{grid-template-columns:1.1rem minmax(4rem,8.6rem) 1fr 5.6rem;gap:.35rem}}`;
const colors = fmt => ['var(--dim)', `color-mix(in srgb, ${fmt.color} 45%, transparent)`, fmt.color, 'var(--over)'];

export function mount(root, data) {
  const formats = Object.keys(data.formats), el = {};
  const state = { net: data.nets[0], step: 0, layer: 0, fmt: formats[0], k: 0 };
  const rows = () => state.net.rows[state.step], format = () => data.formats[state.fmt];
  const safe = all => () => set({ k: largestSafe(all ? rows() : [rows()[state.layer]], format(), data.bins, RANGE) });
  el.k = slider('loss scale', RANGE, 0, asPower, k => set({ k }));
  el.k.input.setAttribute('aria-label', 'log2 of the loss scale');
  el.step = slider('training step', [0, 1], 0, i => [state.net.steps[i], `step ${state.net.steps[i]}`], step => set({ step }));
  fill(root, CSS,
    bar(menu('net', data.nets.map(n => n.name), state.net.name, name => choose(data.nets.find(n => n.name === name))),
      radios('cast to', formats.map(f => [f, f.toUpperCase()]), state.fmt, fmt => set({ fmt })), el.step.label),
    bar(el.k.label, button('largest safe, this layer', safe(false)), button('all layers', safe(true))),
    el.plot = plot(190, { class: 'pull' }), el.says = says(), el.layers = make('div', { class: 'layers' }));

  /** Another net has other layers and steps. */
  function choose(net) {
    Object.assign(state, { net, step: 0, layer: net.layers.length - 1 });
    el.step.input.max = net.steps.length - 1;
    el.step.label.hidden = net.steps.length < 2;
    el.bars = net.layers.map(() => [make('svg', { 'aria-hidden': true, preserveAspectRatio: 'none', viewBox: '0 0 100 10' }), make('output')]);
    el.keys = FATES.map(fate => make('span', { class: 'key' }, fate));
    const box = radios(make('span', {}, data.what, ...el.keys), net.layers.map((name, i) => [i, name]), state.layer,
      layer => set({ layer: +layer }));
    box.querySelectorAll('label').forEach((label, i) => label.append(...el.bars[i]));
    el.layers.replaceChildren(box);
    set({});
  }

  function set(change) {
    Object.assign(state, change);
    state.k = clamp(state.k, ...RANGE);
    el.k.set(state.k);
    el.step.set(state.step);
    draw();
  }

  function draw() {
    const fmt = format(), row = rows()[state.layer], f = fates(row, fmt, state.k, data.bins), n = sum(f);
    const part = i => `${f[i].toLocaleString('en')} (${percent(f[i], n)})`;
    drawPlot(fmt, row);
    el.keys.forEach((key, i) => key.style.setProperty('--c', colors(fmt)[i]));
    el.bars.forEach((pair, i) => drawLayer(pair, rows()[i], fmt));
    el.says.textContent = `Of ${n.toLocaleString('en')} non-zero ${data.what} ${state.net.layers[state.layer]}, ${part(0)} are lost, ` +
      `${part(1)} become subnormal, ${part(3)} overflow.` + (row[0] ? ` ${row[0].toLocaleString('en')} more are zero in FP32 already.` : '');
    el.plot.setAttribute('aria-label', `Histogram of gradients over powers of two, and the range of ${state.fmt.toUpperCase()}. ${el.says.textContent}`);
  }

  /** Bars of octaves that move with the scale, the format's window that does not. */
  function drawPlot(fmt, row) {
    const width = room(root), top = 20, base = 160, unit = width / (AXIS[1] - AXIS[0]);
    const x = e => (clamp(e, ...AXIS) - AXIS[0]) * unit, bars = octaves(row, fmt, state.k, data.bins);
    const most = Math.max(...[...bars.values()].map(sum));
    const parts = [rect(x(fmt.low), top, x(fmt.tiny) - x(fmt.low), base - top, fmt.color, { opacity: .26 }),
      rect(x(fmt.tiny), top, x(fmt.top) - x(fmt.tiny), base - top, fmt.color, { opacity: .1 })];
    for (const e of [fmt.low, fmt.top]) if (e > AXIS[0] && e < AXIS[1])
      parts.push(line(x(e), top - 4, x(e), base, fmt.color, { 'stroke-dasharray': '5 3' }));
    for (const [e, counts] of bars) {
      if (e < AXIS[0] || e >= AXIS[1]) continue;
      let y = base;
      counts.forEach((n, fate) => {
        const height = n / most * (base - top - 6);
        y -= height;
        if (n) parts.push(rect(x(e) + .5, y, Math.max(1, unit - 1), Math.max(height, 1), colors(fmt)[fate]));
      });
    }
    const from = Math.max(fmt.low, AXIS[0]), to = Math.min(fmt.top, AXIS[1]);
    parts.push(...ticks(...AXIS, width < 500 ? 16 : 8, x, { y: base + 17 }), line(0, base, width, base, 'var(--dim)'),
      words(x((from + to) / 2), 12, `${state.fmt.toUpperCase()} has these numbers`, 'middle'));
    if (width >= 500) parts.push(words(x(from), 12, 'lost', 'end'), words(x(to) + 4, 12, 'overflow'));
    el.plot.setAttribute('width', width);
    el.plot.replaceChildren(...parts);
  }

  /** One layer as a bar of four parts, and in words where something goes wrong. */
  function drawLayer([svg, out], row, fmt) {
    const f = fates(row, fmt, state.k, data.bins), n = sum(f);
    let at = 0;
    svg.replaceChildren(...f.map((count, fate) => rect((at += 100 * count / n) - 100 * count / n, 0, 100 * count / n, 10, colors(fmt)[fate])));
    out.textContent = [0, 3].filter(i => f[i]).map(i => `${percent(f[i], n)} ${FATES[i]}`).join(', ') || 'nothing lost';
  }

  let held = null;                                          // the histogram itself can be pulled under the window
  drag(el.plot, (x, y, begins) => {
    if (begins) held = [x, state.k];
    else set({ k: held[1] + Math.round((x - held[0]) * (AXIS[1] - AXIS[0]) / el.plot.clientWidth) });
  });
  redraw(root, draw);
  choose(state.net);
  return { set, state, choose };
}
