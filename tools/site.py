"""What `make site` runs: the Quarto site from the executed notebooks of `make course`, so that it carries their plots.

nbdev and Quarto work in a copy of the project whose notebooks are the executed ones, so nothing under nbs/ changes.
"""
import ast, configparser, os, re, shutil, subprocess, sys, tempfile
from functools import cache
from html import escape, unescape
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import nbformat
from nbformat.v4 import new_markdown_cell, new_output
from tools.course import chapters, executed, is_fresh, run_course
from tools.runtime import links
from tools.pages import directives, fold_earnest, is_check, is_imports, join_imports, sharpen, widget_html

VIEW, STATE = 'application/vnd.jupyter.widget-view+json', 'application/vnd.jupyter.widget-state+json'
NO_QUARTO = ('The site is built with Quarto, and there is no `quarto` on the PATH: install it from '
             'https://quarto.org/docs/get-started/ and run `make site` again; `make course` makes pages without it.')


# --- a notebook for the site ---

def drop(
    src: str, # a code cell's source
    *names,   # directives of one line
) -> str: # the source without them
    "Take directives out of a cell"
    return re.sub(rf'^#\| *({"|".join(names)})\b.*\n?', '', src, flags=re.M)


def has(src, *names): return drop(src, *names) != src


def fold(src, summary):
    "The cell folded under a summary"
    return f'#| code-fold: true\n#| code-summary: "{summary}"\n{drop(src, "code-fold", "code-summary")}'


def site_source(
    src: str, # a code cell's source
) -> str: # the source that nbdev is given
    "The library's code in full; imports and checkers as plain folded cells"
    if has(src, 'hide', 'default_exp'): return src
    plain = drop(src, 'export', 'exporti', 'exports')
    if is_imports(plain): return fold(plain, 'Imports')
    if re.search(r'^def check_', plain, re.M): return fold(plain, 'The checker')
    if has(src, 'code-fold') and is_check(directives(src)[1]): return fold(src, 'Check')
    if not has(src, 'export', 'exporti', 'exports'): return src
    return '#| exports\n#| classes: exported\n' + drop(plain, 'code-fold', 'code-summary')


def names(
    src: str, # a code cell's source
) -> list: # 'fit', 'FloatFormat', 'FloatFormat.decode'
    "The public functions and classes of an exported cell, and the methods that it adds to a class"
    found = []
    for node in ast.parse(directives(src)[1]).body if has(src, 'export', 'exporti', 'exports') else ():
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith('_'): continue
        patched = any('patch' in ast.unparse(d) for d in node.decorator_list)
        owner = re.match(r'\w+', ast.unparse(node.args.args[0].annotation))[0] + '.' if patched else ''
        found.append(owner + node.name)
    return found


def heading_cell(names):
    "What links, the search and the table of contents find; styles.css shows no more than the code that follows"
    return new_markdown_cell('\n\n'.join(f'### {name} {{.name}}' for name in names))


def html_output(html):
    "An output that Quarto leaves as it is; the attribute has no quotes, so that it does no harm within a widget's JSON"
    as_it_is = ''.join(html).replace('<table', '<table data-quarto-disable-processing=true')
    return new_output('display_data', {'text/html': as_it_is})


def site_output(out, state, no):
    "An output without a live widget; an error becomes html that the banner links to"
    if out.output_type == 'error':
        lines = re.sub(r'\x1b\[[0-9;]*m', '', '\n'.join(out.traceback))
        return html_output(f'<pre class="error" id="failed-{no}">{escape(lines)}</pre>')
    sharpen(out)
    return html_output(widget_html(out, state)) if VIEW in out.get('data', {}) else out


