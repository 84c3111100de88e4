"""The processes that hold one contender each: opened once, then one measurement per command.

Covers the commands, the clock, and one module per library that is measured.
Does not choose what runs when: the parent's ``rounds`` does.
Must stay true: this package imports the standard library and its own modules alone, and each library only when it is
asked for, because it also runs under the interpreters of other environments, in which the rest of the tree is absent.
"""
