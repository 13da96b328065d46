"""Entry point of `python -m realm`, the same as `realm`."""

import sys

from realm.cli import program

sys.exit(program())
