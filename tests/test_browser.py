"In a real Chromium: each widget moves in JupyterLab, and in its page with the network off"
import json, os, re, shutil, socket, subprocess, sys, time, urllib.request
from pathlib import Path

import pytest
from conftest import barriers, NBS, ROOT

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]


def holds_widget(path):
    "Whether a cell of a notebook, not one that defines a function, shows an explorer"
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    code = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
    return any(re.search(r'^(?!\s|def ).*\b(explore|\w+_explorer)\(', re.sub(r'^#\|.*$', '', c, flags=re.M), re.M) for c in code)


WIDGETS = [p for p in NBS if holds_widget(p)]
LIVE = [p for p in NBS if re.search(r'^ *"Live\(', p.read_text(encoding='utf-8'), re.M)]


# --- pages, without a kernel and without a network ---

def offline_page(browser, path):
    "Open a file with every request but that for the file itself refused; returns the page and what it asked for"
    page, asked = browser.new_page(), []
    def gate(route):
        if route.request.url == path.as_uri(): return route.continue_()
        asked.append(route.request.url)
        route.abort()
    page.route('**/*', gate)
    problems = []
    page.on('pageerror', lambda e: problems.append(str(e)))
    page.on('console', lambda m: problems.append(m.text) if m.type == 'error' else None)
    browser.set_offline(True)
    page.goto(path.as_uri())
    return page, asked, problems


def unfold(page):
    "Open every section that is folded"
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")


def shown(box): return box.locator('.mp-frame').inner_html()


def move(control):
    "Move a slider by a step, or choose the next entry of a menu; returns the new position"
    before = control.input_value()
    control.focus()
    if control.evaluate('e => e.tagName') == 'SELECT':
        n = control.locator('option').count()
        control.select_option(index=(int(before) + 1) % n)
    else: control.press('ArrowLeft' if before == control.get_attribute('max') else 'ArrowRight')
    assert control.input_value() != before
    return control.input_value()


def positions(control):
    "How many positions a control has"
    if control.evaluate('e => e.tagName') == 'SELECT': return control.locator('option').count()
    return int(control.get_attribute('max')) + 1


def moves_the_frame(box, control):
    "Whether some position of a control shows another frame than the present one"
    first = shown(box)
    for _ in range(positions(control)):
        move(control)
        if shown(box) != first: return True
    return False


@pytest.mark.parametrize('path', LIVE, ids=lambda p: p.stem)
def test_live_figures_are_drawn_offline(browser, course_pages, path):
    "Each in place of its still picture, and moved by its first slider or button"
    file = course_pages/f'{path.stem}.html'
    if not file.exists(): pytest.skip('this chapter has not been run: make course')
    page, asked, problems = offline_page(browser, file)
    try:
        boxes = page.locator('.mp-live')
        assert boxes.count() > 0 and boxes.count() == page.locator('.mp-live.mpx').count()
        unfold(page)
        for box in boxes.all():
            before, control = box.inner_html(), box.locator('input[type=range]:visible, button:visible').first
            control.focus()
            keys = ('ArrowRight', 'ArrowLeft') if control.get_attribute('type') == 'range' else ('Enter',)
            assert any(page.keyboard.press(key) or box.inner_html() != before for key in keys)
        assert asked == [] and problems == []
    finally: page.close()


@pytest.mark.sweep(3)
@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('path', [p for p in NBS if p.stem in ('index', '01_formats', '07_master', '14_simulator', '15_monitor')], ids=lambda p: p.stem)
def test_no_barrier_on_a_phone(browser, course_pages, path, scheme):
    file = course_pages/f'{path.stem}.html'
    if not file.exists(): pytest.skip('this chapter has not been run: make course')
    page = browser.new_page()
    try:
        page.set_viewport_size({'width': 390, 'height': 800})
        page.emulate_media(color_scheme=scheme)
        page.goto(file.as_uri())
        assert barriers(page) == []
        page.keyboard.press('Tab')
        assert page.evaluate('document.activeElement.className') == 'skip'
    finally: page.close()


