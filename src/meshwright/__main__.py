"""``python -m meshwright`` is the command line."""

import sys

from meshwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
