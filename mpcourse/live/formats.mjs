// Casts to few bits, exactly as the course's own: round to nearest, ties to even, or stochastically.
//   special 'inf': the top exponent holds infinity and NaN; 'nan': one code is NaN; 'none': it saturates

const format = (exponent, fraction, special, color) => {
  const bias = 2 ** (exponent - 1) - 1, emin = 1 - bias, codes = 2 ** fraction;
  const emax = special === 'inf' ? bias : bias + 1, last = 2 - (special === 'nan' ? 2 : 1) / codes;
  return { exponent, fraction, special, color, bias, emin, emax, tiny: 2 ** emin,
    smallest: 2 ** (emin - fraction), max: last * 2 ** emax };
};

export const FORMATS = {
  fp32: format(8, 23, 'inf', '#333333'), fp16: format(5, 10, 'inf', '#D55E00'),
  bf16: format(8, 7, 'inf', '#0072B2'), e5m2: format(5, 2, 'inf', '#CC79A7'),
  e4m3: format(4, 3, 'nan', '#009E73'), e2m1: format(2, 1, 'none', '#D9A400') };
FORMATS.e2m1.max = 6; FORMATS.e2m1.emax = 2;

/** The exponent of a number above zero: 2^e ≤ x < 2^(e+1). */
export function exponentOf(x) {
  let e = Math.floor(Math.log2(x));
  if (2 ** e > x) e -= 1;
  return 2 ** (e + 1) <= x ? e + 1 : e;
}

/** The distance to the next number of the format, at x. */
export const spacing = (x, f) => 2 ** (Math.max(x ? exponentOf(Math.abs(x)) : f.emin, f.emin) - f.fraction);

/** The next number of the format above a finite one, or below it; the largest one has none. */
export function next(v, f, up) {
  const outward = v === 0 || (v > 0) === up, size = Math.abs(v), sign = v === 0 ? (up ? 1 : -1) : Math.sign(v);
  if (outward) return sign * Math.min(size + spacing(v, f), f.max);
  const inner = size === 2 ** exponentOf(size) && size > f.tiny ? spacing(v, f) / 2 : spacing(v, f);
  return sign * (size - inner);
}

const toEven = x => { const r = Math.round(x); return r - x === .5 && r % 2 ? r - 1 : r; };

/** What becomes of x: nearest (ties to even), or stochastic with a random number u from [0, 1). */
export function cast(x, f, u = null, saturate = false) {
  if (Number.isNaN(x) && f.special === 'none') return f.max;      // no code is left for it: hardware saturates
  if (Math.abs(x) === Infinity) return saturate || f.special === 'none' ? Math.sign(x) * f.max : f.special === 'inf' ? x : NaN;
  if (Number.isNaN(x)) return x;
  const step = spacing(x, f), size = Math.abs(x);
  const q = step * (u === null ? toEven(size / step) : Math.floor(size / step + u));
  if (q <= f.max) return x < 0 || Object.is(x, -0) ? -q : q;
  if (saturate || f.special === 'none') return Math.sign(x) * f.max;
  return f.special === 'inf' ? Math.sign(x) * Infinity : NaN;
}

/** The code of a number of the format, as 0s and 1s: [sign, exponent, fraction]. */
export function bitsOf(x, f) {
  const sign = x < 0 || Object.is(x, -0) ? '1' : '0', size = Math.abs(x);
  const text = (n, width) => n.toString(2).padStart(width, '0');
  if (Number.isNaN(x)) return ['0', '1'.repeat(f.exponent), '1'.repeat(f.fraction)];
  if (size === Infinity) return [sign, '1'.repeat(f.exponent), '0'.repeat(f.fraction)];
  const normal = size >= f.tiny, e = normal ? exponentOf(size) : f.emin;
  const digits = size / 2 ** (e - f.fraction) - (normal ? 2 ** f.fraction : 0);
  return [sign, text(normal ? e + f.bias : 0, f.exponent), text(digits, f.fraction)];
}

/** The number that a code stands for. */
export function numberOf([sign, exponent, fraction], f) {
  const e = parseInt(exponent, 2), m = parseInt(fraction, 2), s = sign === '1' ? -1 : 1;
  const top = !exponent.includes('0');
  if (f.special === 'inf' && top) return m ? NaN : s * Infinity;
  if (f.special === 'nan' && top && !fraction.includes('0')) return NaN;
  return s * (e ? (1 + m / 2 ** f.fraction) * 2 ** (e - f.bias) : m * f.smallest);
}

/** A number as people read it: all digits of a short one, else some. */
export const shown = x => Number.isNaN(x) ? 'NaN' : !Number.isFinite(x) ? (x < 0 ? '−∞' : '∞') : Object.is(x, -0) ? '−0'
  : String(x).length <= 14 ? String(x).replace('-', '−') : x.toPrecision(9).replaceAll('-', '−');