@pytest.mark.parametrize('path', WIDGETS, ids=lambda p: p.stem)
def test_page_moves_offline(browser, course_pages, path):
    file = course_pages/f'{path.stem}.html'
    if not file.exists(): pytest.skip('this chapter has not been run: make course')
    page, asked, problems = offline_page(browser, file)
    try:
        unfold(page)
        boxes = page.locator('.mp-explore')
        assert boxes.count() > 0, 'the page carries no widget that moves'
        for i in range(boxes.count()):
            box = boxes.nth(i)
            controls = box.locator('[data-k]')
            assert controls.count() > 0
            for k in range(controls.count()): assert moves_the_frame(box, controls.nth(k)), f'control {k} of widget {i} changes nothing'
        assert asked == [] and problems == []
    finally:
        browser.set_offline(False)
        page.close()


SQUEEZED = '''() => [
    ...[...document.querySelectorAll('main figure img')].filter(i => i.offsetParent && i.getBoundingClientRect().width < 500).map(i => i.alt),
    ...[...document.querySelectorAll('main tr')].filter(r => r.getBoundingClientRect().height > 400).map(r => r.textContent),
    ...[...document.querySelectorAll('main td:first-child code')].filter(c => /^\\w+$/.test(c.textContent) && c.getClientRects().length > 1).map(c => c.textContent)]'''


@pytest.mark.sweep(6)
@pytest.mark.parametrize('path', NBS, ids=lambda p: p.stem)
def test_page_shows_offline_on_desktop_and_phone(browser, course_pages, path):
    file = course_pages/f'{path.stem}.html'
    if not file.exists(): pytest.skip('this chapter has not been run: make course')
    page, asked, problems = offline_page(browser, file)
    try:
        for width in (1280, 390):
            page.set_viewport_size({'width': width, 'height': 900})
            assert page.evaluate('document.documentElement.scrollWidth') <= width, f'the page is wider than {width} pixels'
            assert page.locator('h1').bounding_box()['width'] > 200
        assert page.evaluate(SQUEEZED) == [], 'too small to be read on a phone'
        broken = page.evaluate('[...document.images].filter(i => i.complete && !i.naturalWidth).length')
        small = page.evaluate('[...document.querySelectorAll("math")].filter(m => m.offsetParent && m.getBoundingClientRect().width < 2).length')
        assert broken == 0 and small == 0 and asked == [] and problems == []
    finally:
        browser.set_offline(False)
        page.close()


def test_callout_unfolds(browser, course_pages):
    with_solutions = [p for p in NBS if (f := course_pages/f'{p.stem}.html').exists() and '<details class="callout' in f.read_text()]
    if not with_solutions: pytest.skip('no page has a callout')
    page, *_ = offline_page(browser, course_pages/f'{with_solutions[0].stem}.html')
    try:
        box = page.locator('details.callout').nth(page.evaluate(
            '[...document.querySelectorAll("details.callout")].findIndex(d => !d.open)'))
        body = box.locator(':scope > .callout-body')
        assert not body.is_visible()
        box.locator(':scope > summary').click()
        assert body.is_visible()
    finally:
        browser.set_offline(False)
        page.close()


# --- JupyterLab ---

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def lab_settings(folder):
    "Settings under which the whole notebook is in the page, seen or not, and nothing asks for news"
    for plugin, value in {'@jupyterlab/notebook-extension/tracker': {'windowingMode': 'none'},
                          '@jupyterlab/apputils-extension/notification': {'fetchNews': 'false', 'checkForUpdates': False}}.items():
        f = folder/f'{plugin}.jupyterlab-settings'
        f.parent.mkdir(parents=True, exist_ok=True)
        f.write_text(json.dumps(value))
    return folder


