// What all explorables share: elements, controls with names, a style, a log2 axis. No dependency.

const SVG = 'http://www.w3.org/2000/svg', IS_SVG = /^(svg|g|rect|line|text|tspan|path|circle)$/;
// JupyterLab takes the arrow keys, and others, from every element that does not carry this attribute itself
const IS_CONTROL = /^(input|select|button)$/;

/** An element with attributes and children; an attribute that is false or undefined is left out. */
export function make(name, attrs = {}, ...children) {
  const el = IS_SVG.test(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, v] of Object.entries(attrs))
    if (v !== undefined && v !== false) el.setAttribute(key, v === true ? '' : v);
  if (IS_CONTROL.test(name)) el.setAttribute('data-lm-suppress-shortcuts', 'true');
  el.append(...children.flat());
  return el;
}

export const minus = k => String(k).replace('-', '−');
/** 2 to the k, for html and for an svg text. */
export const power = k => ['2', make('sup', {}, minus(k))];
export const powerText = k => ['2', make('tspan', { dy: -5, 'font-size': 9 }, minus(k))];
export const sum = xs => xs.reduce((a, b) => a + b, 0);
export const clamp = (x, lo, hi) => Math.max(lo, Math.min(hi, x));

/** A share as text: nothing that exists becomes 0 %, nothing that lacks something 100 %. */
export function percent(n, total) {
  const p = 100 * n / total;
  if (!n || n === total) return `${n ? 100 : 0} %`;
  if (p < .1) return 'under 0.1 %';
  return p > 99.9 ? 'over 99.9 %' : `${p.toFixed(p < 10 || p > 90 ? 1 : 0)} %`;
}

/** Random numbers in [0, 1) that are the same on every page: mulberry32. */
export function random(seed) {
  return () => {
    seed = seed + 0x6D2B79F5 | 0;
    let t = Math.imul(seed ^ seed >>> 15, 1 | seed);
    t = t + Math.imul(t ^ t >>> 7, 61 | t) ^ t;
    return ((t ^ t >>> 14) >>> 0) / 4294967296;
  };
}

const STYLE = `[data-jp-theme-light=false] .mpx{color-scheme:dark}
.mpx{--fg:var(--ink,light-dark(#1d2530,#dfe5ec));--dim:var(--soft,light-dark(#5b6675,#a3afbd));
 --bad:light-dark(#b3261e,#ff8a80);--over:light-dark(#7a1fa2,#d9a3f5);--mark:var(--accent,#0b5fa5);
 font:.9rem/1.45 var(--sans,system-ui,sans-serif);color:var(--fg);border:1px solid var(--line,#8886);
 border-radius:6px;padding:.8rem .9rem;margin:.4rem 0 1rem}
.mpx .bar{display:flex;flex-wrap:wrap;gap:.45rem 1.2rem;align-items:center}
.mpx label:not([hidden]){display:inline-flex;gap:.45rem;align-items:center;min-height:1.6rem}
.mpx [hidden]{display:none}.mpx label.wide{flex:1 1 15rem}.mpx input[type=range]{flex:1;min-width:6rem;accent-color:var(--mark)}
.mpx output{min-width:4.5ch;font-variant-numeric:tabular-nums}.mpx sup{line-height:0}
.mpx [role=radiogroup]{display:flex;flex-wrap:wrap;align-items:center;gap:.2rem .8rem}
.mpx button,.mpx select,.mpx input[type=text]{font:inherit;color:inherit;min-height:1.6rem;
 background:var(--tint,#8881);border:1px solid var(--dim);border-radius:4px;padding:.1rem .55rem}.mpx button:disabled{opacity:.45}
.mpx svg{display:block;max-width:none;overflow:visible;margin:.5rem 0;user-select:none}
.mpx text{fill:var(--dim);font-size:12px}.mpx .says{margin:.3rem 0 .5rem;min-height:2.9em}
.mpx td,.mpx th{text-align:right;padding:.15rem .5rem;font-weight:400}.mpx thead{color:var(--dim)}
.mpx th:first-child{text-align:left;padding-left:0}.mpx .scrolls{overflow-x:auto}
.mpx :focus-visible{outline:2px solid var(--mark);outline-offset:2px}`;

