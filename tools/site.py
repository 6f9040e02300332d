"""What `make site` runs: the Quarto site from the executed notebooks of `make course`.

nbdev and Quarto work in a copy of the project whose notebooks are the executed ones: the site
carries their plots, and nothing under nbs/ changes.
"""
import ast, configparser, os, re, shutil, subprocess, sys, tempfile
from functools import cache
from html import escape, unescape
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import nbformat
from nbconvert.filters.ansi import strip_ansi
from nbformat.v4 import new_markdown_cell, new_output
from tools.course import chapters, executed, is_fresh, run_course
from tools.fingerprints import code_cells
from tools.pages import (STATE, VIEW, directives, error_of, fold_earnest, html_of, is_check,
                         is_imports, join_imports, sharpen, statements, widget_html)
from tools.runtime import links

NO_QUARTO = ('The site is built with Quarto, and there is no `quarto` on the PATH: install it from '
             'https://quarto.org/docs/get-started/ and run `make site` again; '
             '`make course` makes pages without it.')
EXPORTS = 'export', 'exporti', 'exports'
FOLDS = 'code-fold', 'code-summary'


# --- a notebook for the site ---

def drop(
    src: str, # a code cell's source
    *names,   # directives of one line
) -> str: # the source without them
    "Take directives out of a cell"
    return re.sub(rf'^#\| *({"|".join(names)})\b.*\n?', '', src, flags=re.M)


def has(src, *names):
    "Whether a cell has one of these directives"
    return drop(src, *names) != src


def fold(src, summary):
    "The cell folded under a summary"
    return f'#| code-fold: true\n#| code-summary: "{summary}"\n{drop(src, *FOLDS)}'


def site_source(
    src: str, # a code cell's source
) -> str: # the source that nbdev is given
    "The library's code in full; imports and checkers as plain folded cells"
    if has(src, 'hide', 'default_exp'): return src
    plain = drop(src, *EXPORTS)
    if is_imports(plain): return fold(plain, 'Imports')
    if re.search(r'^def check_', plain, re.M): return fold(plain, 'The checker')
    if has(src, 'code-fold') and is_check(directives(src)[1]): return fold(src, 'Check')
    if plain == src: return src
    return '#| exports\n#| classes: exported\n' + drop(plain, *FOLDS)


def owner(
    node, # a function or class
) -> str: # 'FloatFormat.' of a method that `@patch` adds to it, or ''
    "The class that a method is added to"
    if 'patch' not in ' '.join(map(ast.unparse, node.decorator_list)): return ''
    return re.match(r'\w+', ast.unparse(node.args.args[0].annotation))[0] + '.'


def names(
    src: str, # a code cell's source
) -> list: # 'fit', 'FloatFormat', 'FloatFormat.decode'
    "The public functions and classes of an exported cell, and the methods that it adds to a class"
    if not has(src, *EXPORTS): return []
    found = []
    for node in statements(directives(src)[1]):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)): continue
        if not node.name.startswith('_'): found.append(owner(node) + node.name)
    return found


def heading_cell(names):
    "What links, the search and the table of contents find; styles.css shows only the code below it"
    return new_markdown_cell('\n\n'.join(f'### {name} {{.name}}' for name in names))


def html_output(html):
    "An output that Quarto leaves as it is"
    # no quotes around the attribute: the table may stand within a widget's JSON
    marked = ''.join(html).replace('<table', '<table data-quarto-disable-processing=true')
    return new_output('display_data', {'text/html': marked})


def site_output(output, state, number):
    "An output without a live widget; an error becomes html that the banner links to"
    if output.output_type == 'error':
        trace = escape(strip_ansi('\n'.join(output.traceback)))
        return html_output(f'<pre class="error" id="failed-{number}">{trace}</pre>')
    sharpen(output)
    if VIEW not in output.get('data', {}): return output
    return html_output(widget_html(output, state))


def banner(nb):
    "What went wrong in a chapter, with links to the cells that failed"
    items = []
    for number, cell in enumerate(nb.cells, 1):
        error = error_of(cell)
        if error is None: continue
        what = escape(f'{error.ename}: {error.evalue}'[:200])
        items.append(f'<a href="#failed-{number}">Cell {number}</a>: <code>{what}</code>')
    rows = ''.join(f'<li>{item}</li>' for item in items)
    head = '<b>This chapter failed when the site was built</b>'
    html = f'<div class="failed" role="alert">{head}<ul>{rows}</ul></div>'
    return new_markdown_cell(f'```{{=html}}\n{html}\n```')


