"""Makes ``python -m tools.bench`` the same as ``teraio bench``.

Covers the start of the process only.
Does not parse or measure anything: ``cli`` and ``command`` do.
Must stay true: the process ends with the code that ``cli.main`` returns.
"""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
