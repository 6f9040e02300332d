// A net that is trained in the page, in a format and with a loss scale that may change while it trains.
//   data.digits, train, valid   made by `train_data`, as fmt, k, lr, steps, masters, moves are
//   data.net                    'heads' (reads and draws) or 'sigmoids' (eight layers that read)
//   data.asks                   one more control: 'masters' (weights in the format), 'moves' (a moving scale, and bad batches),
//                               'xavier' (other initial weights) or 'v' (Adam's second moment in eight bits)
import { asPower, bar, button, clamp, fill, line, make, minus, percent, plot, radios, random, redraw, room, says, slider, words } from './base.mjs';
import { engine } from './net.mjs';

const SCALES = [-10, 24], TOP = { ce: 2.5, mse: .3 };
const ASKS = { masters: 'weights kept in FP32', moves: 'the scale moves', xavier: 'a new net begins with Xavier’s weights' };
const V = { fp32: 'FP32', int8: 'INT8', 'root int8': '√v in INT8', 'root e4m3': '√v in E4M3' };
const COLORS = ['var(--mark)', 'light-dark(#c2570c,#f6a56b)', 'light-dark(#1b7a43,#6fd39a)'];      // of trainings in sight
const FATES = { alive: 'var(--mark)', 'zero before': 'color-mix(in srgb,var(--dim) 35%,var(--paper,Canvas))', 'lost in this rounding': 'var(--bad)', 'too large': 'var(--over)' };
const CSS = `.mpx .bar+.bar{margin-top:.4rem}.mpx .shown{margin:.6rem 0}.mpx .rows{display:grid;grid-template-columns:minmax(5.5rem,10rem) repeat(5,minmax(0,4.6rem));gap:.3rem .5rem;align-items:center}
.mpx .rows [role=img]{display:contents}.mpx .rows b{font-weight:600;border-left:.35rem solid var(--c);padding-left:.4rem;line-height:1.3}
.mpx canvas{width:100%;display:block;image-rendering:pixelated;border:1px solid var(--line,#8886);border-radius:3px;box-sizing:border-box}
.mpx figure.cell{margin:0;text-align:center;font-size:.8rem;line-height:1.25}.mpx .cell.wrong{color:var(--bad);font-weight:600}
.mpx .rows small{display:block;font-weight:400;color:var(--dim)}.mpx .two{display:flex;flex-wrap:wrap;gap:0 24px}
.mpx .fates{display:grid;grid-template-columns:max-content 1fr minmax(6.5rem,max-content);gap:.1rem .6rem;align-items:center;font-size:.85rem}
.mpx .fates div{display:flex}.mpx .fates i{height:.7rem}.mpx .fates output{text-align:right}
.mpx .key{display:inline-block}.mpx .key::before{content:'';display:inline-block;width:.7em;height:.7em;margin:0 .3em 0 .8em;background:var(--c)}
@media(max-width:34rem){.mpx .rows{grid-template-columns:repeat(5,1fr)}.mpx .rows b{grid-column:1/-1}}`;

/** The engine as a worker; where workers are forbidden, in the page itself, 60 ms at a time. */
function trainer(data, hear) {
  const text = `const hear = (${engine})(${random}).serve(m => postMessage(m), ${JSON.stringify(data)}); onmessage = e => hear(e.data);`, sent = [];
  let post, heard = false;
  const here = () => { post = engine(random).serve(hear, data); sent.forEach(m => post(m)); };
  try {
    const worker = new Worker(URL.createObjectURL(new Blob([text], { type: 'text/javascript' })));
    worker.onmessage = e => { heard = true; hear(e.data); };
    worker.onerror = () => { if (!heard) here(); };         // forbidden late, by an event
    post = m => { if (!heard) sent.push(m); worker.postMessage(m); };
  } catch { here(); }
  return m => post(m);
}
const raised = k => '2' + String(k).replace(/./g, c => '⁰¹²³⁴⁵⁶⁷⁸⁹'[c] ?? '⁻');
const label = s => `${s.fmt.toUpperCase()}${s.masters ? '' : ' weights'}, ${s.moves ? 'moving scale' : s.k ? `loss × ${raised(s.k)}` : 'no scale'}` +
  (s.xavier ? ', Xavier' : '') + (s.v === 'fp32' ? '' : s.v === 'int8' ? ', v in INT8' : `, ${V[s.v]}`);

