"""`python -m sheer` is the `sheer` command."""

import sys

from sheer.cli import main

if __name__ == "__main__":
    sys.exit(main())
