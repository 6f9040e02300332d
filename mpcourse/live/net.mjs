// A net that trains in the page, in a format and with a loss scale: chapter 03's two heads with pictures of 32 × 32 pixels, or its
// deep sigmoid net.
// Products and sums are float32 in the order of k, rounded once, as a tensor core does: Python's twin in chapter 05 gets the same bits.
// `engine` uses nothing from outside, because its text is the worker's; `random` is base.mjs's. KERNEL is mm.wat, compiled.
export function engine(random) {
  const KERNEL = 'AGFzbQEAAAABDAFgCH9/f39/f39/AAIIAQFlAW0CAAEDAgEABwYBAm1tAAAKwgMBvwMDB38LewV/IARBAnQhDiAGQQF0IR0gHSAGaiEeA0BBACEIA0AgASAIIAZsaiELIAIgCUECdGohDCAAIAggBGwgCWpBAnRqIQ0gDSAOaiEaIBogDmohGyAbIA5qIRwgDf0ABAAhEiAN/QAEECETIBr9AAQAIRQgGv0ABBAhFSAb/QAEACEWIBv9AAQQIRcgHP0ABAAhGCAc/QAEECEZIAUhCgNAIAz9AAQAIQ8gDP0ABBAhECAL/QkCACERIBIgESAP/eYB/eQBIRIgEyARIBD95gH95AEhEyALIAZq/QkCACERIBQgESAP/eYB/eQBIRQgFSARIBD95gH95AEhFSALIB1q/QkCACERIBYgESAP/eYB/eQBIRYgFyARIBD95gH95AEhFyALIB5q/QkCACERIBggESAP/eYB/eQBIRggGSARIBD95gH95AEhGSALIAdqIQsgDCAOaiEMIApBAWsiCg0ACyANIBL9CwQAIA0gE/0LBBAgGiAU/QsEACAaIBX9CwQQIBsgFv0LBAAgGyAX/QsEECAcIBj9CwQAIBwgGf0LBBAgCEEEaiIIIANJDQALIAlBCGoiCSAESQ0ACws=';
  const f32 = Math.fround, B = 256, SIDE = 32, PIXELS = SIDE ** 2, WEIGHT = .01 * PIXELS / 4096;   // chapter 03's gradient per pixel
  const FORMATS = {                                         // bits of the fraction, least exponent, largest number, what lies beyond
    fp32: [], fp16: [10, -14, 65504, Infinity], bf16: [7, -126, 2 ** 127 * (2 - 2 ** -7), Infinity], e4m3: [3, -6, 448, 448] };
  const NETS = {                                            // name, source, outputs, activation; `name` has ten outputs, and six zeros
    heads: [['body.1', 'x', 64, 'relu'], ['body.2', 'body.1', 64, 'relu'], ['name', 'body.2', 16],
      ['draw.1', 'body.2', 64, 'relu'], ['draw.2', 'draw.1', 64, 'relu'], ['draw.3', 'draw.2', PIXELS]],
    sigmoids: [...[1, 2, 3, 4, 5, 6, 7].map(i => [`layer ${i}`, i > 1 ? `layer ${i - 1}` : 'x', 64, 'sigmoid']), ['name', 'layer 7', 16]] };

  const TAYLOR = [479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1].map(c => 1 / c);
  // exp and log from + − × ÷ and powers of two, because each machine's own may differ in the last bit
  function exp(x) {
    const n = Math.floor(x * 1.4426950408889634 + .5), r = x - n * 0.6931471803691238 - n * 1.9082149292705877e-10;
    if (n <= -1000) return 0;
    let p = 1 / 6227020800;
    for (let i = 0; i < 13; i++) p = p * r + TAYLOR[i];
    return p * 2 ** n;
  }
  function log(x) {                                         // of a sum of ten, the largest of which is 1
    let e = 0, p = 1 / 21;
    for (; x >= 1.4142135623730952; e++) x /= 2;
    const s = (x - 1) / (x + 1), q = s * s;
    for (let k = 19; k > 0; k -= 2) p = p * q + 1 / k;
    return e * 1.9082149292705877e-10 + (2 * s * p + e * 0.6931471803691238);
  }
  /** What pushes digits out of a double, for each exponent of a float32: added, and taken away. */
  const pushers = (fmt, [bits, least] = FORMATS[fmt]) => Float64Array.from({ length: 256 }, (_, e) => 1.5 * 2 ** (Math.max(e - 127, least) - bits + 52));
  const E4M3 = pushers('e4m3');
  const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
  /** The digits of `train_data`: pixels 0…16, then classes, deflated. */
  async function unpack({ digits, train, valid }) {
    const open = new Blob([bytes(digits)]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
    const raw = new Uint8Array(await new Response(open).arrayBuffer()), n = 64 * (train + valid);
    return { train, valid, x: raw.subarray(0, n), y: raw.subarray(n) };
  }
  /** A net with its data. Without WebAssembly (or `plain`) JavaScript computes the same, five times slower. */
  function build(data, given = {}, plain = false) {
    const o = { fmt: 'fp16', k: 0, seed: 0, lr: 3e-3, masters: true, moves: false, bad: 0, net: 'heads', xavier: false, v: 'fp32', ...given };
    const layers = NETS[o.net].map(([name, src, n, act]) => ({ name, src, n, act, real: name === 'name' ? 10 : n, seen: new Uint8Array(B * n) }));
    const N = data.train + data.valid, rows = Math.max(B, data.valid + 7 & ~7), outputs = layers.reduce((s, l) => s + l.n, 0), total = 65 * outputs;
    const size = 1024 + N * (64 + PIXELS) + 6 * total + 2 * rows * (outputs + 256);
    let inner, buffer;
    try {
      if (plain) throw plain;
      const memory = new WebAssembly.Memory({ initial: Math.ceil(size / 16384) });
      inner = new WebAssembly.Instance(new WebAssembly.Module(bytes(KERNEL)), { e: { m: memory } }).exports.mm;
      buffer = memory.buffer;
    } catch { buffer = new ArrayBuffer(4 * size); }
    const f = new Float32Array(buffer), u = new Uint32Array(buffer);
    let top = 0;
    const room = n => (top += n + 3 & ~3) - (n + 3 & ~3);   // an address is an index of f
    const X = room(N * 64), T = room(N * PIXELS), part = room(B * 64);
    const [master, low, grad, mean, square] = [1, 2, 3, 4, 5].map(() => room(total)), by = { x: { A: room(rows * 64) } };
    layers.reduce((at, l) => {                              // weights, then biases: offsets in master, low, grad, mean and square
      by[l.name] = Object.assign(l, { w: at, bias: at + 64 * l.n, T: room(64 * l.n), A: room(rows * l.n), G: room(B * l.n) });
      return at + 65 * l.n;
    }, 0);
    const name = by.name, picture = by['draw.3'];
    for (let i = 0; i < N * 64; i++) f[X + i] = data.x[i] / 16;
    const place = v => {
      const c = Math.min(7, Math.max(0, (v + .5) * 8 / SIDE - .5)), a = Math.floor(c);
      return [a, Math.min(7, a + 1), c - a];
    };
    for (let i = 0; i < PIXELS; i++) {                      // the same digit, enlarged: bilinear, and exact
      const [y0, y1, v] = place(Math.floor(i / SIDE)), [x0, x1, h] = place(i % SIDE);
      const across = (p, y) => (1 - h) * f[p + 8 * y + x0] + h * f[p + 8 * y + x1];
      for (let q = 0; q < N; q++) f[T + q * PIXELS + i] = (1 - v) * across(X + 64 * q, y0) + v * across(X + 64 * q, y1);
    }
    const draw = random(o.seed);
    for (const l of layers) {                               // PyTorch's own initial weights, uniform in ±1/√64, or Xavier's with a gain of 4
      const most = o.xavier ? 4 * Math.sqrt(6 / (64 + l.real)) : 1 / 8;
      for (let i = 0; i < 65; i++) for (let j = 0; j < l.real; j++) f[master + l.w + i * l.n + j] = (2 * draw() - 1) * (o.xavier && i === 64 ? 0 : most);
    }

    let most, beyond, magic;
    function set(change) {
      Object.assign(o, change);
      [, , most, beyond] = FORMATS[o.fmt];
      magic = o.fmt !== 'fp32' && pushers(o.fmt);
    }
    set({});
    /** Round n numbers. Returns how many are too large; seen: 1 not zero, 2 too large. */
    function round(p, n, seen) {
      let large = 0;
      if (magic) for (let i = 0; i < n; i++, p++) {
        const x = f[p], M = magic[u[p] >>> 23 & 255], r = x + M - M, fits = r <= most && r >= -most;
        f[p] = fits ? r : r > 0 ? beyond : r < 0 ? -beyond : r;
        if (!fits) large++;
        if (seen) seen[i] |= fits ? x !== 0 : 2;
      }
      return large;
    }
    /** C[M×N] += A·B, where A(m,k) lies at A + m·r + k·c. M and K are multiples of 4, N of 8. */
    function mm(C, A, B, M, N, K, r, c) {
      if (inner) return inner(4 * C, 4 * A, 4 * B, M, N, K, 4 * r, 4 * c);
      for (let m = 0; m < M; m++, C += N) for (let k = 0; k < K; k += 2) {
        const a = A + m * r + k * c, p = f[a], q = f[a + c], b = B + k * N, d = b + N;
        for (let n = 0; n < N; n++) f[C + n] = f32(f[C + n] + f32(p * f[b + n])) + f32(q * f[d + n]);
      }
    }

    function forward(rows, weights, rounded) {
      for (const { src, n, act, w, bias, A } of layers) {
        const size = rows * n;
        for (let r = 0; r < size; r += n) f.copyWithin(A + r, weights + bias, weights + bias + n);
        mm(A, by[src].A, weights + w, rows, n, 64, 64, 1);
        if (rounded) round(A, size);
        if (act === 'relu') for (let i = A; i < A + size; i++) if (f[i] < 0) f[i] = 0;
        if (act !== 'sigmoid') continue;
        for (let i = A; i < A + size; i++) {
          const e = exp(-Math.abs(f[i]));
          f[i] = (f[i] < 0 ? e : 1) / (1 + e);
        }
        if (rounded) round(A, size);
      }
    }
    /** Cross-entropy and squared error of a batch, in FP32 as under autocast; their gradients, times S, enter the net in the format. */
    function loss(ids, S) {
      let ce = 0, mse = 0;
      for (const l of layers) { l.seen.fill(0); f.fill(0, l.G, l.G + B * l.n); }
      const c = f32(2 * WEIGHT / (PIXELS * B)) * S;
      ids.forEach((q, r) => {
        const z = f.subarray(name.A + 16 * r, name.A + 16 * r + 10), max = Math.max(...z), e = Array.from(z, v => exp(v - max));
        const s = e.reduce((a, b) => a + b);
        ce += log(s) - (z[data.y[q]] - max);
        for (let j = 0; j < 10; j++) f[name.G + 16 * r + j] = f32(f32(e[j] / s) - (j === data.y[q])) * (S / B);
        if (picture) for (let j = 0, a = picture.A + r * PIXELS, t = T + q * PIXELS, g = picture.G + r * PIXELS; j < PIXELS; j++) {
          const d = f32(f[a + j] - f[t + j]);
          mse += d * d;
          f[g + j] = d * c;
        }
      });
      for (const l of layers) if (!l.act) round(l.G, B * l.n, l.seen);
      return { ce: ce / B, mse: picture ? mse / (PIXELS * B) : NaN };
    }

    function backward() {
      const size = B * 64;
      f.fill(0, grad, grad + total);
      for (const { src, n, w, bias, T, G } of [...layers].reverse()) {
        const from = by[src];
        mm(grad + w, from.A, G, 64, n, B, 1, 64);
        for (let g = G; g < G + B * n; g += n) for (let j = 0; j < n; j++) f[grad + bias + j] += f[g + j];
        if (src === 'x') continue;
        f.fill(0, part, part + size);
        mm(part, G, T, B, 64, n, n, 1);
        for (let i = 0; i < size; i++) {
          const a = f[from.A + i];
          if (from.act === 'sigmoid') f[part + i] = f[part + i] * f32(a * f32(1 - a));
          else if (!(a > 0)) f[part + i] = 0;
        }
        round(part, size, from.seen);
        for (let i = 0; i < size; i++) f[from.G + i] += f[part + i];      // where two heads meet, they are added in the format
        round(from.G, size, from.seen);
      }
      for (const l of layers) l.large = round(grad + l.w, 65 * l.n);
    }
    /** Store a layer's v in eight bits: INT8, or the root of v in INT8 or E4M3. 256 neighbours share a scale. */
    function eight(l) {
      const fine = o.v === 'root e4m3', end = square + l.w + 65 * l.n;
      for (let a = square + l.w; a < end; a += 256) {
        const block = f.subarray(a, Math.min(a + 256, end));
        if (o.v !== 'int8') block.forEach((v, i) => { block[i] = Math.sqrt(v); });
        const unit = f32(block.reduce((p, v) => Math.max(p, v)) / (fine ? 448 : 127));
        for (let i = a; i < a + block.length; i++) {
          f[i] = unit && f[i] / unit;
          const M = fine ? E4M3[u[i] >>> 23 & 255] : 1.5 * 2 ** 52;
          f[i] = f32(f[i] + M - M) * unit;
        }
        if (o.v !== 'int8') block.forEach((v, i) => { block[i] = v * v; });
      }
    }
    /** Adam in FP32, the loss scale taken out first. Returns the share of weights that did not move. */
    function adam(S) {
      b1 *= .9; b2 *= .999;
      const rate = f32(o.lr / (1 - b1)), root = f32(Math.sqrt(1 - b2)), c1 = f32(.1), d2 = f32(.999), c2 = f32(.001), eps = f32(1e-8);
      if (!o.masters) f.copyWithin(low, master, master + total);
      for (let i = 0; i < total; i++) {
        const g = f32(f[grad + i] / S), m = f32(f[mean + i] + f32(c1 * f32(g - f[mean + i])));
        const v = f32(f32(d2 * f[square + i]) + f32(c2 * f32(g * g)));
        f[mean + i] = m;
        f[square + i] = v;
        f[master + i] -= f32(rate * f32(m / f32(f32(f32(Math.sqrt(v)) / root) + eps)));
      }
      if (o.v !== 'fp32') layers.forEach(eight);
      if (o.masters) return 0;
      round(master, total);
      return f.subarray(master, master + total).filter((w, i) => f[mean + i] && w === f[low + i]).length / total;
    }

    const order = Uint16Array.from({ length: data.train }, (_, i) => i);
    let next = data.train, it = 0, skipped = 0, good = 0, b1 = 1, b2 = 1;
    function batch() {
      if (next + B > data.train) {
        for (let i = data.train - 1; i > 0; i--) { const j = Math.floor(draw() * (i + 1)); [order[i], order[j]] = [order[j], order[i]]; }
        next = 0;
      }
      return order.subarray(next, next += B);
    }
    function step() {
      const ids = batch(), { k } = o, S = 2 ** k, x = by.x.A;
      f.copyWithin(low, master, master + total);
      round(low, total);
      for (const { n, w, T } of layers) for (let i = 0; i < 64; i++) for (let j = 0; j < n; j++) f[T + j * 64 + i] = f[low + w + i * n + j];
      ids.forEach((q, r) => f.copyWithin(x + 64 * r, X + 64 * q, X + 64 * q + 64));
      if (o.bad-- > 0) for (let i = x; i < x + 64 * B; i++) f[i] *= 2 ** 20;
      round(x, 64 * B);
      forward(B, low, true);
      const is = loss(ids, S);
      backward();
      const finite = f.subarray(grad, grad + total).every(g => Math.abs(g) < Infinity), still = finite ? adam(S) : 0;
      if (!finite) skipped++;
      good = finite ? good + 1 : 0;
      if (o.moves) o.k += !finite ? -1 : good % 25 ? 0 : 1;
      return { it: ++it, ...is, skipped, still, k: o.k };
    }
    /** How well it reads and draws new digits, in FP32: all of them, or only the five that are shown. */
    function score(all = true) {
      const n = all ? data.valid : 5, first = X + 64 * data.train, named = [];
      f.copyWithin(by.x.A, first, first + 64 * n);
      forward(n + 7 & ~7, master, false);
      let right = 0, error = 0;
      for (let r = 0; r < n; r++) {
        const z = f.subarray(name.A + 16 * r, name.A + 16 * r + 10);
        named.push(z.indexOf(Math.max(...z)));
        right += named[r] === data.y[data.train + r];
        if (picture) for (let j = r * PIXELS; j < (r + 1) * PIXELS; j++) error += (f[picture.A + j] - f[T + data.train * PIXELS + j]) ** 2;
      }
      return { named: named.slice(0, 5), ...picture && { drawn: f.slice(picture.A, picture.A + 5 * PIXELS) }, ...all && { acc: right / n, error: error / (n * PIXELS) } };
    }
    /** Of the last step's gradients behind each layer: [zero already, lost in this rounding, too large, all, too large among those of its weights]. */
    function fates() {
      return layers.map(({ n, real, G, seen, large = 0 }) => {
        const count = [0, 0, 0];
        for (let i = 0; i < B * n; i++) if (seen[i] & 2) count[2]++; else if (i % n < real && f[G + i] === 0) count[seen[i]]++;
        return [...count, B * real, large];
      });
    }
    /** FNV of all weights: two machines with the same one have done the same. */
    function hash() {
      let h = 14695981039346656037n;
      for (let i = master; i < master + total; i++) h = (h ^ BigInt(u[i])) * 1099511628211n & 0xFFFFFFFFFFFFFFFFn;
      return h.toString(16).padStart(16, '0');
    }
    const truth = { named: Array.from(data.y.subarray(data.train, data.train + 5)), drawn: f.slice(T + data.train * PIXELS, T + (data.train + 5) * PIXELS) };
    return { step, score, fates, hash, set, truth, layers: layers.map(l => l.name) };
  }

  /** Answer messages {build, set, steps, stop}; `post` gets {id, truth, layers} after a build, and {id, done, left, …} while the net trains. */
  function serve(post, given) {
    let data, net, id, left = 0, busy = false;
    const news = done => post({ id, done, left, fates: net.fates(), ...net.score(!left), ...!left && { hash: net.hash() } });
    function train() {
      const start = performance.now(), done = [];
      while (left > 0 && performance.now() - start < 60) { done.push(net.step()); left--; }
      news(done);
      busy = left > 0;
      if (busy) setTimeout(train);
    }
    return async ({ build: conf, set, steps, stop }) => {
      if (conf) {
        left = 0;
        data ??= await unpack(given);
        net = build(data, conf);
        id = conf.id;
        post({ id, truth: net.truth, layers: net.layers });
        if (!steps) news([]);
      }
      if (set) net?.set(set);
      if (stop) left = 0;
      if (steps) left = steps;
      if (left && !busy) { busy = true; train(); }
    };
  }
  return { unpack, build, serve };
}
