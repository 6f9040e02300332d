"What makes pages, README and site out of the notebooks; not part of the wheel"
import sys

sys.modules.setdefault('rfc3987_syntax', None)  # jsonschema's grammar of addresses, which nbformat's import waits 1.4 s for and never uses