def write_keys(nbs):
    "A notebook with a figure between two headings"
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, writes
    shown = "Live('number_line', dict(fmt='fp16', w=1., k=-12, mode='nearest'), plt.subplots()[0])"
    cells = [new_markdown_cell('# A'), new_code_cell(f'import matplotlib.pyplot as plt\nfrom mpcourse.plots import Live\n{shown}'),
             *(new_markdown_cell(f'# {c}') for c in 'BCDE')]
    (nbs/'keys.ipynb').write_text(writes(new_notebook(cells=cells)), encoding='utf-8')


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "A JupyterLab on a copy of the notebooks; its address"
    pytest.importorskip('jupyterlab')
    tmp = tmp_path_factory.mktemp('lab')
    shutil.copytree(ROOT/'nbs', tmp/'nbs', symlinks=True, ignore=shutil.ignore_patterns('.ipynb_checkpoints'))
    write_keys(tmp/'nbs')
    port = free_port()
    env = {**os.environ, 'JUPYTERLAB_SETTINGS_DIR': str(lab_settings(tmp/'settings')), 'JUPYTERLAB_WORKSPACES_DIR': str(tmp/'workspaces'),
           'JUPYTER_CONFIG_DIR': str(tmp/'config'), 'IPYTHONDIR': str(tmp/'ipython'), 'OMP_NUM_THREADS': '1'}
    env.pop('MPCOURSE_PAGES', None)
    with open(tmp/'log', 'w') as log:
        proc = subprocess.Popen([Path(sys.executable).parent/'jupyter-lab', '--no-browser', '--ip', '127.0.0.1', '--port', str(port), '--allow-root',
                                 '--ServerApp.port_retries=0', '--IdentityProvider.token=', f'--notebook-dir={tmp/"nbs"}'], env=env, stdout=log, stderr=log)
    url = f'http://127.0.0.1:{port}'
    try:
        for _ in range(120):
            time.sleep(.5)
            assert proc.poll() is None, (tmp/'log').read_text()[-2000:]
            try: urllib.request.urlopen(f'{url}/api/status', timeout=2); break
            except OSError: continue
        else: pytest.fail((tmp/'log').read_text()[-2000:])
        yield url
    finally:
        proc.terminate()
        try: proc.wait(15)
        except subprocess.TimeoutExpired: proc.kill()


IDLE = '.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook-ExecutionIndicator[data-status=idle]'


STARTED = "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].some(e => /\\[[\\d*]+\\]/.test(e.textContent))"


def run_all_cells(page, url, name):
    "Open a notebook in JupyterLab and run it to its end"
    page.goto(f'{url}/lab/tree/{name}?reset')
    page.wait_for_selector(IDLE, timeout=90_000)
    # JupyterLab may ask something at any moment: whatever it is, accept it, also when it comes between two clicks
    page.add_locator_handler(page.locator('.jp-Dialog .jp-mod-accept').first, lambda button: button.click(),
                             no_wait_after=True)    # a second dialog may stand where the first one was
    for attempt in range(6):  # a menu that is clicked while JupyterLab still settles may close again
        try:
            page.get_by_role('menuitem', name='Run', exact=True).click(timeout=8_000)
            page.get_by_text('Run All Cells', exact=True).first.click(timeout=8_000)
            page.wait_for_function(STARTED, timeout=15_000)
            break
        except Exception:
            if attempt == 5: raise
            page.keyboard.press('Escape')
    page.wait_for_function('''() => {
        const prompts = [...document.querySelectorAll('.jp-CodeCell')].filter(c => c.querySelector('.cm-content')?.textContent.trim());
        return prompts.length && !prompts.some(c => /\\[\\*\\]/.test(c.querySelector('.jp-InputPrompt').textContent))}''', timeout=180_000)
    page.wait_for_selector(IDLE, timeout=90_000)
    errors = page.locator('.jp-RenderedText[data-mime-type="application/vnd.jupyter.error"]')
    assert errors.count() == 0, errors.first.inner_text()[-500:]


