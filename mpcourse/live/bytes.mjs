// Where the bytes are: a model, an optimizer and a scheme, in bytes of state and of what autograd keeps.
//   data = {model, params, kept: {scheme: bytes that autograd keeps for an example, measured},
//           schemes: the rows, compare: two of them}
import { asNumber, bar, fill, plot, radios, rect, redraw, room, says, slider, sum, table, words } from './base.mjs';

// bytes for each parameter: weights, FP32 masters, half copies between forward and backward, gradients, one moment
export const SCHEMES = {
  FP32: { weights: 4, masters: 0, copies: 0, gradients: 4, moment: 4 },
  autocast: { weights: 4, masters: 0, copies: 2, gradients: 4, moment: 4 },
  functional_call: { weights: 4, masters: 0, copies: 2, gradients: 4, moment: 4 },
  masters: { weights: 2, masters: 4, copies: 0, gradients: 6, moment: 4 },
  'BF16 weights': { weights: 2, masters: 0, copies: 0, gradients: 2, moment: 2 },
  Kahan: { weights: 2, masters: 0, remainders: 2, copies: 0, gradients: 2, moment: 4 },
  stochastic: { weights: 2, masters: 0, copies: 0, gradients: 2, moment: 4 } };
export const MOMENTS = { SGD: 0, momentum: 1, Adam: 2 };
const PARTS = { weights: '#0072B2', masters: '#3b8fc4', remainders: '#CC79A7', copies: '#8C6D31', gradients: '#D55E00', moments: '#009E73', activations: '#808080' };

/** Bytes of each part for `params` parameters and `kept` bytes of activations. */
export function bytes(scheme, optimizer, params, kept) {
  const { moment, ...each } = SCHEMES[scheme];
  const out = Object.fromEntries(Object.entries(each).map(([part, n]) => [part, n * params]));
  return { ...out, moments: MOMENTS[optimizer] * moment * params, activations: kept };
}

export const readable = n => !n ? '0' : n < 1e6 ? `${(n / 1e3).toFixed(0)} kB` : n < 1e9 ? `${(n / 1e6).toPrecision(3)} MB`
  : n < 1e12 ? `${(n / 1e9).toPrecision(3)} GB` : `${(n / 1e12).toPrecision(3)} TB`;

export function mount(root, data) {
  const state = { params: Math.log10(data.params), batch: 32, optimizer: 'Adam' }, el = {};
  const set = change => { Object.assign(state, change); draw(); };
  const params = () => Math.round(10 ** state.params);
  // activations grow with the width, so about with the square root of the parameters
  const kept = scheme => state.batch * (data.kept[scheme] ?? data.kept.masters) * Math.sqrt(params() / data.params);
  const shown = data.schemes ?? ['FP32', 'autocast', 'functional_call', 'masters', 'BF16 weights'];
  const two = data.compare ?? ['FP32', 'autocast'], parts = Object.keys(PARTS).filter(p => !/remainders|copies/.test(p) || shown.some(s => SCHEMES[s][p]));
  const all = () => shown.map(s => [s, bytes(s, state.optimizer, params(), kept(s))]);
  fill(root, `.mpx .key::before{content:'';display:inline-block;width:.7em;height:.7em;margin:0 .3em;background:var(--c)}`,
    bar(slider('parameters', [4, 11, .05], state.params, v => [v < 9 ? `${+(10 ** (v - 6)).toPrecision(2)} million` : `${+(10 ** (v - 9)).toPrecision(2)} billion`], v => set({ params: v })).label,
      slider('examples in a batch', [1, 512], state.batch, asNumber, batch => set({ batch })).label),
    radios('optimizer', Object.keys(MOMENTS).map(o => [o, o]), state.optimizer, optimizer => set({ optimizer })),
    el.plot = plot(32 * shown.length + 10), el.says = says(), el.table = document.createElement('div'));

  function draw() {
    const rows = all(), most = Math.max(...rows.map(([, b]) => sum(Object.values(b)))), width = room(root), left = 90;
    const bars = [];
    rows.forEach(([scheme, b], i) => {
      let x = left;
      bars.push(words(left - 6, i * 32 + 18, scheme, 'end'));
      for (const [part, n] of Object.entries(b)) {
        const w = n / most * (width - left);
        bars.push(rect(x, i * 32 + 4, w, 22, PARTS[part]));
        x += w;
      }
    });
    el.plot.setAttribute('width', width);
    el.plot.replaceChildren(...bars);
    const head = parts.map(part => {
      const key = Object.assign(document.createElement('span'), { className: 'key', textContent: part });
      key.style.setProperty('--c', PARTS[part]);
      return key;
    });
    el.table.replaceChildren(table(['scheme', ...head, 'together'], rows.map(([s, b]) =>
      [s, ...parts.map(p => readable(b[p])), readable(sum(Object.values(b)))])));
    const held = b => sum(Object.values(b)), [a, b] = two.map(name => rows.find(([s]) => s === name)[1]);
    const change = n => n ? `${readable(Math.abs(n))} ${n > 0 ? 'more' : 'less'}` : 'as much';
    el.says.textContent = `Beside ${two[0]}, ${two[1]} holds ${change(held(b) - b.activations - held(a) + a.activations)} in weights, ` +
      `gradients and moments, and ${change(b.activations - a.activations)} in activations. Together: ` +
      `${Math.round(100 * held(b) / held(a))} % of ${two[0]}.`;
    el.plot.setAttribute('aria-label', `Bytes of ${rows.length} schemes as stacked bars. ${el.says.textContent}`);
  }
  redraw(root, draw);
  draw();
  return { state, set };
}
