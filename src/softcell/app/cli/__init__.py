"""The command line: one file per command, each a thin layer over `softcell.api`.

Nothing here imports torch before a command runs, so that `--help` answers at once.
"""
