"""The command line of teraio: it reads what the runtime produces, and shows it to people.

Covers the ``teraio`` command and what stands behind its subcommands: rendering, argument parsing, demonstrations.
Does not decide, plan or move anything: ``teraio`` does, over ``lifetime`` and ``io_backend``.
Must stay true: nothing imports this package, and inside it imports are relative, because it is called ``tools`` in the
source tree and ``teraio_tools`` once installed.
"""
