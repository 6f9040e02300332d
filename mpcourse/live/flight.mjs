// The flight simulator: rules for the loss scale go through one recorded training and one storm.
//   data = {name, amax: [largest gradient of each step, without a loss scale], interval, bad: batches at first, start: 16,
//           policies: shown at first}
// A step of the storm is bad in one of three ways: 'loss' (not finite), 'gradients' (NaN although the loss is finite),
// 'large' (gradients 2^20 times as large: a smaller scale avoids the overflow).
import { asNumber, asPower, bar, button, clamp, drag, fill, line, make, plot, power, radios, rect, redraw, room, says, slider,
  table, ticks, words } from './base.mjs';

const TOO_LARGE = 65520, EDGE = 2 ** 13;                    // from here on FP16 overflows; ALS's edge
export const KINDS = { loss: 'loss not finite', gradients: 'loss finite, gradients NaN', large: 'gradients 2²⁰ times as large' };
export const POLICIES = {
  torch: ['#D55E00', '', 'torch: every overflow halves'],
  megatron: ['#0072B2', '7 3', 'Megatron: the second one halves, and those after it'],
  deepspeed: ['#009E73', '2 3', 'DeepSpeed: likewise, raises at scale 1'],
  dynamic: ['#CC79A7', '9 3 2 3', 'DynamicScaler: holds where the loss is not finite'],
  floor: ['#8C6D31', '12 3', 'torch with a floor at 2⁶'],
  metaseq: ['#56B4E9', '6 3', 'metaseq: a window that doubles and halves with the scale'],
  measured: ['#777777', '1 2', 'the first scale for ever: a measured one'],
  als: ['#B04A5A', '4 2', 'ALS: up an octave each step, down at the edge'] };

/** One step of a rule; s = {k: log2 of the scale, clean, left}, t = {bad, lossFinite, size: largest scaled gradient}. */
export const RULES = {
  torch(s, t, interval) {
    s.clean = t.bad ? 0 : s.clean + 1;
    if (t.bad) s.k -= 1;
    if (s.clean === interval) { s.k += 1; s.clean = 0; }
  },
  megatron(s, t, interval) {
    s.clean = t.bad ? 0 : s.clean + 1;
    if (t.bad) s.left -= 1;
    if (t.bad && s.left <= 0) s.k = Math.max(s.k - 1, 0);
    if (s.clean === interval) { s.k += 1; s.clean = 0; s.left = 2; }
  },
  deepspeed(s, t, interval) {                               // true where the original raises
    if (t.bad && s.left > 1) s.left -= 1;
    else if (t.bad && s.k === 0) return true;
    else if (t.bad) s.k = Math.max(s.k - 1, 0);
    s.clean = t.bad ? 0 : s.clean + 1;
    if (s.clean > 1 && (s.clean - 1) % interval === 0) { s.k += 1; s.left = 2; }
  },
  dynamic(s, t, interval) {
    if (!t.lossFinite) return;                              // no scale would have helped
    RULES.torch(s, t, interval);
    s.k = Math.max(s.k, 0);
  },
  floor(s, t, interval) { RULES.torch(s, t, interval); s.k = Math.max(s.k, 6); },
  metaseq(s, t, interval) {
    s.since = t.bad ? 0 : s.since + 1;
    if (t.bad && s.k - 1 >= -5) s.k -= 1;
    if (t.bad) s.window = Math.max(Math.floor(s.window / 2), 1);
    else if (s.since % s.window === 0) { s.k += 1; s.window *= 2; }
  },
  measured() {},
  als(s, t) {                                               // under ten million gradients one above the edge is too many
    if (!t.lossFinite) return;
    s.k = clamp(s.k + (t.bad || t.size >= EDGE ? -1 : 1), 0, 127);
  } };

/** Fly one rule through amax and storm (Map step → kind): {scales: log2 before each step, skipped, own, stopped}. */
export function fly(name, amax, storm, start, interval) {
  const s = { k: start, clean: 0, left: 2, since: 0, window: interval }, out = { scales: [], skipped: 0, own: 0, stopped: null };
  for (let i = 0; i < amax.length; i++) {
    const kind = storm.get(i), size = amax[i] * 2 ** (s.k + (kind === 'large' ? 20 : 0));
    const doomed = kind === 'loss' || kind === 'gradients', bad = doomed || !(size < TOO_LARGE);
    out.scales.push(s.k);
    out.skipped += bad;
    out.own += bad && !doomed;
    if (RULES[name](s, { bad, lossFinite: kind !== 'loss', size }, interval)) { out.stopped = i; break; }
  }
  return out;
}

