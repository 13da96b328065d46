"""`python -m realm` is `realm`."""

import sys

from realm.cli import main

sys.exit(main())
