"""`python -m realm` is `realm`."""

import sys

from realm.cli import program

sys.exit(program())