/** Put parts into an element, in place of the static figure that stands there. */
export function fill(root, css, ...parts) {
  root.classList.add('mpx');
  root.replaceChildren(make('style', {}, STYLE + css), ...parts);
}

export const bar = (...parts) => make('div', { class: 'bar' }, ...parts);
export const plot = (height, attrs = {}) => make('svg', { role: 'img', height, ...attrs });
export const says = () => make('p', { class: 'says', 'aria-live': 'polite' });

/** A slider {label, input, set}: `say(value)` is [what stands beside it, what is read aloud]. */
export function slider(text, [min, max, step = 1], value, say, act) {
  const input = make('input', { type: 'range', min, max, step, value }), out = make('output');
  const show = () => {
    const [shown, aloud] = say(+input.value);
    out.replaceChildren(...[shown].flat());
    input.setAttribute('aria-valuetext', aloud ?? shown);
  };
  input.addEventListener('input', () => { show(); act(+input.value); });
  show();
  return { label: make('label', { class: 'wide' }, text, input, out), input,
    set: v => { input.value = v; show(); } };
}
export const asPower = k => [power(k), `2 to the ${k}`];
export const asNumber = n => [n.toLocaleString('en')];

let groups = 0;
/** Radio buttons [[value, text], …] with a legend. */
export function radios(legend, options, value, act) {
  const id = `mpx${groups++}-${Math.random().toString(36).slice(2, 8)}`;
  const one = ([v, text]) => make('label', {}, make('input',
    { type: 'radio', name: id, value: v, checked: v === value }), make('span', {}, text));
  const box = make('div', { role: 'radiogroup', 'aria-labelledby': id },
    make('span', { id }, legend), ...options.map(one));
  box.addEventListener('input', e => { e.stopPropagation(); act(e.target.value); });
  return box;
}

export function menu(text, options, value, act) {
  const box = make('select', {}, ...options.map(o => make('option', { value: o, selected: o === value }, o)));
  box.addEventListener('input', e => { e.stopPropagation(); act(box.value); });
  return make('label', {}, text, box);
}

export function button(text, act) {
  const b = make('button', { type: 'button' }, text);
  b.addEventListener('click', act);
  return b;
}

/** Draw now, and again where there is more or less room. */
export function redraw(root, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    draw();
  }).observe(root);
}
export const room = root => Math.max(280, root.clientWidth - 32);

/** A call back with the pointer's place in an svg while it is held down. */
export function drag(svg, act) {
  let held = false;
  const at = e => { const r = svg.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
  svg.addEventListener('pointerdown', e => {
    held = true;
    svg.setPointerCapture(e.pointerId);
    act(...at(e), true);
  });
  svg.addEventListener('pointermove', e => { if (held) act(...at(e), false); });
  for (const end of ['pointerup', 'pointercancel']) svg.addEventListener(end, () => held = false);
}

/** Ticks at powers of two: [svg parts] at exponents lo…hi, on a horizontal or a vertical axis. */
export function ticks(lo, hi, every, at, { y, x }) {
  const parts = [];
  for (let e = Math.ceil(lo / every) * every; e <= hi; e += every) parts.push(y !== undefined
    ? make('text', { x: at(e), y, 'text-anchor': e === lo ? 'start' : e === hi ? 'end' : 'middle' }, powerText(e))
    : make('text', { x, y: at(e) + 4, 'text-anchor': 'end' }, powerText(e)));
  return parts;
}

export const rect = (x, y, width, height, fill, more = {}) =>
  make('rect', { x, y, width: Math.max(0, width), height: Math.max(0, height), fill, ...more });
export const line = (x1, y1, x2, y2, stroke, more = {}) => make('line', { x1, y1, x2, y2, stroke, ...more });
export const words = (x, y, text, anchor = 'start', more = {}) =>
  make('text', { x, y, 'text-anchor': anchor, ...more }, ...[text].flat());

export const table = (head, rows) => make('div', { class: 'scrolls', tabindex: 0, role: 'group', 'aria-label': 'a table' }, make('table', {},
  make('thead', {}, make('tr', {}, head.map(h => make('th', { scope: 'col' }, h)))),
  make('tbody', {}, rows.map(([name, ...cells]) => make('tr', {},
    make('th', { scope: 'row' }, ...[name].flat()), cells.map(c => make('td', {}, ...[c].flat())))))));
