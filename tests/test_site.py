"The Quarto site: its definition and the notebooks that go into it; building it needs Quarto and is CI's work"
import configparser, importlib.util, os, re, subprocess, sys

import pytest
from conftest import NBS, ROOT

nbformat = pytest.importorskip('nbformat')
pytest.importorskip('nbclient')

from mpcourse import pages as P


def load_site():
    spec = importlib.util.spec_from_file_location('site_builder', ROOT/'.ci/site.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_quarto_one_sentence_and_a_failure(tmp_path):
    r = subprocess.run([sys.executable, ROOT/'.ci/site.py'], capture_output=True, text=True, timeout=120, env={**os.environ, 'PATH': str(tmp_path)})
    assert r.returncode == 1 and r.stdout == '' and 'https://quarto.org/docs/get-started/' in r.stderr and r.stderr.count('\n') == 1


def test_link_and_output_folder():
    link = ROOT/'nbs/_quarto.yml'
    assert link.is_symlink() and os.readlink(link) == '../_quarto.yml' and link.resolve() == ROOT/'_quarto.yml'
    cfg = configparser.ConfigParser(delimiters=['='])
    cfg.read(ROOT/'settings.ini', encoding='utf-8')
    yml = (ROOT/'_quarto.yml').read_text()
    assert re.search(r'^  output-dir: (\S+)$', yml, re.M)[1] == cfg['DEFAULT']['doc_path']
    assert 'gfm: default' in yml and 'commonmark' not in yml and 'custom_quarto_yml' not in cfg['DEFAULT']


def test_sidebar_lists_every_notebook_once_in_order():
    listed = re.findall(r'^ +- (\S+\.ipynb)$', (ROOT/'_quarto.yml').read_text(), re.M)
    assert listed == ['index.ipynb'] + [p.name for p in NBS if p.stem != 'index']


def test_widgets_become_html():
    site = load_site()
    view = {site.VIEW: {'model_id': 'a'}, 'text/plain': 'IntSlider()'}
    cell = nbformat.v4.new_code_cell('w', outputs=[nbformat.v4.new_output('display_data', view),
                                                   nbformat.v4.new_output('display_data', {**view, 'text/html': '<i>frames</i>'}),
                                                   nbformat.v4.new_output('stream', text='said')])
    skipped = nbformat.v4.new_code_cell('x', metadata={'mpcourse': {'skipped': 'not run here'}})
    nb = nbformat.v4.new_notebook(cells=[cell, skipped], metadata={'mpcourse': {'status': 'ok'}, 'widgets': {site.STATE: {'state': {
        'a': {'model_name': 'IntSliderModel', 'state': {'description': 'k', 'value': 3, 'min': 0, 'max': 9}}}}}})
    first, second, third = site.for_site(nb).cells[0].outputs
    assert 'type="range"' in first.data['text/html'] and second.data == {'text/html': '<i>frames</i>'} and third.text == 'said'
    assert 'not run here' in nb.cells[1].outputs[0].data['text/html'] and not nb.metadata.get('widgets') and site.VIEW not in str(nb)


def test_stale_chapters_are_found(tmp_path):
    site = load_site()
    assert {c.stem for c in site.stale(tmp_path)} == {p.stem for p in NBS} and P.read_chapter(NBS[0]).title
