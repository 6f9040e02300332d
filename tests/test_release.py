"`make release`: what it refuses, and what it runs"
import re

import pytest
from conftest import ROOT

from tools import release


@pytest.fixture
def tree(tmp_path, monkeypatch):
    "A tree whose version and citation agree, and that git finds unchanged"
    monkeypatch.setattr(release, 'ROOT', tmp_path)
    monkeypatch.setattr(release.subprocess, 'run', lambda *a, **k: type('Done', (), dict(stdout='')))
    (tmp_path/'CITATION.cff').write_text('version: 1.2.3\n')
    return tmp_path


def test_a_release_has_a_day_and_one_version(tree):
    assert release.refusals('1.2.3', '2027-01-31') == []
    assert 'unreleased' in release.refusals('1.2.3', 'unreleased')[0]
    assert 'CITATION.cff' in release.refusals('1.2.4', '2027-01-31')[0]


def test_a_release_needs_a_committed_tree(tree, monkeypatch):
    monkeypatch.setattr(release.subprocess, 'run', lambda *a, **k: type('Done', (), dict(stdout=' M setup.py')))
    assert 'setup.py' in release.refusals('1.2.3', '2027-01-31')[0]


@pytest.mark.chapters('index')
def test_the_changelog_has_a_section_for_this_version():
    assert release.day_of(release.version(), (ROOT/'CHANGELOG.md').read_text())
    assert release.day_of('9.9', '## 9.9 (2030-01-01)\n') == '2030-01-01' and release.day_of('9.8', '## 9.9 (x)') == ''


@pytest.mark.chapters('index')
def test_readmes_code_is_what_the_wheel_runs():
    code = release.snippets((ROOT/'README.md').read_text())
    compile(code, 'README', 'exec')
    assert len(re.findall(r'^(fp16|cured|bf16) = ', code, re.M)) == 3
