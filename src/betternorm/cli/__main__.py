"""``python -m betternorm.cli``."""

import sys

from betternorm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
