"""Makes ``python -m tools`` (``python -m teraio_tools`` once installed) the same as the ``teraio`` command.

Covers the start of the process only.
Does not parse or run anything: ``cli`` does.
Must stay true: the process ends with the code that ``cli.main`` returns.
"""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
