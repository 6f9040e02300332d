// node live.mjs CASES.json: [[module, function, args, want], …]; prints what differs. Made by test_live.py.
// In args and wants: {$fmt: name} is a format, {$map: [[k, v], …]} a Map, 'inf', '-inf' and 'nan' are numbers.
import { readFileSync } from 'node:fs';

const here = new URL('../mpcourse/live/', import.meta.url), modules = {};
const load = async name => modules[name] ??= await import(new URL(`${name}.mjs`, here));
const { FORMATS } = await load('formats');

function read(v) {
  if (v === 'inf' || v === '-inf' || v === 'nan') return { inf: Infinity, '-inf': -Infinity, nan: NaN }[v];
  if (Array.isArray(v)) return v.map(read);
  if (v?.$fmt) return FORMATS[v.$fmt];
  if (v?.$map) return new Map(v.$map);
  return v && typeof v === 'object' ? Object.fromEntries(Object.entries(v).map(([k, x]) => [k, read(x)])) : v;
}
const same = (a, b) => Array.isArray(b) ? a?.length === b.length && b.every((x, i) => same(a[i], x))
  : b && typeof b === 'object' ? Object.keys(b).every(k => same(a?.[k], b[k])) : Object.is(a, b);

/** What some steps of the page's net leave: [conf, steps], one after another on the same net. */
async function trained(data, parts, plain) {
  const e = (await load('net')).engine((await load('base')).random), net = e.build(await e.unpack(data), parts[0][0], plain);
  let last;
  for (const [conf, steps] of parts) {
    net.set(conf);
    for (let i = 0; i < steps; i++) last = net.step();
  }
  return { ...last, hash: net.hash(), fates: net.fates() };
}

let wrong = 0;
const cases = JSON.parse(readFileSync(process.argv[2]));
for (const [module, name, args, want] of cases) {
  const got = name === 'trained' ? await trained(...read(args)) : (await load(module))[name](...read(args));
  if (!same(got, read(want)) && wrong++ < 5)
    console.log('differs:', name, JSON.stringify(args).slice(0, 300), 'wanted', JSON.stringify(want).slice(0, 200), 'got', got);
}
console.log(`${cases.length} compared, ${wrong} differ`);
process.exit(wrong || !cases.length ? 1 : 0);