export function mount(root, data) {
  const n = data.amax.length, storm = new Map(), el = {}, colors = { loss: 'var(--bad)', gradients: 'var(--over)', large: '#E69F00' };
  const state = { start: data.start ?? 16, interval: data.interval, row: data.bad || 10, at: Math.floor(n / 4), kind: 'loss', shown: new Set(data.policies) };
  let flights = {};
  const set = change => { Object.assign(state, change); draw(); };
  const add = () => { for (let t = state.at; t < Math.min(n, state.at + state.row); t++) storm.set(t, state.kind); draw(); };
  const box = name => {
    const input = make('input', { type: 'checkbox', checked: state.shown.has(name) });
    input.addEventListener('input', () => { state.shown[input.checked ? 'add' : 'delete'](name); draw(); });
    return make('label', {}, input, make('span', { 'aria-hidden': true, style: `color:${POLICIES[name][0]}` }, '■'), POLICIES[name][2]);
  };
  fill(root, '.mpx .storm{cursor:cell;touch-action:none}',
    bar(...Object.keys(POLICIES).map(box)),
    bar(slider('first scale', [0, 32], state.start, asPower, start => set({ start })).label,
      slider('clean steps until it grows', [10, 1000, 10], state.interval, asNumber, interval => set({ interval })).label),
    bar(slider('bad batches', [1, 60], state.row, asNumber, row => state.row = row).label,
      slider('from step', [0, n - 1], state.at, asNumber, at => state.at = at).label),
    bar(radios('each with', Object.entries(KINDS), state.kind, kind => state.kind = kind),
      button('add them', add), button('no bad batches', () => { storm.clear(); draw(); })),
    el.plot = plot(210), el.paint = plot(46, { class: 'storm', 'aria-label': 'paint bad batches with the pointer' }),
    el.says = says(), el.table = make('div'));

  function draw() {
    flights = Object.fromEntries(Object.keys(POLICIES).filter(p => state.shown.has(p)).map(p => [p, fly(p, data.amax, storm, state.start, state.interval)]));
    drawPlot();
    const rows = Object.entries(flights).map(([name, f]) => [
      [make('span', { 'aria-hidden': true, style: `color:${POLICIES[name][0]}` }, '■ '), POLICIES[name][2]],
      power(Math.min(...f.scales)), f.stopped === null ? power(f.scales.at(-1)) : [`gave up at ${f.stopped}`], f.skipped, f.own]);
    el.table.replaceChildren(table(['policy', 'lowest', 'last', 'steps lost', 'by its own scale'], rows));
    const name = p => POLICIES[p][2].split(':')[0];
    const ends = Object.entries(flights).map(([p, f]) => f.stopped === null ? `${name(p)} at 2 to the ${f.scales.at(-1)}` : `${name(p)} gave up at step ${f.stopped}`);
    el.says.textContent = `${storm.size} bad batches in ${n} steps of ${data.name}. In the end: ${ends.join(', ')}.`;
    el.plot.setAttribute('aria-label', `Loss scales over ${n} steps. ${el.says.textContent}`);
  }

  const left = 30;
  function drawPlot() {
    const width = room(root), top = 8, base = 195, all = Object.values(flights).flatMap(f => f.scales);
    const lo = Math.min(0, ...all) - 1, hi = Math.max(8, ...all) + 1;
    const x = t => left + t / n * (width - left), y = k => base - (k - lo) / (hi - lo) * (base - top);
    const every = [1, 2, 4, 8, 16, 32, 64].find(d => (hi - lo) / d <= 7), parts = ticks(lo, hi, every, y, { x: left - 6 });
    for (let k = Math.ceil(lo / every) * every; k <= hi; k += every) parts.push(line(left, y(k), width, y(k), 'var(--dim)', { opacity: .25 }));
    Object.keys(flights).forEach(name => {
      const at = k => y(k).toFixed(1), [color, dash] = POLICIES[name];
      const d = flights[name].scales.map((k, t) => t ? `H${x(t).toFixed(1)}V${at(k)}` : `M${left},${at(k)}`).join('');
      parts.push(make('path', { d: d + `H${x(flights[name].scales.length).toFixed(1)}`, fill: 'none', stroke: color,
        'stroke-width': 2, 'stroke-dasharray': dash }));
    });
    el.plot.replaceChildren(...parts);
    el.paint.replaceChildren(rect(left, 2, width - left, 26, 'var(--dim)', { opacity: .15 }),
      ...[...storm].map(([t, kind]) => rect(x(t), 2, Math.max(1, x(1) - x(0)), 26, colors[kind])),
      words(left, 42, 'paint bad batches here'), words(width, 42, `step ${n}`, 'end'));
    for (const svg of [el.plot, el.paint]) svg.setAttribute('width', width);
  }

  let brush = null;                                         // the first step of a stroke decides: paint, or wipe away
  drag(el.paint, (px, py, begins) => {
    const t = clamp(Math.floor((px - left) / (el.paint.clientWidth - left) * n), 0, n - 1);
    if (begins) brush = { last: t, paints: !storm.has(t) };
    for (let i = Math.min(t, brush.last); i <= Math.max(t, brush.last); i++) brush.paints ? storm.set(i, state.kind) : storm.delete(i);
    brush.last = t;
    draw();
  });
  redraw(root, draw);
  data.bad ? add() : draw();
  return { state, storm, draw, flights: () => flights };
}