def title_cell(cell, ch, failed):
    "The first cell with the chapter's number in its title, and a word where the chapter failed"
    number = f'{ch.number} · ' if ch.number.isdigit() else ''
    word = ' (failed)' if failed else ''
    cell.source = re.sub(r'^# +(.+)$', rf'# {number}\1{word}', cell.source, count=1, flags=re.M)
    cell.source += '\n\n- image: card.png'


def caption(cell):
    "Quarto drops the caption of a figure that moves: it goes into the cell's last output that does"
    text = escape(directives(cell.source)[0].get('fig-cap', ''))
    moves = [output for output in cell.outputs if re.search('mp-live|mp-explore', html_of(output))]
    if not text or not moves: return
    words = re.sub(r'`([^`]+)`', r'<code>\1</code>', text)
    cell.source = drop(cell.source, 'fig-cap', 'fig-alt')
    figure = f'<figure>{html_of(moves[-1])}<figcaption>{words}</figcaption></figure>'
    moves[-1].data['text/html'] = figure


def site_cell(cell, state, number):
    "A code cell as nbdev is to see it; one that failed is not hidden"
    if error_of(cell): cell.source = drop(cell.source, 'hide')
    cell.source = site_source(cell.source)
    cell.outputs = [site_output(output, state, number) for output in cell.outputs]
    for output in cell.outputs:
        html = html_of(output)
        # links to chapters: their pages have no number here
        if html: output.data['text/html'] = re.sub(r'(href="?)\d\d_(\w+\.html)', r'\1\2', html)
    caption(cell)
    skipped = cell.metadata.pop('mpcourse', {}).get('skipped')
    if skipped: cell.outputs = [html_output(f'<p class="not-run">{skipped}</p>')]


def for_site(nb, ch):
    "An executed notebook as nbdev and Quarto are given it"
    state = nb.metadata.pop('widgets', {}).get(STATE, {}).get('state', {})
    failed = is_failed(nb)
    title_cell(nb.cells[0], ch, failed)
    nb.cells = fold_earnest(join_imports(nb.cells))
    cells = [nb.cells[0]]
    if failed: cells.append(banner(nb))
    cells.append(new_markdown_cell(links(ch)))
    for number, cell in enumerate(nb.cells[1:], 2):
        if cell.cell_type == 'code':
            found = names(cell.source)
            if found: cells.append(heading_cell(found))
            site_cell(cell, state, number)
        cells.append(cell)
    nb.metadata.pop('mpcourse', None)
    nb.cells = cells
    return nb


# --- the build ---

def is_failed(nb):
    "Whether a cell failed when the notebook was run"
    return nb.metadata.get('mpcourse', {}).get('status', 'ok') != 'ok'


def stale(out):
    "The chapters without a good executed copy of their present source"
    found = []
    for ch in chapters(ROOT/'nbs'):
        nb = executed(ch, out)
        if nb is None or is_failed(nb) or not is_fresh(nb, ch): found.append(ch)
    return found


def copy_project(tmp, runs):
    "The project with its executed notebooks; nbdev adds no signatures: the whole code is shown"
    for name in ('settings.ini', 'setup.py', 'pyproject.toml', 'LICENSE'):
        shutil.copy(ROOT/name, tmp)
    with (tmp/'settings.ini').open('a') as f:
        f.write('\nskip_procs = add_show_docs,exec_show_docs,mv_exports\n')
    shutil.copytree(ROOT/'mpcourse', tmp/'mpcourse', ignore=shutil.ignore_patterns('__pycache__'))
    skip = shutil.ignore_patterns('*.ipynb', '.ipynb_checkpoints', '_proc')
    shutil.copytree(ROOT/'nbs', tmp/'nbs', ignore=skip)
    for ch, nb in runs: nbformat.write(for_site(nb, ch), tmp/'nbs'/ch.path.name)
    shutil.copy(ROOT/'README.md', tmp)  # after the notebooks: nbdev then leaves it alone


def build(
    runs: list, # (chapter, executed notebook) pairs
    docs: Path, # where the site is to stand
) -> str: # what went wrong, or ''
    "Build the site in a copy, then put it in place of the old one"
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp).resolve()
        copy_project(tmp, runs)
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(tmp),
               'PYTHONWARNINGS': 'ignore'}
        command = [Path(sys.executable).parent/'nbdev_docs']
        code = subprocess.run(command, cwd=tmp, env=env).returncode
        if code or not (tmp/'_docs/index.html').exists():
            return f'Quarto did not finish (exit code {code}): read its messages above.'
        finish(tmp/'_docs')
        shutil.rmtree(docs, ignore_errors=True)
        shutil.move(tmp/'_docs', docs)
    return ''


# --- the pages that Quarto wrote ---

