"""What a notebook depends on: the modules behind its cells, its moving figures, its studies.

The course and the claims ask the same question: would this chapter print something else today?
"""
import ast, hashlib, json, re
from functools import cache
from itertools import filterfalse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = re.compile(r'^#\| *(eval: *false|cuda)', re.M)


def read_text(path):
    "The text of a file"
    return Path(path).read_text(encoding='utf-8')


def code_cells(path):
    "(number from 1, id, source) of a notebook's code cells"
    cells = json.loads(read_text(path))['cells']
    return [(number, cell.get('id', str(number)), ''.join(cell['source']))
            for number, cell in enumerate(cells, 1) if cell['cell_type'] == 'code']


# --- modules ---

@cache
def public_names() -> dict: # name -> its module
    "What `from mpcourse import …` gives"
    tree = ast.parse(read_text(ROOT/'mpcourse/__init__.py'))
    homes = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or node.targets[0].id != '_NAMES': continue
        for module, names in ast.literal_eval(node.value).items():
            homes.update(dict.fromkeys(names, module))
    return homes


def imported_from(
    node: ast.ImportFrom,
) -> set: # 'mpcourse.rounding', 'torch.nn'
    "The modules that a `from … import …` needs, with their packages"
    module = node.module or ''
    if node.level: module = f'mpcourse.{module}'.rstrip('.')
    if module != 'mpcourse': return {module}
    homes = public_names()
    return {f'mpcourse.{homes.get(alias.name, alias.name)}' for alias in node.names}


@cache
def imported(
    code: str, # Python; lines of magic are left out
) -> frozenset: # names of modules within the package
    "Which modules of mpcourse a piece of code imports, at its top or within a function"
    python = re.sub(r'^[ \t]*[%!?].*$', '', code, flags=re.M)
    names = set()
    for node in ast.walk(ast.parse(python)):
        if isinstance(node, ast.ImportFrom): names |= imported_from(node)
        elif isinstance(node, ast.Import):
            for alias in node.names: names.add(alias.name)
        elif isinstance(node, ast.Constant) and re.match(r'mpcourse\.\w+$', str(node.value)):
            names.add(node.value)     # import_module('…')
    return frozenset(name.split('.')[1] for name in names if name.startswith('mpcourse.'))


@cache
def module_files(
    module: str,   # name within the package
    package: Path, # its folder
) -> frozenset: # its file and those of all modules that it imports
    "What an import brings in"
    files = set()
    todo = [module]
    while todo:
        path = package/f'{todo.pop()}.py'
        if path in files or not path.exists(): continue
        files.add(path)
        todo += imported(read_text(path))
    return frozenset(files)


# --- fingerprints ---

@cache
def bare(code: str) -> str: # what of it runs
    "Code without comments and docstrings; as it is where a line is IPython's"
    try: tree = ast.parse(code)
    except SyntaxError: return code
    for node in ast.walk(tree):
        match getattr(node, 'body', None):
            case [ast.Expr(value=ast.Constant(value=str())), *_]: del node.body[0]
    return ast.dump(tree)


def digest(*parts):
    "Twelve hexadecimal digits that differ where a part differs"
    return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:12]


def code_hash(
    sources: list,      # of code cells
    root: Path=ROOT,    # the folder that holds mpcourse/ and studies/
    figures: bool=True, # do figures that move count? They change a page, and no result
) -> str: # twelve hexadecimal digits
    "A fingerprint of what runs, not of what it says: cells, modules, figures that move, studies"
    package = root/'mpcourse'
    cells = list(filterfalse(NOT_RUN.search, sources))
    whole = '\n'.join(cells)
    modules = set()
    for name in set().union(*map(imported, cells)): modules |= module_files(name, package)
    data = [study for study in sorted((root/'studies').glob('*.json')) if study.stem in whole]
    if figures and 'Live(' in whole: data += sorted((package/'live').glob('*.mjs'))
    code = [*cells, *map(read_text, sorted(modules))]
    return digest(*map(bare, code), *map(read_text, data))
