"""What a notebook depends on: the modules behind its cells, its moving figures, its studies.

The course and the claims ask the same question: would this chapter print something else today?
"""
import ast, hashlib, json, re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = re.compile(r'^#\| *(eval: *false|cuda)', re.M)


def code_cells(path):
    "(number from 1, id, source) of a notebook's code cells"
    cells = json.loads(Path(path).read_text(encoding='utf-8'))['cells']
    return [(i, c.get('id', str(i)), ''.join(c['source'])) for i, c in enumerate(cells, 1) if c['cell_type'] == 'code']


@cache
def public_names() -> dict: # name -> its module
    "What `from mpcourse import …` gives"
    tree = ast.parse((ROOT/'mpcourse/__init__.py').read_text(encoding='utf-8'))
    found = [n for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == '_NAMES']
    return {name: module for module, names in ast.literal_eval(found[0].value).items() for name in names}


def imported(
    code: str, # Python; lines of magic are left out
) -> set: # names of modules within the package
    "Which modules of mpcourse a piece of code imports, at its top or within a function, or names in a text"
    plain = '\n'.join(line for line in code.splitlines() if not re.match(r'\s*[%!?]', line))
    names, homes = set(), public_names()
    for n in ast.walk(ast.parse(plain)):
        if isinstance(n, ast.Constant): names |= set(re.findall(r'^mpcourse\.\w+$', str(n.value)))   # import_module('…')
        if isinstance(n, ast.Import): names |= {a.name for a in n.names if a.name.startswith('mpcourse.')}
        if not isinstance(n, ast.ImportFrom): continue
        base = n.module or ''
        if n.level: names |= {base} if base else {a.name for a in n.names}
        elif base == 'mpcourse': names |= {homes.get(a.name, a.name) for a in n.names}
        elif base.startswith('mpcourse.'): names.add(base)
    return {x.removeprefix('mpcourse.').split('.')[0] for x in names}


@cache
def module_files(
    module: str,   # name within the package
    package: Path, # its folder
) -> frozenset: # its file and those of all modules that it imports
    "What an import brings in"
    seen, todo = set(), [module]
    while todo:
        path = package/f'{todo.pop()}.py'
        if path in seen or not path.exists(): continue
        seen.add(path)
        todo += imported(path.read_text(encoding='utf-8'))
    return frozenset(seen)


def bare(code: str) -> str: # what of it runs
    "Code without comments and docstrings; as it is where a line is IPython's"
    try: tree = ast.parse(code)
    except SyntaxError: return code
    for n in ast.walk(tree):
        body = getattr(n, 'body', None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(getattr(body[0].value, 'value', None), str):
            del body[0]
    return ast.dump(tree)


def digest(*parts): return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:12]


def code_hash(
    sources: list,    # of code cells
    root: Path=ROOT,  # the folder that holds mpcourse/ and studies/
    figures: bool=True, # do figures that move count? They change a page, and no result
) -> str: # twelve hexadecimal digits
    "A fingerprint of what runs, not of what it says: cells, modules, figures that move, studies"
    package = root/'mpcourse'
    run = [s for s in sources if not NOT_RUN.search(s)]
    files = set().union(*(module_files(m, package) for s in run for m in imported(s)))
    said = '\n'.join(run)
    data = [p for p in sorted((root/'studies').glob('*.json')) if p.stem in said]
    if figures and 'Live(' in said: data += sorted((package/'live').glob('*.mjs'))
    code = [bare(s) for s in (*run, *(p.read_text(encoding='utf-8') for p in sorted(files)))]
    return digest(*code, *(p.read_text(encoding='utf-8') for p in data))
