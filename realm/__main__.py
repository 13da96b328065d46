"""Entry point of `python -m realm`, which does the same as the command `realm`."""

import sys

from realm.cli import program

sys.exit(program())