def banner(nb):
    "What went wrong in a chapter, with links to the cells that failed"
    failed = [(i, o) for i,c in enumerate(nb.cells, 1) for o in c.get('outputs', []) if o.output_type == 'error']
    items = [f'<a href="#failed-{i}">Cell {i}</a>: <code>{escape(f"{o.ename}: {o.evalue}"[:200])}</code>'
             for i,o in failed]
    items = items or [escape(nb.metadata.mpcourse.get('error', ''))]
    rows = ''.join(f'<li>{s}</li>' for s in items)
    html = f'<div class="failed" role="alert"><b>This chapter failed when the site was built</b><ul>{rows}</ul></div>'
    return new_markdown_cell(f'```{{=html}}\n{html}\n```')


def title_cell(cell, ch, failed):
    "The first cell with the chapter's number in its title, and a word where the chapter failed"
    number = f'{ch.number} · ' if ch.number.isdigit() else ''
    cell.source = re.sub(r'^# +(.+)$', rf'# {number}\1{" (failed)"*failed}', cell.source, count=1, flags=re.M)
    cell.source += '\n\n- image: card.png'


def without_numbers(html):
    "Links of an output to other chapters, whose pages have no number here"
    return re.sub(r'(href="?)\d\d_(\w+\.html)', r'\1\2', html)


def site_cell(cell, state, no):
    "A code cell as nbdev is to see it; one that failed is not hidden"
    if any(o.output_type == 'error' for o in cell.outputs): cell.source = drop(cell.source, 'hide')
    cell.source = site_source(cell.source)
    cell.outputs = [site_output(o, state, no) for o in cell.outputs]
    for o in cell.outputs:
        if html := o.get('data', {}).get('text/html'): o.data['text/html'] = without_numbers(''.join(html))
    moves = [o for o in cell.outputs if re.search('mp-live|mp-explore', str(o.get('data', {}).get('text/html', '')))]
    if moves and has(cell.source, 'fig-cap'): caption(cell, moves[-1])
    note = cell.metadata.pop('mpcourse', {}).get('skipped')
    if note: cell.outputs = [html_output(f'<p class="not-run">{note}</p>')]


def caption(cell, out):
    "Quarto drops the caption of an html output: it goes into the output"
    text = directives(cell.source)[0]['fig-cap']
    told = re.sub(r'`([^`]+)`', r'<code>\1</code>', escape(text))
    cell.source = drop(cell.source, 'fig-cap', 'fig-alt')
    out.data['text/html'] = f'<figure>{"".join(out.data["text/html"])}<figcaption>{told}</figcaption></figure>'


def for_site(nb, ch):
    "An executed notebook as nbdev and Quarto are given it"
    state = nb.metadata.pop('widgets', {}).get(STATE, {}).get('state', {})
    failed = is_failed(nb)
    title_cell(nb.cells[0], ch, failed)
    nb.cells = fold_earnest(join_imports(nb.cells))
    top = [nb.cells[0], *[banner(nb)]*failed, new_markdown_cell(links(ch))]
    body = []
    for no, cell in enumerate(nb.cells[1:], 2):
        if cell.cell_type == 'code':
            if found := names(cell.source): body.append(heading_cell(found))
            site_cell(cell, state, no)
        body.append(cell)
    nb.metadata.pop('mpcourse', None)
    nb.cells = top + body
    return nb


# --- the build ---

def is_failed(nb): return nb.metadata.get('mpcourse', {}).get('status', 'ok') != 'ok'


def stale(out):
    "The chapters without a good executed copy of their present source"
    def is_good(ch, nb): return nb is not None and is_fresh(nb, ch) and not is_failed(nb)
    return [ch for ch in chapters(ROOT/'nbs') if not is_good(ch, executed(ch, out))]


def copy_project(tmp, runs):
    "The project with its executed notebooks; nbdev adds no signatures, since the whole code is shown"
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', 'LICENSE'): shutil.copy(ROOT/f, tmp)
    with (tmp/'settings.ini').open('a') as f: f.write('\nskip_procs = add_show_docs,exec_show_docs,mv_exports\n')
    shutil.copytree(ROOT/'mpcourse', tmp/'mpcourse', ignore=shutil.ignore_patterns('__pycache__'))
    skip = shutil.ignore_patterns('*.ipynb', '.ipynb_checkpoints', '_proc')
    shutil.copytree(ROOT/'nbs', tmp/'nbs', ignore=skip)
    for ch,nb in runs: nbformat.write(for_site(nb, ch), tmp/'nbs'/ch.path.name)
    shutil.copy(ROOT/'README.md', tmp)  # after the notebooks: nbdev then leaves it alone