LINK = re.compile(r'<a\b[^>]*?\bhref="([^"]*)"[^>]*>(.*?)</a>', re.S)
FROM_OUTSIDE = re.compile(r'<script\b[^>]*\bsrc="https?://[^>]*></script>\n?')
FOR_REQUIRE = re.compile(r"<script\b[^>]*>define\('jquery'.*?</script>\n?", re.S)


def host():
    "The address of the published site, with which nbdev begins each link to a name"
    config = configparser.ConfigParser(delimiters=['='])
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return config['DEFAULT']['doc_host'] + config['DEFAULT']['doc_baseurl'] + '/'


@cache
def anchors(page):
    "The names that links into a page may use"
    html = page.read_text(encoding='utf-8')
    return set(map(unescape, re.findall(r'\bid="([^"]+)"', html)))


def is_alive(href, page):
    "Whether a link from a page leads somewhere; links to other hosts are not looked at"
    if re.match(r'[a-z]+:|//', href): return True
    path, _, name = unquote(unescape(href)).partition('#')
    target = page
    if path: target = (page.parent/path.split('?')[0]).resolve()
    if target.is_dir(): target = target/'index.html'
    if not target.exists(): return False
    return not name or target.suffix != '.html' or name in anchors(target)


def known_names(
    page: Path, # of the site
) -> set: # names that its notebook imports from the library, or defines
    "What a link by nbdev may name: it looks names up in the whole library"
    known = set()
    for path in (ROOT/'nbs').glob('*.ipynb'):
        if path.stem.lstrip('0123456789_') != page.stem: continue
        for _, _, source in code_cells(path):
            imported = re.findall(r'^from mpcourse[.\w]* import (.+)$', source, re.M)
            known.update(re.findall(r'\w+', ' '.join(imported)))
            known.update(re.findall(r'^(?:def|class) (\w+)', source, re.M))
    return known


def finish_page(page):
    "Links to names become local, or plain text without an anchor; nothing is loaded from outside"
    known = known_names(page)
    def local(link):
        href = link[1].removeprefix(host())
        if href == link[1]: return link[0].replace('#LNone', '')
        word = re.search(r'\w+', re.sub('<[^>]*>', '', link[2]))
        if not is_alive(href, page) or word and word[0] not in known: return link[2]
        return link[0].replace(link[1], href)
    text = FROM_OUTSIDE.sub('', page.read_text(encoding='utf-8'))
    text = FOR_REQUIRE.sub('', text)
    # nbdev also links names in the comments of signatures, where Markdown is not read
    text = re.sub(rf'\[(`[^`]+`)\]\({re.escape(host())}[^)]*\)', r'\1', text)
    page.write_text(for_the_keyboard(LINK.sub(local, text)), encoding='utf-8')


def for_the_keyboard(text):
    "A link that skips the sidebar, callouts that open by keys, a search with a name"
    script = (ROOT/'tools/templates/site.js').read_text(encoding='utf-8')
    skip = '<a class="skip" href="#quarto-document-content">Skip to the text</a>'
    text = re.sub(r'<body[^>]*>', rf'\g<0>{skip}', text, count=1)
    return text.replace('</body>', f'<script>{script}</script></body>')


def finish(docs):
    "Put every page of the site right"
    anchors.cache_clear()
    for page in docs.glob('*.html'): finish_page(page)


def dead_links(
    docs: Path, # the site's folder
) -> list: # 'page: link' of each link or picture that leads nowhere
    "The local links that lead to no file or to no anchor"
    anchors.cache_clear()
    found = set()
    for page in docs.glob('*.html'):
        html = page.read_text(encoding='utf-8')
        for href in re.findall(r'<[a-z]+\b[^>]*?\b(?:href|src)="([^"]*)"', html):
            if not is_alive(href, page): found.add(f'{page.name}: {href}')
    return sorted(found)


def main():
    "Run what has changed, build the site; what went wrong as text, or None"
    if not shutil.which('quarto'): return NO_QUARTO
    out = ROOT/'_course'
    docs = ROOT/'_docs'
    todo = stale(out)
    if todo: run_course(' '.join(ch.stem for ch in todo), out, ROOT/'nbs')
    runs = [(ch, executed(ch, out)) for ch in chapters(ROOT/'nbs')]
    # before `build`, which changes the notebooks
    failed = [ch.stem for ch, nb in runs if is_failed(nb)]
    problem = build(runs, docs)
    if problem: return problem
    print(f'The site is in {docs/"index.html"}')
    if failed: return f'Chapters failed and are marked on the site: {", ".join(failed)}.'
    dead = dead_links(docs)
    if dead: return 'Links lead nowhere:\n' + '\n'.join(dead)


if __name__ == '__main__': sys.exit(main())