def drag(page, handle, dx):
    "Drag a slider's handle sideways"
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    x, y = box['x'] + box['width']/2, box['y'] + box['height']/2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + dx, y, steps=6)
    page.mouse.up()


def state(widget):
    "What a widget shows: its controls' readouts, and its picture or text"
    readouts = widget.locator('.widget-readout').all_inner_texts()
    return readouts, widget.locator('.widget-html-content').last.inner_html()


def changed(page, widget, before, seconds=15):
    "Wait until both readouts and picture differ from before"
    for _ in range(int(seconds*5)):
        now = state(widget)
        if now[0] != before[0] and now[1] != before[1]: return True
        page.wait_for_timeout(200)
    return False


def slides(page, widget, handle):
    "Whether dragging a handle to either side, or by its keys, changes data and picture"
    before = state(widget)
    for dx in (60, -120):
        drag(page, handle, dx)
        if changed(page, widget, before, 5): return True
    handle.focus()
    for _ in range(5): handle.press('ArrowRight')
    return changed(page, widget, before)


# all widgets are made by `explore` or `Live`, and each is moved on its page above: a chapter of few seconds stands for them here
@pytest.mark.sweep(0)
@pytest.mark.parametrize('path', [p for p in WIDGETS if p.stem == '90_plots'], ids=lambda p: p.stem)
def test_sliders_move_in_jupyterlab(browser, lab, path):
    page = browser.new_page()
    page.set_viewport_size({'width': 1400, 'height': 1000})
    try:
        run_all_cells(page, lab, path.name)
        widgets = page.locator('.jp-OutputArea-output .widget-vbox:not(.widget-vbox .widget-vbox)')
        assert widgets.count() > 0, 'no widget is shown'
        handles = 0
        for i in range(widgets.count()):
            for k in range(widgets.nth(i).locator('.noUi-handle').count()):
                assert slides(page, widgets.nth(i), widgets.nth(i).locator('.noUi-handle').nth(k)), f'slider {k} of widget {i} changes nothing'
                handles += 1
        assert handles > 0, 'no slider is shown'
        live, before = page.locator('.mpx').first, page.locator('.mpx .says').first.inner_text()
        live.locator('button', has_text='halve').click()
        assert page.locator('.mpx .says').first.inner_text() != before
    finally: page.close()


@pytest.mark.sweep(0)
@pytest.mark.chapters('90_plots')
def test_arrow_keys_move_a_figure_and_not_the_notebook_in_jupyterlab(browser, lab):
    page = browser.new_page()
    try:
        run_all_cells(page, lab, 'keys.ipynb')
        box, active = page.locator('.mpx'), page.locator('.jp-Notebook-cell.jp-mod-active')
        def now():
            return (box.evaluate('b => [...b.querySelectorAll("input")].map(e => [e.value, e.checked])'),
                    active.evaluate('e => [...e.parentElement.children].indexOf(e)'))
        for control in box.locator('input[type=range], input[type=radio]:checked').all():
            box.scroll_into_view_if_needed()
            control.focus()
            before = now()
            page.keyboard.press('ArrowRight')
            assert now()[0] != before[0] and now()[1] == before[1]
    finally: page.close()


def test_there_are_widgets_to_try(): 
    assert {'05_recipe', '90_plots'} <= {p.stem for p in WIDGETS} and {'01_formats', '04_failures', '14_simulator'} <= {p.stem for p in LIVE}


def test_the_sheet_prints_on_one_page(browser, course_pages):
    page = browser.new_page()
    try:
        page.goto((course_pages/'98_sheet.html').as_uri())
        assert re.findall(rb'/Type /Pages?\b.*?/Count (\d+)', page.pdf(prefer_css_page_size=True), re.S) == [b'1']
        page.emulate_media(media='print')
        page.set_viewport_size({'width': 733, 'height': 1060})
        assert page.evaluate('[...document.querySelectorAll("pre")].every(p => p.scrollWidth <= p.clientWidth)')
    finally: page.close()