def build(
    runs: list, # (chapter, executed notebook) pairs
    docs: Path, # where the site is to stand
) -> str: # what went wrong, or ''
    "Build the site in a copy, then put it in place of the old one"
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp).resolve()
        copy_project(tmp, runs)
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(tmp), 'PYTHONWARNINGS': 'ignore'}
        code = subprocess.run([Path(sys.executable).parent/'nbdev_docs'], cwd=tmp, env=env).returncode
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
    cfg = configparser.ConfigParser(delimiters=['='])
    cfg.read(ROOT/'settings.ini', encoding='utf-8')
    return cfg['DEFAULT']['doc_host'] + cfg['DEFAULT']['doc_baseurl'] + '/'


@cache
def anchors(page):
    "The names that links into a page may use"
    return {unescape(i) for i in re.findall(r'\bid="([^"]+)"', page.read_text(encoding='utf-8'))}


def is_alive(href, page):
    "Whether a link from a page leads somewhere; links to other hosts are not looked at"
    if re.match(r'[a-z]+:|//', href): return True
    path, _, name = unquote(unescape(href)).partition('#')
    target = (page.parent/path.split('?')[0]).resolve() if path else page
    if target.is_dir(): target = target/'index.html'
    return target.exists() and (not name or target.suffix != '.html' or name in anchors(target))


def finish_page(page):
    "Links to names become local, or plain text where the name has no anchor; nothing is loaded from outside"
    def local(m):
        href = m[1].removeprefix(host())
        if href == m[1]: return m[0].replace('#LNone', '')
        return m[0].replace(m[1], href) if is_alive(href, page) else m[2]
    text = FOR_REQUIRE.sub('', FROM_OUTSIDE.sub('', page.read_text(encoding='utf-8')))
    # nbdev also links names in the comments of signatures, where Markdown is not read
    text = re.sub(rf'\[(`[^`]+`)\]\({re.escape(host())}[^)]*\)', r'\1', text)
    page.write_text(for_the_keyboard(LINK.sub(local, text)), encoding='utf-8')


def for_the_keyboard(text):
    "A link that skips the sidebar, callouts that open by keys, a search with a name"
    script = (ROOT/'tools/templates/site.js').read_text(encoding='utf-8')
    text = re.sub(r'<body[^>]*>', r'\g<0><a class="skip" href="#quarto-document-content">Skip to the text</a>', text, count=1)
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
    found = {(p, h) for p in sorted(docs.glob('*.html'))
             for h in re.findall(r'<[a-z]+\b[^>]*?\b(?:href|src)="([^"]*)"', p.read_text(encoding='utf-8'))}
    return sorted(f'{p.name}: {h}' for p,h in found if not h.startswith('data:') and not is_alive(h, p))


def main():
    if not shutil.which('quarto'): return NO_QUARTO
    out, docs = ROOT/'_course', ROOT/'_docs'
    if todo := stale(out): run_course(' '.join(c.stem for c in todo), out, ROOT/'nbs')
    runs = [(ch, executed(ch, out)) for ch in chapters(ROOT/'nbs')]
    failed = [ch.stem for ch,nb in runs if is_failed(nb)]
    if problem := build(runs, docs): return problem
    print(f'The site is in {docs/"index.html"}')
    if failed: return f'Chapters failed and are marked on the site: {", ".join(failed)}.'
    if dead := dead_links(docs): return 'Links lead nowhere:\n' + '\n'.join(dead)


if __name__ == '__main__': sys.exit(main())
