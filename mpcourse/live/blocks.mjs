// Blocks and outliers: one number grows; with one scale for all its neighbours lose their digits, with blocks only its block does.
//   data = {x: numbers, at: the one that grows, fmt: 'e4m3', block: all, k: 4: what is chosen at first,
//           rotates: is there a choice to rotate each 16 before the cast, and back after it?}
import { asPower, bar, fill, line, make, percent, plot, radios, rect, redraw, room, says, slider, ticks, words } from './base.mjs';
import { FORMATS, cast, exponentOf } from './formats.mjs';

/** Each 16 numbers times a Hadamard matrix of ±1/4, with the signs of chapter 28: one number becomes sixteen of one size. */
const SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1];
const hadamard = xs => xs.map((_, i) => {
  let total = 0;
  for (let j = 0; j < 16; j++) {
    let both = i % 16 & j, odd = 0;                         // the entry is −1 where i and j share an odd number of bits
    for (; both; both >>= 1) odd ^= both & 1;
    total += (odd ? -1 : 1) * xs[i - i % 16 + j];
  }
  return total / 4;
});
export const rotate = xs => hadamard(xs.map((x, i) => x * SIGNS[i % 16]));
export const rotateBack = ys => hadamard(ys).map((y, i) => y * SIGNS[i % 16]);

/** Cast numbers in blocks of n; the largest of each block gets the format's largest number. Rotated: each 16 before, and back after. */
export function castBlocks(xs, f, n, rotated = false) {
  const out = [], numbers = rotated ? rotate(xs) : xs;
  for (let i = 0; i < xs.length; i += n) {
    const block = numbers.slice(i, i + n), amax = Math.max(...block.map(Math.abs)), scale = amax ? amax / f.max : 1;
    const few = block.map(x => cast(x / scale, f, null, true));
    out.push(...(rotated ? rotateBack(few) : few).map(q => q * scale));
  }
  return out;
}

/** Lost (non-zero before, zero after), and the error of all but one number, relative to their size. */
export function harm(xs, ys, but) {
  let lost = 0, error = 0, size = 0;
  xs.forEach((x, i) => {
    if (i === but) return;
    lost += x !== 0 && ys[i] === 0;
    error += (ys[i] - x) ** 2;
    size += x ** 2;
  });
  return { lost, error: Math.sqrt(error / size) };
}

export function mount(root, data) {
  const all = data.x.length, state = { fmt: data.fmt ?? 'e4m3', block: data.block ?? all, k: data.k ?? 4, rotated: 'no' }, el = {};
  const set = change => { Object.assign(state, change); draw(); };
  const numbers = () => data.x.map((x, i) => i === data.at ? x * 2 ** state.k : x);
  fill(root, '',
    bar(radios('format', ['e4m3', 'e5m2', 'e2m1'].map(n => [n, n.toUpperCase()]), state.fmt, fmt => set({ fmt })),
      radios('a scale for', [[all, `all ${all}`], [32, 'each 32'], [16, 'each 16']], state.block, n => set({ block: +n })),
      ...data.rotates ? [radios('rotate each 16', [['no', 'no'], ['yes', 'before the cast, and back after it']], 'no', rotated => set({ rotated }))] : []),
    bar(slider('the outlier is larger by', [0, 24], state.k, asPower, k => set({ k })).label),
    el.plot = plot(230), el.says = says());

  function draw() {
    const f = FORMATS[state.fmt], xs = numbers(), ys = castBlocks(xs, f, state.block, state.rotated === 'yes');
    const width = room(root), left = 34, base = 200;
    const lo = -8, hi = Math.max(6, exponentOf(Math.abs(xs[data.at])) + 2), unit = (width - left) / xs.length, parts = [];
    const y = e => base - (e - lo) / (hi - lo) * (base - 10), level = x => x ? Math.max(lo, Math.log2(Math.abs(x))) : lo;
    parts.push(...ticks(lo, hi, Math.ceil((hi - lo) / 8), y, { x: left - 6 }), line(left, base, width, base, 'var(--dim)'));
    for (let b = state.block; b < xs.length; b += state.block)
      parts.push(line(left + b * unit, 0, left + b * unit, base, 'var(--dim)', { 'stroke-dasharray': '3 4' }));
    xs.forEach((x, i) => {
      const gone = x !== 0 && ys[i] === 0, at = left + i * unit;
      parts.push(rect(at + unit * .15, y(level(x)), unit * .7, base - y(level(x)), gone ? 'none' : f.color,
        gone ? { class: 'gone', stroke: 'var(--bad)' } : { opacity: .6 }));
      if (!gone) parts.push(line(at, y(level(ys[i])), at + unit, y(level(ys[i])), 'var(--fg)', { 'stroke-width': 2 }));
    });
    parts.push(words(left, base + 20, width < 500 ? 'bars: numbers; lines: their casts; hollow: zero'
      : 'bars: the numbers; lines: what the cast makes of them; hollow, red: zero'));
    el.plot.setAttribute('width', width);
    el.plot.replaceChildren(...parts);
    const { lost, error } = harm(xs, ys, data.at);
    el.says.textContent = `Beside the outlier, ${lost} of ${all - 1} numbers become zero (${percent(lost, all - 1)}), and the others are ` +
      `together off by ${(100 * error).toPrecision(2)} % of their size.`;
    el.plot.setAttribute('aria-label', `${all} numbers and their casts to ${state.fmt.toUpperCase()}. ${el.says.textContent}`);
  }
  redraw(root, draw);
  draw();
  return { state, set };
}
