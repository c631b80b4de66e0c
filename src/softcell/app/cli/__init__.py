"""The command line: a thin layer over `softcell.api`.

`main` imports the module of a command only when that command runs or shows its own help, because those modules import
torch and `softcell --help` must answer at once.
"""
