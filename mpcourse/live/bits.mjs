// Bits: type a number or click its digits, and see how two formats store it.
//   data = {number, left, right}: what stands there at first
import { bar, button, fill, make, menu, says } from './base.mjs';
import { FORMATS, bitsOf, cast, next, numberOf, shown } from './formats.mjs';

const CSS = `.mpx .code{display:flex;flex-wrap:wrap;gap:.15rem .5rem;margin:.5rem 0}
.mpx .code>span{display:flex;flex-wrap:wrap;gap:2px}.mpx .code button{padding:0;width:1.5rem;font-variant-numeric:tabular-nums}
.mpx .sign button{background:light-dark(#f6d9d6,#5a2a2a)}.mpx .exponent button{background:light-dark(#dbe9f7,#203d5c)}
.mpx .fraction button{background:light-dark(#e2f1e2,#25482b)}.mpx .says{min-height:0}`;
const PARTS = ['sign', 'exponent', 'fraction'];

/** A text as a number: 0.1, 2^-24, 1 + 2^-11, inf. Null where it is none. */
export function parse(text) {
  const plain = k => '^' + [...k].map(c => c === '⁻' ? '-' : '⁰¹²³⁴⁵⁶⁷⁸⁹'.indexOf(c)).join('');  // 2⁻¹¹ as 2^-11
  const word = text.trim().toLowerCase().replaceAll('−', '-').replaceAll('**', '^').replace(/⁻?[⁰¹²³⁴-⁹]+/g, plain);
  const found = { inf: Infinity, '-inf': -Infinity, nan: NaN }[word];
  if (found !== undefined || word === 'nan') return found;
  let total = null;
  for (const term of word.match(/[+-]?\s*[^+\-\s^e]+(?:e[+-]?\d+)?(?:\^[+-]?\d+)?/g) ?? []) {
    const [base, k] = term.replaceAll(' ', '').split('^'), x = k === undefined ? +base : Math.sign(+base) * Math.abs(+base) ** +k;
    if (Number.isNaN(x)) return null;
    total = total === null ? x : total + x;                // 0 + −0 would be 0
  }
  return total;
}

/** What a format makes of x: {value, bits, error (relative, 0 where exact), kind}. */
export function stored(x, f) {
  const value = cast(x, f), size = Math.abs(value);
  const kind = Number.isFinite(value) && !Number.isFinite(x) ? `its largest number: it has no ${Number.isNaN(x) ? 'NaN' : 'infinity'}`
    : Number.isNaN(value) ? 'NaN' : size === Infinity ? 'infinite' : !size ? (x ? 'underflow: zero' : 'zero')
    : size < f.tiny ? 'subnormal' : 'normal';
  const error = Object.is(x, value) || x === value ? 0 : Number.isFinite(value) && Number.isFinite(x) ? Math.abs(value / x - 1) : Infinity;
  return { value, bits: bitsOf(value, f), error, kind };
}

export function mount(root, data) {
  const state = { x: parse(data.number), names: [data.left, data.right] }, el = {};
  const set = change => { Object.assign(state, change); el.text.value = shown(state.x); draw(); };
  el.text = make('input', { type: 'text', size: 16, 'aria-label': 'a number, such as 0.1 or 2^-24' });
  el.text.addEventListener('change', () => {
    const x = parse(el.text.value);
    if (x === null) el.says.textContent = `“${el.text.value}” is no number: type 0.1, 2^-24, 1 + 2^-11 or inf.`;
    else set({ x });
  });
  el.boxes = state.names.map((name, i) => make('div'));
  const choose = i => name => { state.names[i] = name; draw(); };
  const step = up => () => {                                // to the neighbour in the first format
    const f = FORMATS[state.names[0]], v = cast(state.x, f);
    if (Number.isFinite(v)) set({ x: next(v, f, up) });
  };
  fill(root, CSS,
    bar(make('label', {}, 'number', el.text), button('halve', () => set({ x: state.x / 2 })),
      button('double', () => set({ x: state.x * 2 })), button('next below', step(false)), button('next above', step(true))),
    ...state.names.flatMap((name, i) => [bar(menu(i ? 'and in' : 'stored in', Object.keys(FORMATS), name, choose(i))), el.boxes[i]]),
    el.says = says());

  /** The digits of one code as buttons; a click turns one over. */
  function code(bits, name) {
    const flip = (part, at) => () => {
      const turned = bits.map((digits, p) => [...digits].map((d, i) => p === part && i === at ? 1 - d : d).join(''));
      set({ x: numberOf(turned, FORMATS[name]) });
    };
    return bits.map((digits, p) => make('span', { class: PARTS[p] }, [...digits].map((d, i) => {
      const b = button(d, flip(p, i));
      b.setAttribute('aria-label', `${name} ${PARTS[p]} bit ${i + 1}: ${d}`);
      return b;
    })));
  }

  function draw() {
    const focus = [...root.querySelectorAll('.code button')].indexOf(document.activeElement);
    const seen = state.names.map(name => stored(state.x, FORMATS[name]));
    seen.forEach((s, i) => el.boxes[i].replaceChildren(make('div', { class: 'code' }, code(s.bits, state.names[i])),
      make('div', {}, `${shown(s.value)}, ${s.kind}` + (s.error && s.error < Infinity ? `, off by ${+(100 * s.error).toPrecision(2)} %` : ''))));
    if (focus >= 0) root.querySelectorAll('.code button')[focus]?.focus();
    const [a, b] = seen.map((s, i) => [s, state.names[i].toUpperCase()]);
    const best = !Number.isFinite(state.x) ? '' : a[0].error === b[0].error ? 'Both are equally far from it.' : `${(a[0].error < b[0].error ? a : b)[1]} is nearer.`;
    el.says.textContent = `${shown(state.x)}: ${a[1]} has ${shown(a[0].value)}, ${b[1]} has ${shown(b[0].value)}. ${best}`;
  }
  set({});
  return { state, set };
}