export function mount(root, data) {
  const { digits, train, valid, asks, ...start } = data, state = { fmt: 'fp16', k: 0, lr: 3e-3, steps: 150, masters: true, moves: false, net: 'heads', xavier: false, v: 'fp32', ...start };
  const el = {}, runs = [], still = [...root.childNodes];   // the latest training first; the picture before the first news
  const draws = state.net === 'heads';
  let post = null, truth = null, running = false, id = 0;
  const left = () => runs[0]?.planned - runs[0]?.steps.length;
  const send = m => (post ??= trainer({ digits, train, valid }, hear))(m);
  el.k = slider('loss scale', SCALES, state.k, asPower, k => change({ k }));
  el.k.input.setAttribute('aria-label', 'log2 of the loss scale');
  el.go = button('train', () => running ? send({ stop: true }) : begin());
  el.more = button('', () => goOn(left() || state.steps));
  el.fmt = radios('forward and backward in', ['fp32', 'fp16', 'bf16', 'e4m3'].map(f => [f, f.toUpperCase()]), state.fmt, fmt => change({ fmt }));
  const box = make('input', { type: 'checkbox', checked: state[asks] }), asked = asks in ASKS ? [make('label', {}, box, ASKS[asks])] : [];
  box.addEventListener('input', () => change({ [asks]: box.checked }));
  if (asks === 'v') asked.push(radios('Adam’s v in', Object.entries(V), state.v, v => change({ v })));
  if (asks === 'moves') asked.push(el.bad = button('twenty bad batches', () => post({ set: { bad: 20 } })));
  const keys = Object.entries(FATES).map(([fate, color]) => make('span', { class: 'key', style: `--c:${color}` }, fate));
  fill(root, CSS, bar(el.fmt, el.k.label), bar(...asked, el.go, el.more), el.shown = make('div', { class: 'shown' }, still), el.says = says(),
    make('div', { class: 'two' }, el.ce = plot(150), ...draws ? [el.mse = plot(150)] : []), make('div', {}, 'the gradient behind each layer, in the last step (it flows upwards):', ...keys),
    el.fates = make('div', { class: 'fates' }));
  el.says.textContent = `Press train. Below each ${draws ? 'of the net’s drawings stands the digit that it reads' : 'digit stands what the net reads'}, in red where it is wrong. ` +
    (asks === 'v' ? 'Then choose another code for v, and train a new net.' : 'Then move the loss scale, and train on.');
  /** What is moved while a net trains, or afterwards, changes that net. */
  function change(what) {
    Object.assign(state, what);
    post?.({ set: what });
    if ('xavier' in what) el.says.textContent = 'The next new net begins so.';
    else if (!running && runs[0]?.steps.length) el.says.textContent = `Press “${el.more.textContent}” to train on with: ${label(now())}.`;
  }
  /** The settings of the latest net; its first weights are chosen. */
  function now() { return { ...state, xavier: runs[0].xavier }; }
  function begin() {
    runs.unshift({ path: [label(state)], xavier: state.xavier, steps: [], planned: 0, color: COLORS[id % 3] });
    runs.length = Math.min(runs.length, 3);
    goOn(state.steps, { build: { ...state, id: ++id } });
  }
  function goOn(steps, first) {
    runs[0].planned = runs[0].steps.length + steps;
    running = true;
    el.says.textContent = `${label(now())}: the net trains …`;
    send({ ...first, steps });
    buttons();
  }
  function buttons() {
    el.go.textContent = running ? 'stop' : runs[0]?.steps.length ? 'train a new net' : 'train';
    el.more.textContent = left() > 0 ? 'go on' : `${state.steps} steps more`;
    el.more.disabled = running || !runs[0]?.steps.length;
    if (el.bad) el.bad.disabled = !running;
  }
  function hear(m) {
    if (m.id !== id) return;                                // of the net before
    if (m.truth) {
      truth = { path: ['new digits'], ...m.truth };
      el.bars = m.layers.map(name => [make('span', {}, name), make('div', {}, ...Object.values(FATES).map(c => make('i', { style: `background:${c}` }))), make('output')]);
      el.fates.replaceChildren(...el.bars.flat());
      if (!runs.length) runs.push({ path: ['before training'], steps: [], planned: 0, color: 'transparent' });
      return rows();
    }
    const run = Object.assign(runs[0], m), was = running;
    run.steps.push(...m.done);
    if (m.done.length && run.path.at(-1) !== label(now())) { run.path = [...run.path, label(now())].slice(-3); rows(); }
    if (run.steps.length) {
      if (state.moves) el.k.set(state.k = run.steps.at(-1).k);
      m.fates.forEach(drawFates);
      running = m.left > 0;
      if (was && !running) tell(run, run.steps.at(-1));
      buttons();
    }
    draw();
  }
  function tell(run, last) {
    const dead = run.fates.flatMap(([zero, lost, , n], i) => zero + lost > .999 * n ? el.bars[i][0].textContent : []);
    const destroyed = run.named.includes(-1) || draws && !(run.error < 1);
    const advice = destroyed ? 'The weights are destroyed: choose other settings, and train a new net. '
      : dead.length ? `No gradient is left behind ${dead.join(', ')}. Raise the loss scale, and train on. ` : '';
    el.says.textContent = `${run.path.join(', then ')}: after ${last.it} steps the net reads ${percent(Math.round(run.acc * valid), valid)} of ${valid} new digits` +
      (draws ? ` and draws them with an error of ${run.error < 1e3 ? run.error.toFixed(3) : '∞'} (before training: 0.202). ` : '. ') +
      advice + (last.skipped ? `${last.skipped} steps were skipped, as a gradient was not finite. ` : '') + (state.masters ? '' : `${percent(last.still, 1)} of the weights did not move in the last step. `) +
      `Hash of all weights: ${run.hash}.`;
  }
  function rows() {
    const side = Math.sqrt(truth.drawn.length / 5), canvas = run => draws || run === truth ? [make('canvas', { width: side, height: side })] : [];
    const cell = run => make('figure', { class: 'cell' }, ...canvas(run), make('span'));
    if (runs.length > 1 && !runs.at(-1).planned) runs.pop();
    const row = run => [make('b', { style: `--c:${run.color ?? 'transparent'}` }, run.path[0], make('small', {}, run.path.slice(1).map(p => `then ${p}`).join(', '))),
      run.cells = make('div', { role: 'img' }, [1, 2, 3, 4, 5].map(() => cell(run)))];
    el.shown.replaceChildren(make('div', { class: 'rows' }, ...[truth, ...runs].flatMap(row)));
    [truth, ...runs].forEach(paint);
  }
  function picture(canvas, drawn, j, ink) {
    const image = new ImageData(canvas.width, canvas.width), n = drawn.length / 5;
    for (let p = 0; p < n; p++) image.data.set([...ink.slice(0, 3), 255 * drawn[j * n + p]], 4 * p);          // clamped by the array itself
    canvas.getContext('2d').putImageData(image, 0, 0);
  }
  function paint(run) {
    if (!run.named) return;
    const ink = getComputedStyle(root).color.match(/\d+/g);
    run.cells.setAttribute('aria-label', `${run.path.join(', then ')}: ${run.named.join(', ')}`);
    [...run.cells.children].forEach((cell, j) => {
      if (run.drawn) picture(cell.firstChild, run.drawn, j, ink);
      cell.lastChild.textContent = run.named[j] < 0 ? '?' : run.named[j];
      cell.classList.toggle('wrong', run.named[j] !== truth.named[j]);
    });
  }
  function drawFates([zero, lost, large, n, weights], i) {
    const [, { children }, text] = el.bars[i];
    [n - zero - lost - large, zero, lost, large].forEach((v, j) => children[j].style.width = `${100 * v / n}%`);
    text.textContent = large ? `${percent(large, n)} too large` : weights ? 'for weights: infinite' : zero === n ? 'none arrives' : zero + lost === n ? 'nothing left' : lost > n / 2000 ? `${percent(lost, n)} lost` : '';
  }
  function draw() {
    if (truth) paint(runs[0]);
    const width = Math.min(420, (room(root) - 24) / 2), base = 130, steps = Math.max(state.steps, ...runs.map(r => r.planned));
    for (const [svg, key, title] of [[el.ce, 'ce', 'cross-entropy'], [el.mse, 'mse', 'error of the drawings']].slice(0, draws ? 2 : 1)) {
      const y = v => base - clamp(v / TOP[key], 0, 1.05) * (base - 24);
      const path = all => all.flatMap((s, j) => isNaN(s[key]) ? [] : `${((j + 1) / steps * width).toFixed(1)} ${y(s[key]).toFixed(1)}`).join('L').replace(/^./, 'M$&');
      svg.setAttribute('width', width);
      svg.setAttribute('aria-label', `${title}: ` + (runs.filter(r => r.steps.length).map(r => `${r.path.join(', then ')} ends at ${r.steps.at(-1)[key].toFixed(3)}`).join('; ') || 'no step yet'));
      svg.replaceChildren(words(0, 12, title), words(width, 16, minus(TOP[key]), 'end'), words(0, 146, '0'), words(width, 146, `${steps} steps`, 'end'),
        line(0, base, width, base, 'var(--dim)'), line(0, y(TOP[key]), width, y(TOP[key]), 'var(--line,#8884)'),
        ...runs.map((r, i) => make('path', { fill: 'none', stroke: r.color, 'stroke-width': i ? 1.2 : 2.2, d: path(r.steps) })).reverse());
    }
  }

  new IntersectionObserver((seen, observer) => {            // not before it is in sight
    if (!seen.some(s => s.isIntersecting)) return;
    observer.disconnect();
    if (!post) send({ build: { ...state, id: ++id } });
  }).observe(root);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => truth && rows());
  redraw(root, draw);
  draw();
  buttons();
}
