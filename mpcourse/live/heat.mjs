// Layers × steps: the share of gradients that became zero, as a heat map; the cell under the cursor as a histogram of
// what is left, with a bar for what became zero: together they are all gradients.
//   data = {name, what, fmt: {name, color, low, tiny, top}, layers, steps, share: [layer][step] (null: no gradient),
//           loss and log2_scale: [step] or null, hists: [layer][step] = [first exponent, count, count, …]}
import { bar, clamp, drag, fill, line, percent, plot, rect, redraw, room, says, slider, sum, ticks, words } from './base.mjs';

const AXIS = [-44, 20];

/** The first step at which a layer's share is above a limit: [step's index or −1] for each layer. */
export const firstAbove = (share, limit) => share.map(row => row.findIndex(v => v !== null && v > limit));

export function mount(root, data) {
  const L = data.layers.length, T = data.steps.length, el = {}, state = { layer: 0, step: 0 }, left = 110, high = 22;
  const set = change => {
    Object.assign(state, change);
    el.layer.set(state.layer);
    el.step.set(state.step);
    draw();
  };
  el.layer = slider('layer', [0, L - 1], 0, i => [data.layers[i]], layer => set({ layer }));
  el.step = slider('step', [0, T - 1], 0, i => [String(data.steps[i])], step => set({ step }));
  fill(root, '.mpx .map{cursor:crosshair;touch-action:none}.mpx .wide output{min-width:9ch}', bar(el.layer.label, el.step.label),
    el.map = plot(L * high + 30, { class: 'map' }), el.says = says(), el.hist = plot(150));

  function draw() {
    const width = room(root), w = (width - left) / T, parts = [];
    data.layers.forEach((name, i) => {
      parts.push(words(left - 6, i * high + 15, name.length > 16 ? `…${name.slice(-15)}` : name, 'end'));
      data.share[i].forEach((v, t) => parts.push(rect(left + t * w, i * high, Math.max(w - .5, .5), high - 1,
        v === null ? 'none' : `color-mix(in srgb, var(--bad) ${(100 * v).toFixed(1)}%, var(--tint, #8883))`)));
    });
    parts.push(rect(left + state.step * w, state.layer * high, w, high - 1, 'none', { stroke: 'var(--fg)', 'stroke-width': 2 }),
      words(left, L * high + 18, `step ${data.steps[0]}`), words(width, L * high + 18, String(data.steps.at(-1)), 'end'));
    el.map.setAttribute('width', width);
    el.map.replaceChildren(...parts);
    drawHist(width);
    const share = data.share[state.layer][state.step], now = `${data.layers[state.layer]}, step ${data.steps[state.step]}`;
    el.says.textContent = `${now}: ${share === null ? 'no gradient' : `${percent(share, 1)} ${data.what}`}.` +
      (data.loss ? ` The loss is ${data.loss[state.step].toPrecision(3)}` : '') +
      (data.log2_scale ? `, the loss scale 2 to the ${data.log2_scale[state.step]}.` : '.');
    el.map.setAttribute('aria-label', `Layers by steps of ${data.name}; the stronger the red, the more is lost. ${el.says.textContent}`);
  }

  function drawHist(width) {
    const [first, ...counts] = data.hists[state.layer][state.step], top = 17, base = 125, fmt = data.fmt, held = sum(counts);
    const zero = data.share[state.layer][state.step] ?? 0, shares = counts.map(n => n / held * (1 - zero));
    const tall = share => share / Math.max(zero, ...shares) * (base - top - 6);
    const x = e => (clamp(e, ...AXIS) - AXIS[0]) * width / (AXIS[1] - AXIS[0]), unit = width / (AXIS[1] - AXIS[0]);
    const parts = [rect(x(fmt.low), top, x(fmt.tiny) - x(fmt.low), base - top, fmt.color, { opacity: .26 }),
      rect(x(fmt.tiny), top, x(fmt.top) - x(fmt.tiny), base - top, fmt.color, { opacity: .1 })];
    shares.forEach((share, i) => {
      const e = first + i;
      if (share && e >= AXIS[0] && e < AXIS[1]) parts.push(rect(x(e) + .5, base - tall(share), Math.max(unit - 1, 1), tall(share), fmt.color));
    });
    if (zero) parts.push(rect(x(fmt.low - 8), base - tall(zero), 4 * unit, tall(zero), 'var(--bad)', { class: 'zero' }));
    parts.push(words(x(fmt.low) - 4, 12, `${data.what}: ${percent(zero, 1)}`, 'end'), words(x(fmt.tiny) + 3, 12, `${fmt.name.toUpperCase()}’s normal numbers`));
    if (width >= 500) parts.push(words(x(fmt.low) + 3, 12, 'subnormal'));
    parts.push(line(0, base, width, base, 'var(--dim)'), ...ticks(...AXIS, width < 500 ? 16 : 8, x, { y: base + 17 }));
    el.hist.setAttribute('width', width);
    el.hist.setAttribute('aria-label', `Histogram of ${held.toLocaleString('en')} gradients that are not zero, over powers of two; ${percent(zero, 1)} ${data.what}`);
    el.hist.replaceChildren(...parts);
  }

  drag(el.map, (px, py) => set({ layer: clamp(Math.floor(py / high), 0, L - 1),
    step: clamp(Math.floor((px - left) / (el.map.clientWidth - left) * T), 0, T - 1) }));
  redraw(root, draw);
  set({});
  return { state, set };
}
